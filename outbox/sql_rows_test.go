package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// sqlTest is a test with an empty store.
type sqlTest struct {
	*testing.T
	dialect outbox.Dialect
	store   *outbox.SQLStore
	db      *sql.DB
	table   string
}

// forSQL runs a test with each database, at the same time.
func forSQL(t *testing.T, run func(t *sqlTest)) {
	t.Helper()
	inTurnForSQL(t, func(t *sqlTest) {
		t.Parallel()
		run(t)
	})
}

// inTurnForSQL runs a test that measures with each database, one after the other.
func inTurnForSQL(t *testing.T, run func(t *sqlTest)) {
	t.Helper()
	address := pgtest.Start(t)
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		t.Run(string(dialect), func(t *testing.T) {
			s, db, table := flatStore(t, dialect, address)
			run(&sqlTest{t, dialect, s, db, table})
		})
	}
}

func claimAll(tb testing.TB, s *outbox.SQLStore) []string {
	tb.Helper()
	c, err := s.Claim(tb.Context(), outbox.ClaimOptions{Worker: "w", Limit: 100, Lease: time.Hour})
	if err != nil {
		tb.Fatal(err)
	}
	ids := make([]string, 0, len(c.Records))
	for _, r := range c.Records {
		ids = append(ids, r.ID)
	}
	return ids
}

// A row that claims could not read is refused: the statement of its writer fails, and nothing is
// held up.
func TestLooselyTypedRowsAreRefused(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		refused := map[string]string{
			"a time as text":       "'a', 't', 'k', '1', '2026-01-01 00:00:00'",
			"a topic with a slash": "'b', 't/u', 'k', '1', 1",
			"no topic":             "'c', '', 'k', '1', 1",
			"no payload":           "'d', 't', 'k', NULL, 1",
		}
		taken := map[string]string{"good": "'good', 't', 'k', '1', 1", "lossless": "'lossless', 't', '', '1', '1759750000123'"}
		// PostgreSQL makes of some what can be read: it rounds a fraction, and writes bytes as
		// hexadecimal digits.
		some, blob := taken, `'\x3132'::bytea`
		if t.dialect == outbox.SQLite {
			some, blob = refused, "x'3132'"
		}
		some["a time with a fraction"] = "'e', 't', '', '1', 1759750000123.5"
		some["an id as a BLOB"] = blob + ", 't', '', '1', 1"
		some["a key as a BLOB"] = "'f', 't', " + blob + ", '1', 1"
		some["a payload as a BLOB"] = "'g', 't', '', " + blob + ", 1"
		insert := "INSERT INTO " + t.table + " (id, aggregatetype, aggregateid, payload, ts) VALUES "
		for name, row := range refused {
			if _, err := t.db.ExecContext(t.Context(), insert+"("+row+")"); err == nil {
				t.Errorf("%s was taken", name)
			} else {
				t.Logf("%s: %v", name, err)
			}
		}
		for name, row := range taken {
			if _, err := t.db.ExecContext(t.Context(), insert+"("+row+")"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if got := claimAll(t, t.store); len(got) != len(taken) {
			t.Errorf("claimed were %q, want %d", got, len(taken))
		}
	})
}

// In a table of SQLite that others made, without STRICT, a row that cannot be read is parked, and
// takes none with it.
func TestRowThatCannotBeReadIsParked(t *testing.T) {
	t.Parallel()
	db := openDB(t, "sqlite", sqliteAddress(filepath.Join(t.TempDir(), "loose.db")))
	s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, DB: db})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), strings.ReplaceAll(s.SQL(), ") STRICT;", ");")); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	r.add("orders", "a")
	r.add("orders", "")
	for id, ts := range map[string]string{"fraction": "1759750000123.5", "text": "'2026-01-01 00:00:00'"} {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload, ts) VALUES ('"+id+"', 'orders', '1', "+ts+")"); err != nil {
			t.Fatal(err)
		}
	}
	r.add("orders", "a")
	if did := r.drain(nil); did.Published != 3 || did.Parked != 2 || did.Failed != 0 {
		t.Errorf("got %+v, want three published and two parked", did)
	}
	r.exactly()
	list, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
	if err != nil || len(list) != 2 {
		t.Fatalf("parked are %d, %v", len(list), err)
	}
	for _, rec := range list {
		if !strings.Contains(rec.LastErr, `"ts"`) || rec.Attempts != 1 || rec.Topic != "orders" {
			t.Errorf("%s: topic %s, %d attempts, %q", rec.ID, rec.Topic, rec.Attempts, rec.LastErr)
		}
	}
	if n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Errored, IDs: []string{"text", "fraction"}}); n != 2 || err != nil {
		t.Errorf("purge: %d, %v", n, err)
	}
}

