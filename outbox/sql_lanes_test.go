package outbox_test

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/outbox"
)

// A topic that is left out costs a claim two looks, however many rows of it wait: one claim finds
// those of others.
func TestBacklogOfATopicThatIsLeftOutHidesNoOthers(t *testing.T) {
	t.Parallel()
	const rows = 50_000
	forSQL(t, func(t *sqlTest) {
		query := `WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %[2]d)
INSERT INTO %[1]s (id, aggregatetype, aggregateid, payload) SELECT 'm' || i, 'mails', CASE WHEN i %% 10 = 0 THEN 'k' || i ELSE '' END, '1' FROM n`
		if t.dialect == outbox.PostgreSQL {
			query = `INSERT INTO %[1]s (id, aggregatetype, aggregateid, payload)
SELECT 'm' || i, 'mails', CASE WHEN i %% 10 = 0 THEN 'k' || i ELSE '' END, '1' FROM generate_series(1, %[2]d) AS n (i)`
		}
		if _, err := t.db.ExecContext(t.Context(), fmt.Sprintf(query, t.table, rows)); err != nil {
			t.Fatal(err)
		}
		claim := func(limit int, except ...string) []string {
			t.Helper()
			began := time.Now()
			c, err := t.store.Claim(t.Context(), outbox.ClaimOptions{Worker: "w", Limit: limit, Lease: time.Hour, ExceptTopics: except, PassErrors: limit%2 == 0})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("limit %d, without %q: %d records in %v", limit, except, len(c.Records), time.Since(began))
			var ids []string
			for _, r := range c.Records {
				ids = append(ids, r.ID)
			}
			slices.Sort(ids)
			return ids
		}
		add := func(records ...string) (ids []string) {
			t.Helper()
			for _, r := range records {
				topic, key, _ := strings.Cut(r, "/")
				if err := t.store.Add(t.Context(), t.db, &outbox.Record{ID: r, Topic: topic, Key: key}); err != nil {
					t.Fatal(err)
				}
			}
			slices.Sort(records)
			return records
		}
		want := add("orders", "zebra/k")
		if got := claim(200, "mails"); !slices.Equal(got, want) {
			t.Errorf("claimed were %q, want %q", got, want)
		}
		// From the midst of the topic, all the way round, and with neighbors.
		if got := claim(1); len(got) != 1 || !strings.HasPrefix(got[0], "m") {
			t.Fatalf("claimed were %q", got)
		}
		want = add("a", "a/k", "mail", "mail/k", "mails-x", "mails-x/k", "mails.x", "mails.x/k", "mails0", "mails0/k", "mailsx", "z", "z/k", "Z", "0", "-", "-/k")
		if got := claim(199, "absent", "mails"); !slices.Equal(got, want) {
			t.Errorf("claimed were %q, want %q", got, want)
		}
		if got := claim(200, "mails"); len(got) > 0 {
			t.Errorf("claimed were %q, want nothing", got)
		}
		if got := claim(200); len(got) != 200 {
			t.Errorf("without a pause, %d were claimed, want 200", len(got))
		}
	})
}

// Claims look at lanes by the index of lanes, with and without topics to leave out, whatever the
// table holds.
func TestLooksGoByTheIndexOfLanes(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		fillPending(t, t.db, t.dialect, t.table, 5_000)
		fill(t, t.db, t.dialect, t.table, 5_000)
		for _, analyzed := range []bool{false, true} {
			if analyzed {
				if _, err := t.db.ExecContext(t.Context(), "ANALYZE"); err != nil {
					t.Fatal(err)
				}
			}
			for _, opts := range []outbox.ClaimOptions{{}, {PassErrors: true}, {ExceptTopics: []string{"orders"}}, {ExceptTopics: []string{"orders"}, PassErrors: true}} {
				opts.Limit = 200
				topics, lanes, rows := t.store.LookSQL(&opts)
				for _, q := range []outbox.SQL{topics, lanes, rows} {
					plan := explain(t, t.db, t.dialect, q.Query, q.Args...)
					if strings.Contains(plan, "SCAN o") || strings.Contains(plan, "Seq Scan on "+t.table) {
						t.Errorf("analyzed %v, %+v: %s", analyzed, opts, plan)
					}
				}
				plan := explain(t, t.db, t.dialect, lanes.Query, lanes.Args...)
				if want := map[outbox.Dialect]string{outbox.SQLite: "SEARCH o USING INDEX outbox_lanes (lane>? AND lane<?)", outbox.PostgreSQL: "Index Only Scan using " + t.table + "_lanes"}[t.dialect]; !strings.Contains(plan, want) {
					t.Errorf("analyzed %v, %+v: no %q in\n%s", analyzed, opts, want, plan)
				}
			}
		}
	})
}

// explain is how the database would answer.
func explain(tb testing.TB, db *sql.DB, dialect outbox.Dialect, query string, args ...any) string {
	tb.Helper()
	prefix := map[outbox.Dialect]string{outbox.SQLite: "EXPLAIN QUERY PLAN ", outbox.PostgreSQL: "EXPLAIN "}[dialect]
	rows, err := db.QueryContext(tb.Context(), prefix+query, args...)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var plan strings.Builder
	for rows.Next() {
		var line string
		to := []any{&line}
		if dialect == outbox.SQLite {
			to = []any{new(any), new(any), new(any), &line}
		}
		if err := rows.Scan(to...); err != nil {
			tb.Fatal(err)
		}
		plan.WriteString(line + "\n")
	}
	if err := rows.Err(); err != nil {
		tb.Fatal(err)
	}
	return plan.String()
}
