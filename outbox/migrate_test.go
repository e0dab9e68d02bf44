package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

func TestMigrate(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	for name, open := range map[string]func(tb testing.TB) (*sql.DB, outbox.Dialect){
		"sqlite": func(tb testing.TB) (*sql.DB, outbox.Dialect) {
			tb.Helper()
			return openDB(tb, "sqlite", sqliteAddress(filepath.Join(tb.TempDir(), "m.db"))), outbox.SQLite
		},
		"postgres": func(tb testing.TB) (*sql.DB, outbox.Dialect) {
			tb.Helper()
			return openDB(tb, "pgx", address), outbox.PostgreSQL
		},
	} {
		t.Run(name, func(t *testing.T) {
			db, dialect := open(t)
			s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: dialect, DB: db, Table: "migrated"})
			if err != nil {
				t.Fatal(err)
			}
			have, need, err := s.Version(t.Context())
			if have != 0 || need == 0 || err != nil {
				t.Fatalf("version %d of %d, %v", have, need, err)
			}
			var steps atomic.Int64
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					n, err := s.Migrate(t.Context())
					if err != nil {
						t.Error(err)
					}
					steps.Add(int64(n))
				})
			}
			all.Wait()
			if int(steps.Load()) != need {
				t.Errorf("%d steps, want %d", steps.Load(), need)
			}
			if have, _, err = s.Version(t.Context()); have != need || err != nil {
				t.Errorf("version %d, want %d; %v", have, need, err)
			}
			// The script does the same.
			script, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: dialect, DB: db, Table: "scripted"})
			if err != nil {
				t.Fatal(err)
			}
			if dialect == outbox.PostgreSQL {
				runScript(t, address, script.SQL())
			} else if _, err := db.ExecContext(t.Context(), script.SQL()); err != nil {
				t.Fatal(err)
			}
			if n, err := script.Migrate(t.Context()); n != 0 || err != nil {
				t.Errorf("after the script: %d steps, %v", n, err)
			}
			if err := script.Add(t.Context(), db, &outbox.Record{Topic: "t"}); err != nil {
				t.Error(err)
			}
		})
	}
}

func runScript(tb testing.TB, address, script string) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), address)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	if _, err := conn.PgConn().Exec(tb.Context(), script).ReadAll(); err != nil {
		tb.Fatal(err)
	}
}

// A user that may change rows but make no tables can work on a table that another has migrated.
func TestMigrateNeedsNoRightsWhereNothingIsToDo(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	admin := openDB(t, "pgx", address)
	user := openDB(t, "pgx", address)
	user.SetMaxOpenConns(1) // so that all is done in the role
	run := func(db *sql.DB, statements ...string) {
		t.Helper()
		for _, statement := range statements {
			if _, err := db.ExecContext(context.WithoutCancel(t.Context()), statement); err != nil {
				t.Fatalf("%s: %v", statement, err)
			}
		}
	}
	run(admin, "CREATE ROLE outbox_limited", "CREATE SCHEMA outbox_limited", "GRANT USAGE ON SCHEMA outbox_limited TO outbox_limited")
	t.Cleanup(func() { run(admin, "DROP SCHEMA outbox_limited CASCADE", "DROP ROLE outbox_limited") })
	run(user, "SET search_path TO outbox_limited")
	s := sqlStore(t, outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: user})
	run(user, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA outbox_limited TO outbox_limited", "SET ROLE outbox_limited")
	if n, err := s.Migrate(t.Context()); n != 0 || err != nil {
		t.Fatalf("%d steps, %v", n, err)
	}
	if err := s.Add(t.Context(), user, &outbox.Record{Topic: "t"}); err != nil {
		t.Fatal(err)
	}
	c, err := s.Claim(t.Context(), outbox.ClaimOptions{Worker: "w", Limit: 10, Lease: time.Minute})
	if err != nil || len(c.Records) != 1 {
		t.Fatalf("%d records, %v", len(c.Records), err)
	}
}

