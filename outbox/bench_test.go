package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
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

// claimTime is the quickest of some claims of ten records.
func claimTime(tb testing.TB, s *outbox.SQLStore, db *sql.DB, round string) time.Duration {
	tb.Helper()
	best := time.Hour
	for i := range 20 {
		for n := range 10 {
			if err := s.Add(tb.Context(), db, &outbox.Record{ID: fmt.Sprintf("%s-%d-%d", round, i, n), Topic: "orders", Key: fmt.Sprint("k", n)}); err != nil {
				tb.Fatal(err)
			}
		}
		began := time.Now()
		c, err := s.Claim(tb.Context(), outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: time.Hour})
		best = min(best, time.Since(began))
		if err != nil || len(c.Records) != 10 {
			tb.Fatalf("got %d records, %v", len(c.Records), err)
		}
		if err := s.Settle(tb.Context(), "w", outbox.Settlement{Sent: c.Records}); err != nil {
			tb.Fatal(err)
		}
	}
	return best
}

// Claims take the same time whatever was sent before (a million rows in the benchmarks).
func TestClaimsDoNotSlowDownWithSentRows(t *testing.T) {
	address := pgtest.Start(t)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		t.Run(string(dialect), func(t *testing.T) {
			s, db, table := flatStore(t, dialect, address)
			before := claimTime(t, s, db, "before")
			fill(t, db, dialect, table, 50_000)
			after := claimTime(t, s, db, "after")
			t.Logf("empty %v, with 50,000 sent rows %v", before, after)
			if after > 3*before+2*time.Millisecond {
				t.Errorf("a claim took %v, and with 50,000 sent rows %v", before, after)
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
	return s, db, fmt.Sprintf("outbox_test_%d", tables)
}

// BenchmarkClaim claims and settles ten rows in a table with so many sent ones.
func BenchmarkClaim(b *testing.B) {
	address := pgtest.Start(b)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		for _, sent := range []int{0, 1_000_000} {
			b.Run(fmt.Sprintf("%s/sent=%d", dialect, sent), func(b *testing.B) {
				s, db, table := flatStore(b, dialect, address)
				if sent > 0 {
					fill(b, db, dialect, table, sent)
				}
				var claims, settles time.Duration
				if _, err := db.ExecContext(b.Context(), map[outbox.Dialect]string{outbox.SQLite: "PRAGMA wal_checkpoint(TRUNCATE)", outbox.PostgreSQL: "CHECKPOINT"}[dialect]); err != nil {
					b.Fatal(err)
				}
				b.ResetTimer()
				for i := range b.N {
					for n := range 10 {
						if err := s.Add(b.Context(), db, &outbox.Record{ID: fmt.Sprintf("%d-%d", i, n), Topic: "orders", Key: fmt.Sprint("k", n)}); err != nil {
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
					if err := s.Settle(b.Context(), "w", outbox.Settlement{Sent: c.Records}); err != nil {
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

// BenchmarkDrain publishes rows of 100 keys, and compares with the database's own limit: the same claims and settlements without
// a publish.
func BenchmarkDrain(b *testing.B) {
	address := pgtest.Start(b)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		for _, drainers := range []int{0, 1, 4} {
			b.Run(fmt.Sprintf("%s/drainers=%d", dialect, drainers), func(b *testing.B) {
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
				bus := openBus(b, jetstream.Config{})
				b.ResetTimer()
				if drainers == 0 {
					claimAndSettle(b, s)
				}
				var all sync.WaitGroup
				for range drainers {
					all.Go(func() {
						d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: bus})
						if err == nil {
							_, err = d.Drain(context.Background())
						}
						if err != nil {
							b.Error(err)
						}
					})
				}
				all.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "rows/s")
			})
		}
	}
}

func claimAndSettle(b *testing.B, s *outbox.SQLStore) {
	b.Helper()
	for {
		c, err := s.Claim(b.Context(), outbox.ClaimOptions{Worker: "w", Limit: 200, Lease: time.Hour})
		if err != nil {
			b.Fatal(err)
		}
		if len(c.Records) == 0 {
			return
		}
		if err := s.Settle(b.Context(), "w", outbox.Settlement{Sent: c.Records}); err != nil {
			b.Fatal(err)
		}
	}
}