// What plain SQL can write and the bus would take, or would not even be asked about, is parked,
// with what is wrong.
func TestBadTextIsParked(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		const noJSON, noUTF8 = "the payload is not JSON", "not valid UTF-8"
		rows := []struct{ values, lastErr string }{
			{"'truncated', 'orders', 'a', '', '{\"order\":'", noJSON},
			{"'words', 'orders', '', '', 'not JSON'", noJSON},
			{"'two', 'orders', 'b', '', '1 2'", noJSON},
			{"'deep', 'orders', '', '', '" + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + "'", noJSON},
		}
		if t.dialect == outbox.SQLite { // PostgreSQL keeps nothing of the kind
			rows = append(rows, []struct{ values, lastErr string }{
				{"CAST(x'69ff' AS TEXT), 'orders', '', '', '1'", noUTF8},
				{"'a' || char(0) || 'b\"\\', 'orders', '', '', '1'", "control character"},
				{"'payload', 'orders', '', '', CAST(x'22ff22' AS TEXT)", noJSON},
				{"'type', 'orders', '', CAST(x'ff' AS TEXT), '1'", noUTF8},
				{"'key', 'orders', CAST(x'ff' AS TEXT), '', '1'", noUTF8},
			}...)
		}
		insert := "INSERT INTO " + t.table + " (id, aggregatetype, aggregateid, type, payload) VALUES "
		for _, row := range rows {
			if _, err := t.db.ExecContext(t.Context(), insert+"("+row.values+")"); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := t.db.ExecContext(t.Context(), insert+"('empty', 'orders', 'c', '', '')"); err != nil {
			t.Fatal(err)
		}
		r.added["orders/c"] = []string{"empty", r.add("orders", "c")}
		if did := r.drain(nil); did.Published != 2 || did.Parked != len(rows) || did.Failed != 0 {
			t.Errorf("got %+v, want 2 published and %d parked", did, len(rows))
		}
		r.exactly()
		list, err := t.store.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
		if err != nil || len(list) != len(rows) {
			t.Fatalf("parked are %d, %v; want %d", len(list), err, len(rows))
		}
		for i, rec := range list {
			if !strings.Contains(rec.LastErr, rows[i].lastErr) {
				t.Errorf("%q: last_err %q, want %q", rec.ID, rec.LastErr, rows[i].lastErr)
			}
		}
	})
}

// What is no UTF-8 is refused before the caller's transaction is touched, which PostgreSQL would
// abort.
func TestNoUTF8IsRefusedBeforeTheTransaction(t *testing.T) {
	t.Parallel()
	s, db := newPostgres(t, pgtest.Start(t))
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	for field, rec := range map[string]outbox.Record{
		"id":        {ID: "a\xff"},
		"key":       {Key: "a\xff"},
		"type":      {Type: "a\xff"},
		"header x":  {Headers: map[string]string{"x": "a\xff"}},
		"headers":   {Headers: map[string]string{"x\xff": "a"}},
		"sid":       {SID: "a\xff"},
		"tags":      {Tags: []string{"a", "a\xff"}},
		"caused_by": {CausedBy: []string{"a\xff"}},
		"payload":   {Payload: []byte("\"\xff\"")},
	} {
		rec.Topic = "orders"
		err := s.Add(t.Context(), tx, &rec)
		refused, ok := errors.AsType[*jetstream.Error](err)
		if !ok || refused.Code != jetstream.CodeBadOptions || !strings.Contains(refused.Msg, field) {
			t.Errorf("%s: got %v", field, err)
		}
	}
	if err := s.Add(t.Context(), tx, &outbox.Record{ID: "good", Topic: "orders", Type: "ü", SID: "ü", Tags: []string{"ü"}}); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if got := claimAll(t, s); !slices.Equal(got, []string{"good"}) {
		t.Errorf("claimed were %q", got)
	}
}

func listenAt(address string) outbox.Listener {
	return outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, address) })
}

// Words of SQL are names like others.
func TestTableNamedByAWordOfSQL(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	bus := openBus(t, jetstream.Config{})
	for _, dialect := range []outbox.Dialect{outbox.SQLite, outbox.PostgreSQL} {
		for _, table := range []string{"order", "user", "select", "end"} {
			t.Run(fmt.Sprint(dialect, "/", table), func(t *testing.T) {
				topic := fmt.Sprint(dialect, "-", table)
				cfg := outbox.SQLConfig{Dialect: dialect, Table: table}
				if dialect == outbox.SQLite {
					cfg.DB = openDB(t, "sqlite", sqliteAddress(filepath.Join(t.TempDir(), "words.db")))
				} else {
					cfg.DB, cfg.Listen = openDB(t, "pgx", address), listenAt(address)
				}
				s := sqlStore(t, cfg)
				r := newRig(t, sqlHarness(s, cfg.DB), bus)
				if dialect == outbox.PostgreSQL {
					// so that only notifications help
					r.start(func(c *outbox.Config) { c.Poll = time.Hour })
					r.add(topic, "a")
					r.empty()
				}
				r.add(topic, "")
				if dialect == outbox.SQLite {
					r.drain(nil)
				}
				r.empty()
				r.exactly()
				if n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Sent}); n == 0 || err != nil {
					t.Errorf("purge: %d, %v", n, err)
				}
			})
		}
	}
	if _, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, Table: "sqlite_outbox"}); err == nil || !strings.Contains(err.Error(), "sqlite_") {
		t.Errorf("a name that SQLite refuses: %v", err)
	}
}