// A table that an earlier version made becomes what a new one is, with the rows that are in it, and
// what others added to it.
func TestMigrateFromEarlierVersions(t *testing.T) {
	t.Parallel()
	for _, from := range []struct {
		version    int
		dialect    outbox.Dialect
		referenced bool // by another table, which keeps ids unique in the whole table
	}{
		{2, outbox.SQLite, false},
		{2, outbox.SQLite, true},
		{3, outbox.SQLite, false},
		{2, outbox.PostgreSQL, false},
		{2, outbox.PostgreSQL, true},
		{3, outbox.PostgreSQL, false},
	} {
		dialect := from.dialect
		t.Run(fmt.Sprintf("%s/%d/referenced=%v", dialect, from.version, from.referenced), func(t *testing.T) {
			t.Parallel()
			huge := dialect == outbox.SQLite && from.version == 2 && !from.referenced
			script, err := os.ReadFile(filepath.Join("testdata", fmt.Sprintf("version%d.%s.sql", from.version, dialect)))
			if err != nil {
				t.Fatal(err)
			}
			var address string // of the database that was opened last
			open := func() *sql.DB {
				if dialect == outbox.SQLite {
					address = sqliteAddress(filepath.Join(t.TempDir(), "test.db"))
					return openDB(t, "sqlite", address)
				}
				address = pgtest.Start(t)
				return openDB(t, "pgx", address+"&default_query_exec_mode=exec")
			}
			fresh := open()
			sqlStore(t, outbox.SQLConfig{Dialect: dialect, DB: fresh})
			db := open()
			exec := func(statements ...string) {
				t.Helper()
				for _, q := range statements {
					if _, err := db.ExecContext(t.Context(), q); err != nil {
						t.Fatalf("%s: %v", q, err)
					}
				}
			}
			if dialect == outbox.PostgreSQL {
				runScript(t, address, string(script))
			} else {
				exec(string(script))
			}
			exec("INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ('one', 'orders', 'k', '1'), ('two', 'orders', 'k', '2')")
			if from.referenced {
				exec("CREATE TABLE others (id TEXT REFERENCES outbox (id))", "INSERT INTO others (id) VALUES ('two')")
			}
			// which no claim could load, and no event could be
			if huge {
				exec("INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ('huge', 'orders', 'huge', '\"' || hex(zeroblob(40000000)) || '\"')")
			}
			other := openDB(t, map[outbox.Dialect]string{outbox.SQLite: "sqlite", outbox.PostgreSQL: "pgx"}[dialect], address)
			if err := other.PingContext(t.Context()); err != nil {
				t.Fatal(err)
			}
			s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: dialect, DB: db})
			if err != nil {
				t.Fatal(err)
			}
			if have, need, err := s.Version(t.Context()); have != from.version || need != 4 || err != nil {
				t.Fatalf("version %d of %d, %v; want %d of 4", have, need, err, from.version)
			}
			if n, err := s.Migrate(t.Context()); n != 4-from.version || err != nil {
				t.Fatalf("%d steps, %v", n, err)
			}
			if got, want := schemaOf(t, db, dialect), schemaOf(t, fresh, dialect); (got == want) == from.referenced {
				t.Errorf("the migrated table is\n%s\nwant\n%s", got, want)
			}
			if _, err := other.ExecContext(t.Context(), "INSERT INTO outbox (aggregatetype, aggregateid, payload) VALUES ('orders', 'k', '3')"); err != nil {
				t.Errorf("over a connection that was open before: %v", err)
			}
			if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES ('one', 'others', '1')"); (err == nil) == from.referenced {
				t.Errorf("an id of another topic: %v", err)
			}
			if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES ('one', 'orders', '1')"); err == nil {
				t.Error("an id was added twice to a topic")
			}
			exec("DELETE FROM outbox WHERE aggregatetype = 'others'")
			if dialect == outbox.SQLite && !huge {
				var well string
				if err := db.QueryRowContext(t.Context(), "PRAGMA integrity_check").Scan(&well); err != nil || well != "ok" {
					t.Errorf("the file: %s, %v", well, err)
				}
			}
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			r.add("orders", "k")
			if did := r.drain(nil); did.Published != 4 {
				t.Errorf("got %+v, want 4 published", did)
			}
			stored := r.stored()["orders/k"]
			if len(stored) != 4 || !slices.Equal(stored[:2], []string{"one", "two"}) || len(stored[2]) != len("01a1fa34-941f-7deb-b3f9-4a26e5534da1") {
				t.Errorf("stored are %q", stored)
			}
			if huge {
				list, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
				if err != nil || len(list) != 1 || list[0].LastErr != "the row is larger than 64 MiB" || list[0].TooLarge == "" {
					t.Errorf("parked are %d, %v", len(list), err)
				}
				if n, err := s.Retry(t.Context()); n != 0 || err != nil {
					t.Errorf("retry: %d, %v", n, err)
				}
				if n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Errored}); n != 1 || err != nil {
					t.Errorf("purge: %d, %v", n, err)
				}
			}
		})
	}
}

// schemaOf is what the database says of the table.
func schemaOf(tb testing.TB, db *sql.DB, dialect outbox.Dialect) string {
	tb.Helper()
	query := "SELECT name || ': ' || sql FROM sqlite_schema WHERE tbl_name = 'outbox' AND sql <> '' ORDER BY name"
	if dialect == outbox.PostgreSQL {
		query = `SELECT column_name || ' ' || data_type || ' ' || COALESCE(column_default, '') || ' ' || is_nullable FROM information_schema.columns WHERE table_name = 'outbox'
UNION ALL SELECT indexdef FROM pg_indexes WHERE tablename = 'outbox'
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'outbox'::regclass AND NOT tgisinternal
UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'outbox'::regclass ORDER BY 1`
	}
	rows, err := db.QueryContext(tb.Context(), query)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	var schema strings.Builder
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			tb.Fatal(err)
		}
		schema.WriteString(line + "\n")
	}
	if err := rows.Err(); err != nil {
		tb.Fatal(err)
	}
	return schema.String()
}

// A migration does not keep writers waiting behind a transaction that does not end.
func TestMigrateGivesWayToWriters(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	db := openDB(t, "pgx", address)
	script, err := os.ReadFile(filepath.Join("testdata", "version2.postgres.sql"))
	if err != nil {
		t.Fatal(err)
	}
	runScript(t, address, string(script))
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES ('open', 'orders', '1')"); err != nil {
		t.Fatal(err)
	}
	s, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: db})
	if err != nil {
		t.Fatal(err)
	}
	s.Hasten()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err = s.Migrate(ctx); err == nil || !strings.Contains(err.Error(), "migrate again after") {
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Migrate(t.Context()); n != 2 || err != nil {
		t.Errorf("%d steps, %v", n, err)
	}
}
