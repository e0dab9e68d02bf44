package outbox_test

import (
	"context"
	"database/sql"
	"path/filepath"
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

// A transaction that took its number early and commits late: what it added is neither skipped nor does it hold up others.
func TestRowsCommittedOutOfOrderAreNotSkipped(t *testing.T) {
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	begin := func(records ...*outbox.Record) *sql.Tx {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback() })
		for _, rec := range records {
			if err := s.Add(t.Context(), tx, rec); err != nil {
				t.Fatal(err)
			}
		}
		return tx
	}
	late := begin(&outbox.Record{ID: "late-a", Topic: "orders", Key: "a"}, &outbox.Record{ID: "late-b", Topic: "orders", Key: "b"}, &outbox.Record{ID: "late-", Topic: "orders"})
	rolledBack := begin(&outbox.Record{Topic: "orders", Key: "a"}, &outbox.Record{Topic: "orders"})
	r.start(nil)
	first := r.add("orders", "a")
	eventually(t, "the younger one is published", func() bool { return slices.Equal(r.stored()["orders/a"], []string{first}) })
	if err := rolledBack.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := late.Commit(); err != nil {
		t.Fatal(err)
	}
	last := r.add("orders", "a")
	r.empty()
	r.added["orders/a"] = []string{first, "late-a", last}
	r.added["orders/b"] = []string{"late-b"}
	r.added["orders/"] = []string{"late-"}
	r.exactly()
}

func TestNotifyWakes(t *testing.T) {
	address := pgtest.Start(t)
	db := openDB(t, "pgx", address)
	var listening atomic.Int64
	s := sqlStore(t, outbox.SQLConfig{
		Dialect: outbox.PostgreSQL, DB: db, Table: "notified",
		Listen: outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) {
			listening.Add(1)
			return pgx.Connect(ctx, address)
		}),
	})
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	r.start(func(c *outbox.Config) { c.Poll, c.Lease = time.Hour, time.Hour }) // so that only notifications help
	for range 5 {
		r.add("orders", "a")
		r.empty()
	}
	// The connection breaks: another takes its place, and what was added meanwhile is seen.
	if _, err := db.ExecContext(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"); err != nil {
		t.Fatal(err)
	}
	r.add("orders", "a")
	r.empty()
	if listening.Load() < 2 {
		t.Error("no other connection listens")
	}
	// By pgx, without database/sql.
	conn, err := pgx.Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	for _, commit := range []bool{false, true} {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Add(t.Context(), outbox.Pgx(tx), &outbox.Record{ID: "by pgx", Topic: "orders", Key: "a"}); err != nil {
			t.Fatal(err)
		}
		if commit {
			err = tx.Commit(t.Context())
		} else {
			err = tx.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.added["orders/a"] = append(r.added["orders/a"], "by pgx")
	r.empty()
	r.exactly()
}

// The statements work behind a pooler that keeps no session, where the driver prepares nothing.
func TestWithoutPreparedStatements(t *testing.T) {
	address := pgtest.Start(t)
	for _, mode := range []string{"exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			s, db := newPostgres(t, address+"&default_query_exec_mode="+mode)
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			bad := r.add("orders", "b")
			r.bus.set(refuse(bad), nil)
			for range 10 {
				r.add("orders", "a")
			}
			r.start(func(c *outbox.Config) { c.MaxAttempts = 2 })
			eventually(t, "one is parked", func() bool { return r.stats().Errors == 1 && r.left() == 0 })
			r.bus.set(nil, nil)
			if n, err := s.Retry(t.Context(), bad); n != 1 || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
			r.empty()
			r.exactly()
			if n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Sent}); n != 11 || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
		})
	}
}

func TestMigrate(t *testing.T) {
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

// Plain SQL can add a row whose id is empty. It is parked, for each publish of it would be another event.
func TestEmptyIDIsParked(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES ('', 'orders', '1')"); err != nil {
		t.Fatal(err)
	}
	r.add("orders", "")
	if got := r.drain(nil); got.Published != 1 || got.Parked != 1 {
		t.Errorf("got %+v, want one published and one parked", got)
	}
	r.exactly()
}
