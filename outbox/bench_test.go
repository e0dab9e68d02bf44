package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// fill adds sent rows without the detour of sending them.
func fill(tb testing.TB, db *sql.DB, dialect outbox.Dialect, table string, n int) {
	tb.Helper()
	numbers := "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) SELECT"
	from := " FROM n"
	if dialect == outbox.PostgreSQL {
		numbers, from = "SELECT", " FROM generate_series(1, %d) AS n (i)"
	}
	query := "INSERT INTO " + table + " (id, aggregatetype, aggregateid, payload, status, sent_at) " + numbers +
		" 'sent-' || i, 'orders', 'k' || (i %% 1000), '{\"order\":1}', 'sent', 1" + from
	if _, err := db.ExecContext(tb.Context(), fmt.Sprintf(query, n)); err != nil {
		tb.Fatal(err)
	}
}

// claimTime is how long a claim of ten records takes.
func claimTime(tb testing.TB, s *outbox.SQLStore, db *sql.DB, round int) time.Duration {
	tb.Helper()
	for n := range 10 {
		if err := s.Add(tb.Context(), db, &outbox.Record{ID: fmt.Sprintf("%d-%d", round, n), Topic: "orders", Key: fmt.Sprint("k", n)}); err != nil {
			tb.Fatal(err)
		}
	}
	began := time.Now()
	c, err := s.Claim(tb.Context(), outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: time.Hour})
	took := time.Since(began)
	if err != nil || len(c.Records) != 10 {
		tb.Fatalf("got %d records, %v", len(c.Records), err)
	}
	if _, err := s.Settle(tb.Context(), "w", outbox.Settlement{Sent: c.Records}); err != nil {
		tb.Fatal(err)
	}
	return took
}

// Claims take the same time whatever was sent before (a million rows in the benchmarks). Claims of
// a store where nothing was sent are the control, made in turns.
func TestClaimsDoNotSlowDownWithSentRows(t *testing.T) {
	address := pgtest.Start(t)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		t.Run(string(dialect), func(t *testing.T) {
			control, controlDB, _ := flatStore(t, dialect, address)
			s, db, table := flatStore(t, dialect, address)
			fill(t, db, dialect, table, 50_000)
			empty, full := time.Hour, time.Hour // the quickest of each
			for round := range 20 {
				empty = min(empty, claimTime(t, control, controlDB, round))
				full = min(full, claimTime(t, s, db, round))
			}
			t.Logf("empty %v, with 50,000 sent rows %v", empty, full)
			if full > 3*empty+2*time.Millisecond {
				t.Errorf("a claim took %v, and with 50,000 sent rows %v", empty, full)
			}
		})
	}
}

func flatStore(tb testing.TB, dialect outbox.Dialect, address string) (*outbox.SQLStore, *sql.DB, string) {
	tb.Helper()
	if dialect == outbox.SQLite {
		s, db := newSQLite(tb)
		return s, db, outbox.DefaultTable
	}
	s, db := newPostgres(tb, address+"&default_query_exec_mode=exec") // as SQLConfig.DB says
	return s, db, tableOf(db)
}

// BenchmarkClaim claims and settles ten rows in a table with so many sent ones: a million, or ten
// thousand with -short.
func BenchmarkClaim(b *testing.B) {
	many := 1_000_000
	if testing.Short() {
		many = 10_000
	}
	address := pgtest.Start(b)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		for _, sent := range []int{0, many} {
			s, db, table := flatStore(b, dialect, address)
			if sent > 0 {
				fill(b, db, dialect, table, sent)
			}
			checkpoint := map[outbox.Dialect]string{outbox.SQLite: "PRAGMA wal_checkpoint(TRUNCATE)", outbox.PostgreSQL: "CHECKPOINT"}
			if _, err := db.ExecContext(b.Context(), checkpoint[dialect]); err != nil {
				b.Fatal(err)
			}
			added := 0
			b.Run(fmt.Sprintf("%s/sent=%d", dialect, sent), func(b *testing.B) {
				var claims, settles time.Duration
				for range b.N {
					for n := range 10 {
						added++
						if err := s.Add(b.Context(), db, &outbox.Record{ID: strconv.Itoa(added), Topic: "orders", Key: fmt.Sprint("k", n)}); err != nil {
							b.Fatal(err)
						}
					}
					began := time.Now()
					c, err := s.Claim(b.Context(), outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: time.Hour})
					claims += time.Since(began)
					if err != nil || len(c.Records) != 10 {
						b.Fatalf("got %d records, %v", len(c.Records), err)
					}
					began = time.Now()
					if _, err := s.Settle(b.Context(), "w", outbox.Settlement{Sent: c.Records}); err != nil {
						b.Fatal(err)
					}
					settles += time.Since(began)
				}
				b.ReportMetric(float64(settles.Microseconds())/float64(b.N), "µs/settle")
				b.ReportMetric(float64(claims.Microseconds())/float64(b.N), "µs/claim")
			})
		}
	}
}

