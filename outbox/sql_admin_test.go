package outbox_test

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"
	"time"

	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// fillPending adds rows of about 2 KB that wait, each in a lane of its own, and of the first some
// are parked. The payloads do not compress, and are as large as PostgreSQL keeps in the row itself.
func fillPending(tb testing.TB, db *sql.DB, dialect outbox.Dialect, table string, n int) {
	tb.Helper()
	query := `WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %[2]d)
INSERT INTO %[1]s (id, aggregatetype, payload, status) SELECT 'p-' || i, 'orders', '"' || hex(randomblob(920)) || '"', CASE WHEN i <= 7 THEN 'error' ELSE 'pending' END FROM n`
	if dialect == outbox.PostgreSQL {
		query = `INSERT INTO %[1]s (id, aggregatetype, payload, status)
SELECT 'p-' || i, 'orders', '"' || (SELECT string_agg(md5(i || '.' || j), '') FROM generate_series(1, 57) AS m (j)) || '"', CASE WHEN i <= 7 THEN 'error' ELSE 'pending' END
FROM generate_series(1, %[2]d) AS n (i)`
	}
	if _, err := db.ExecContext(tb.Context(), fmt.Sprintf(query, table, n)); err != nil {
		tb.Fatal(err)
	}
}

// Stats reads an index, and not the rows, which may be large.
func TestStatsReadsAnIndexOnly(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		began := time.Now()
		fillPending(t, t.db, t.dialect, t.table, 5_000)
		// as autovacuum does: until then the rows say who may see them
		if t.dialect == outbox.PostgreSQL {
			if _, err := t.db.ExecContext(t.Context(), "VACUUM ANALYZE "+t.table); err != nil {
				t.Fatal(err)
			}
		}
		want := map[outbox.Dialect]string{outbox.SQLite: "USING COVERING INDEX outbox_lanes", outbox.PostgreSQL: "Index Only Scan using " + t.table + "_lanes"}[t.dialect]
		if plan := explain(t, t.db, t.dialect, t.store.StatsSQL()); !strings.Contains(plan, want) || strings.Contains(plan, "Seq Scan") {
			t.Errorf("the plan is\n%s\nwant %s", plan, want)
		}
		st, err := t.store.Stats(t.Context())
		if err != nil || st.Pending != 4_993 || st.Errors != 7 || st.Claimed != 0 || st.OldestAge > time.Since(began)+time.Second {
			t.Errorf("got %+v, %v", st, err)
		}
	})
}

// A purge that meets a row which somebody is about to retry leaves it.
func TestPurgeLeavesWhatIsRetriedMeanwhile(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	s, db := newPostgres(t, address)
	table := tableOf(db)
	for _, id := range []string{"retried", "other"} {
		if err := s.Add(t.Context(), db, &outbox.Record{ID: id, Topic: "orders"}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := s.Claim(t.Context(), outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: time.Hour})
	if err != nil || len(c.Records) != 2 {
		t.Fatalf("%d records, %v", len(c.Records), err)
	}
	var st outbox.Settlement
	for _, r := range c.Records {
		st.Failed = append(st.Failed, outbox.Failure{Record: r, Park: true})
	}
	if _, err := s.Settle(t.Context(), "w", st); err != nil {
		t.Fatal(err)
	}
	tx, err := openDB(t, "pgx", address).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	// As Retry does it.
	if _, err := tx.ExecContext(t.Context(), "UPDATE "+table+" SET status = 'pending', next_at = 0, attempts = 0, publish_began = 0 WHERE status = 'error' AND id = 'retried'"); err != nil {
		t.Fatal(err)
	}
	type purged struct {
		n   int
		err error
	}
	done := make(chan purged, 1)
	go func() {
		n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Errored})
		done <- purged{n, err}
	}()
	eventually(t, "the purge ends, or waits for the retry", func() bool {
		var waiting int
		if err := db.QueryRowContext(t.Context(), "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'").Scan(&waiting); err != nil {
			t.Error(err)
		}
		return waiting > 0 || len(done) > 0
	})
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got.n != 1 || got.err != nil {
		t.Errorf("purge: %d, %v; want the other one", got.n, got.err)
	}
	list, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Pending})
	if err != nil || len(list) != 1 || list[0].ID != "retried" {
		t.Errorf("pending are %+v, %v; want the one that was retried", list, err)
	}
}

// BenchmarkStats asks what waits among 100,000 rows of 2 KB, or 10,000 with -short.
func BenchmarkStats(b *testing.B) {
	rows := 100_000
	if testing.Short() {
		rows = 10_000
	}
	address := pgtest.Start(b)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		s, db, table := flatStore(b, dialect, address)
		fillPending(b, db, dialect, table, rows)
		if dialect == outbox.PostgreSQL {
			if _, err := db.ExecContext(b.Context(), "VACUUM ANALYZE "+table); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(fmt.Sprintf("%s/rows=%d", dialect, rows), func(b *testing.B) {
			for range b.N {
				if st, err := s.Stats(b.Context()); err != nil || st.Pending != rows-7 || st.Errors != 7 {
					b.Fatalf("got %+v, %v", st, err)
				}
			}
		})
	}
}
