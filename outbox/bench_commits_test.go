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
	commitTrigger = flag.String("commits.trigger", "", "a table definition to compare with instead of that of Migrate: notify is that of version 2")
)

// commitSlice is how long one table is written to before it is the other's turn, so that what else
// the machine does meanwhile meets both.
const commitSlice = 250 * time.Millisecond

// commitLead precedes each slice where drainers work. Commits in it do not count: a drainer that
// nothing wakes begins up to a poll later than one that the trigger wakes, and does less meanwhile.
const commitLead = 250 * time.Millisecond

// BenchmarkCommits commits rows to PostgreSQL from many clients at a time, in turns to a table as
// Migrate makes it and to one without the trigger: alone, and while a drainer works on each table.
// b.N does not matter. With -short, a single pair of two slices shows that the benchmark runs.
func BenchmarkCommits(b *testing.B) {
	pairs, runFor := *commitPairs, *commitFor
	if testing.Short() {
		pairs, runFor = 1, 2*commitSlice
	}
	cluster := pgtest.StartDurable(b)
	for _, drained := range []bool{false, true} {
		b.Run(fmt.Sprintf("clients=%d/drained=%v", *commitClients, drained), func(b *testing.B) {
			with, without := newCommitRun(b, cluster.DSN(), drained), newCommitRun(b, cluster.DSN(), drained)
			without.exec("DROP TRIGGER %[1]s_notify ON %[1]s")
			if *commitTrigger == "notify" {
				with.exec("DROP TRIGGER %[1]s_notify ON %[1]s; CREATE TRIGGER %[1]s_notify AFTER INSERT ON %[1]s FOR EACH STATEMENT EXECUTE FUNCTION %[1]s_notify()")
			}
			var ratios, rates, bare []float64
			for pair := range pairs {
				var commits [2]float64
				for slice := range 2 * int(runFor/commitSlice) {
					i := (slice + slice/2) % 2 // 0 1 1 0, and again
					commits[i] += []*commitRun{with, without}[i].commit()
				}
				a, z := commits[0]/runFor.Seconds(), commits[1]/runFor.Seconds()
				b.Logf("pair %d: %.0f commits/s with the trigger, %.0f without: %.3f", pair, a, z, a/z)
				ratios, rates, bare = append(ratios, a/z), append(rates, a), append(bare, z)
			}
			b.ReportMetric(median(ratios), "ratio")
			b.ReportMetric(median(rates), "commits/s")
			b.ReportMetric(median(bare), "bare-commits/s")
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
	table string
	db    *sql.DB
	store *outbox.SQLStore // nil without a drainer
	conns []*pgx.Conn
}

func newCommitRun(b *testing.B, address string, drained bool) *commitRun {
	b.Helper()
	_, db := newPostgres(b, address+"&default_query_exec_mode=exec")
	r := &commitRun{B: b, table: tableOf(db), db: db}
	for range *commitClients {
		conn, err := pgx.Connect(b.Context(), address)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = conn.Close(context.Background()) })
		r.conns = append(r.conns, conn)
	}
	if !drained {
		return r
	}
	r.store = sqlStore(b, outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: db, Table: r.table, Listen: listenAt(address)})
	d, err := outbox.NewDrainer(outbox.Config{Store: r.store, Bus: outbox.JetStream(openBus(b, jetstream.Config{}))})
	if err != nil {
		b.Fatal(err)
	}
	d.Start()
	b.Cleanup(func() { kill(d) })
	return r
}

func (r *commitRun) exec(query string) {
	r.Helper()
	if _, err := r.db.ExecContext(r.Context(), fmt.Sprintf(query, r.table)); err != nil {
		r.Fatal(err)
	}
}

// commit lets the clients commit as fast as they can for a slice, and returns how many commits that
// would be in one that was not exceeded.
func (r *commitRun) commit() float64 {
	r.Helper()
	began := time.Now()
	if r.store != nil {
		began = began.Add(commitLead)
	}
	ctx, cancel := context.WithDeadline(r.Context(), began.Add(commitSlice))
	defer cancel()
	var commits atomic.Int64
	var all sync.WaitGroup
	for i, conn := range r.conns {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				if _, err := conn.Exec(r.Context(), "INSERT INTO "+r.table+" (aggregatetype, aggregateid, payload) VALUES ($1, $2, $3)",
					"orders", fmt.Sprintf("k%d-%d", i, n%10), `{"order":1}`); err != nil {
					r.Error(err)
					return
				}
				if !time.Now().Before(began) {
					commits.Add(1)
				}
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	if r.store != nil {
		eventually(r, "all is drained", func() bool {
			st, err := r.store.Stats(r.Context())
			return err == nil && st.Pending+st.Claimed == 0
		})
	}
	r.exec("TRUNCATE %s")
	return float64(commits.Load()) * commitSlice.Seconds() / took.Seconds()
}