// BenchmarkDrain publishes rows of 100 keys. Each is next to the database's own limit: the same
// claims and settlements of as many rows by as many workers, without a publish.
func BenchmarkDrain(b *testing.B) {
	cluster := pgtest.StartDurable(b)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		for _, drainers := range []int{1, 4} {
			b.Run(fmt.Sprintf("%s/drainers=%d", dialect, drainers), func(b *testing.B) {
				limited := backlog(b, dialect, cluster.DSN())
				began := time.Now()
				together(b, drainers, func(i int) error { return claimAndSettle(b.Context(), limited, fmt.Sprint("w", i)) })
				limit := float64(b.N) / time.Since(began).Seconds()

				s, bus := backlog(b, dialect, cluster.DSN()), openBus(b, jetstream.Config{})
				var published atomic.Int64
				b.ResetTimer()
				together(b, drainers, func(int) error {
					d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: outbox.JetStream(bus)})
					if err != nil {
						return err
					}
					did, err := d.Drain(b.Context())
					published.Add(int64(did.Published))
					return err
				})
				b.StopTimer()
				if n := published.Load(); n != int64(b.N) {
					b.Fatalf("%d of %d rows were published", n, b.N)
				}
				rate := float64(b.N) / b.Elapsed().Seconds()
				b.ReportMetric(rate, "rows/s")
				b.ReportMetric(limit, "limit-rows/s")
				b.ReportMetric(rate/limit, "of-limit")
			})
		}
	}
}

// backlog makes an outbox with b.N rows.
func backlog(b *testing.B, dialect outbox.Dialect, address string) *outbox.SQLStore {
	b.Helper()
	s, db, _ := flatStore(b, dialect, address)
	tx, err := db.BeginTx(b.Context(), nil)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	for i := range b.N {
		if err := s.Add(b.Context(), tx, &outbox.Record{Topic: "orders", Key: fmt.Sprint("k", i%100), Payload: []byte(`{"order":1}`)}); err != nil {
			b.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		b.Fatal(err)
	}
	return s
}

// together runs f so often at once.
func together(b *testing.B, n int, f func(i int) error) {
	b.Helper()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			if err := f(i); err != nil {
				b.Error(err)
			}
		})
	}
	all.Wait()
}

func claimAndSettle(ctx context.Context, s *outbox.SQLStore, worker string) error {
	for {
		c, err := s.Claim(ctx, outbox.ClaimOptions{Worker: worker, Limit: 200, Lease: time.Hour})
		if err != nil {
			return err
		}
		if len(c.Records) == 0 {
			if !c.More { // otherwise others were quicker
				return nil
			}
			continue
		}
		if _, err := s.Settle(ctx, worker, outbox.Settlement{Sent: c.Records}); err != nil {
			return err
		}
	}
}

// BenchmarkLatency commits a transaction now and then, and measures from the end of each commit
// until its event is at a subscriber of the bus: with drainers that are woken, and with nothing but
// polling.
func BenchmarkLatency(b *testing.B) {
	cluster := pgtest.StartDurable(b)
	for _, every := range []time.Duration{5 * time.Millisecond, 300 * time.Millisecond} {
		b.Run(fmt.Sprint("postgres/woken/every=", every), func(b *testing.B) {
			_, db, table := flatStore(b, outbox.PostgreSQL, cluster.DSN())
			s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: db, Table: table, Listen: listenAt(cluster.DSN())})
			if err != nil {
				b.Fatal(err)
			}
			latency(b, s, db, every)
		})
		b.Run(fmt.Sprint("postgres/poll/every=", every), func(b *testing.B) {
			s, db, _ := flatStore(b, outbox.PostgreSQL, cluster.DSN())
			latency(b, s, db, every)
		})
		b.Run(fmt.Sprint("sqlite/poll/every=", every), func(b *testing.B) {
			s, db := newSQLite(b)
			latency(b, s, db, every)
		})
	}
}

func latency(b *testing.B, s *outbox.SQLStore, db *sql.DB, every time.Duration) {
	b.Helper()
	bus := openBus(b, jetstream.Config{})
	arrived := make(chan arrival, b.N+1) // has room for all
	sub, err := bus.Consume(b.Context(), "orders", "latency", jetstream.SubscribeOptions{}, func(_ context.Context, d *jetstream.Delivery) error {
		n, err := strconv.Atoi(string(d.Event.Payload))
		arrived <- arrival{n, time.Now()}
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = sub.Stop(context.Background()) }()
	d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: outbox.JetStream(bus)})
	if err != nil {
		b.Fatal(err)
	}
	d.Start()
	defer func() { _ = d.Stop(context.Background()) }()

	add := func(n int) time.Time {
		tx, err := db.BeginTx(b.Context(), nil)
		if err != nil {
			b.Fatal(err)
		}
		defer func() { _ = tx.Rollback() }()
		if err := s.Add(b.Context(), tx, &outbox.Record{Topic: "orders", Key: fmt.Sprint("k", n%100), Payload: []byte(strconv.Itoa(n))}); err != nil {
			b.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			b.Fatal(err)
		}
		return time.Now()
	}
	add(0) // makes the stream
	await(b, arrived)
	tick := time.NewTicker(every)
	defer tick.Stop()
	committed := make([]time.Time, b.N)
	b.ResetTimer()
	for i := range b.N {
		<-tick.C
		committed[i] = add(i)
	}
	took := make([]time.Duration, b.N)
	for i := range b.N {
		a := await(b, arrived)
		took[i] = a.at.Sub(committed[a.n])
	}
	b.StopTimer()
	slices.Sort(took)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	b.ReportMetric(ms(took[b.N/2]), "p50-ms")
	b.ReportMetric(ms(took[b.N*99/100]), "p99-ms")
	b.ReportMetric(0, "ns/op") // it is that of the ticker
}

// arrival is when the event of a commit came.
type arrival struct {
	n  int
	at time.Time
}

func await(b *testing.B, arrived <-chan arrival) arrival {
	b.Helper()
	select {
	case a := <-arrived:
		return a
	case <-time.After(patience):
		b.Fatal("no event")
		return arrival{}
	}
}
