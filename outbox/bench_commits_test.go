package outbox_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

var (
	commitPairs   = flag.Int("commits.pairs", 9, "how many pairs of runs BenchmarkCommits compares")
	commitFor     = flag.Duration("commits.for", 3*time.Second, "how long each run takes")
	commitClients = flag.Int("commits.clients", 32, "how many clients commit at a time")
)

// BenchmarkCommits commits rows to PostgreSQL from many clients at a time, in turns to a table as Migrate makes it and to one
// without the trigger: alone, and while a drainer works on the table. b.N does not matter.
func BenchmarkCommits(b *testing.B) {
	cluster := pgtest.StartDurable(b)
	for _, drained := range []bool{false, true} {
		b.Run(fmt.Sprintf("clients=%d/drained=%v", *commitClients, drained), func(b *testing.B) {
			with, without := newCommitRun(b, cluster.DSN(), drained), newCommitRun(b, cluster.DSN(), drained)
			without.exec("DROP TRIGGER " + without.table + "_notify ON " + without.table)
			var ratios, rates, bare []float64
			for pair := range *commitPairs {
				first, second := with, without
				if pair%2 == 1 {
					first, second = second, first
				}
				one, two := first.rate(), (second.rate()+second.rate())/2 // so that what changes steadily meanwhile changes nothing
				a, z := (one+first.rate())/2, two
				if first != with {
					a, z = z, a
				}
				b.Logf("pair %d: %.0f commits/s with the trigger, %.0f without: %.3f", pair, a, z, a/z)
				ratios, rates, bare = append(ratios, a/z), append(rates, a), append(bare, z)
			}
			b.ReportMetric(median(ratios), "ratio")
			b.ReportMetric(median(rates), "commits/s")
			b.ReportMetric(median(bare), "bare-commits/s")
			if drained {
				b.ReportMetric(median(with.ages), "p50-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

func median(list []float64) float64 {
	slices.Sort(list)
	return list[len(list)/2]
}

// commitRun is one of the tables that are compared.
type commitRun struct {
	*testing.B
	address, table string
	db             *sql.DB
	drained        bool
	bus            *jetstream.Bus

	mu   sync.Mutex
	ages []float64 // of rows when they were published, in milliseconds
}

func newCommitRun(b *testing.B, address string, drained bool) *commitRun {
	b.Helper()
	_, db := newPostgres(b, address+"&default_query_exec_mode=exec")
	r := &commitRun{B: b, address: address, table: fmt.Sprintf("outbox_test_%d", tables), db: db, drained: drained}
	if drained {
		r.bus = openBus(b, jetstream.Config{})
	}
	return r
}

func (r *commitRun) exec(query string) {
	r.Helper()
	if _, err := r.db.ExecContext(r.Context(), query); err != nil {
		r.Fatal(err)
	}
}

// ageObserver notes how long ago rows were added when they are published.
type ageObserver struct {
	counts
	run *commitRun
}

func (o *ageObserver) Published(age time.Duration, _ bool) {
	o.run.mu.Lock()
	defer o.run.mu.Unlock()
	o.run.ages = append(o.run.ages, float64(age.Microseconds())/1000)
}

// rate is how many commits in a second the clients do.
func (r *commitRun) rate() float64 {
	r.Helper()
	r.exec("TRUNCATE " + r.table)
	r.exec("CHECKPOINT")
	if r.drained {
		s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: r.db, Table: r.table, Listen: listenAt(r.address)})
		if err != nil {
			r.Fatal(err)
		}
		d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: r.bus, Observer: &ageObserver{run: r}})
		if err != nil {
			r.Fatal(err)
		}
		d.Start()
		fallAsleep(r, r.db)
		defer kill(d)
	}
	ctx, cancel := context.WithTimeout(r.Context(), *commitFor)
	defer cancel()
	var commits atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for i := range *commitClients {
		all.Go(func() {
			conn, err := pgx.Connect(r.Context(), r.address)
			if err != nil {
				r.Error(err)
				return
			}
			defer func() { _ = conn.Close(context.Background()) }()
			for n := 0; ctx.Err() == nil; n++ {
				if _, err := conn.Exec(r.Context(), "INSERT INTO "+r.table+" (aggregatetype, aggregateid, payload) VALUES ($1, $2, $3)",
					"orders", fmt.Sprintf("k%d-%d", i, n%10), `{"order":1}`); err != nil {
					r.Error(err)
					return
				}
				commits.Add(1)
			}
		})
	}
	all.Wait()
	return float64(commits.Load()) / time.Since(began).Seconds()
}
