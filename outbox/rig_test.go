package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
	"eventhub/outbox/pgtest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"writer": natstest.Told(writer), "drainer": natstest.Told(drainer)})
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// patience bounds what a test waits for. Reaching it is a failure.
const patience = time.Minute

func logger(tb testing.TB) *slog.Logger {
	tb.Helper()
	if _, ok := tb.(*testing.B); ok {
		// between the lines of a benchmark's table it would only disturb
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// openDB opens a database that the test closes.
func openDB(tb testing.TB, driver, address string) *sql.DB {
	tb.Helper()
	db, err := sql.Open(driver, address)
	if err != nil {
		tb.Fatal(err)
	}
	db.SetMaxIdleConns(8) // else connections come and go
	tb.Cleanup(func() { _ = db.Close() })
	return db
}

func sqliteAddress(path string) string {
	return "file:" + path + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(20000)&_pragma=synchronous(NORMAL)&_txlock=immediate"
}

// sqlStore makes a store with its tables.
func sqlStore(tb testing.TB, cfg outbox.SQLConfig) *outbox.SQLStore {
	tb.Helper()
	s, err := outbox.NewSQLStore(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	if _, err := s.Migrate(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return s
}

func newSQLite(tb testing.TB) (*outbox.SQLStore, *sql.DB) {
	tb.Helper()
	db := openDB(tb, "sqlite", sqliteAddress(filepath.Join(tb.TempDir(), "test.db")))
	return sqlStore(tb, outbox.SQLConfig{Dialect: outbox.SQLite, DB: db}), db
}

// tables counts the tables that were made, and tableNames has the name of each by its *sql.DB.
var (
	tables     atomic.Int64
	tableNames sync.Map
)

// tableOf is the table that newPostgres made in a database.
func tableOf(db *sql.DB) string {
	name, _ := tableNames.Load(db)
	return fmt.Sprint(name)
}

// newPostgres makes a store in a table of its own.
func newPostgres(tb testing.TB, address string) (*outbox.SQLStore, *sql.DB) {
	tb.Helper()
	db := openDB(tb, "pgx", address)
	n := tables.Add(1)
	table := fmt.Sprintf("outbox_test_%d", n)
	tableNames.Store(db, table)
	tb.Cleanup(func() {
		_, _ = db.ExecContext(context.Background(), "DROP TABLE IF EXISTS "+table+", "+table+"_versions")
		_, _ = db.ExecContext(context.Background(), "DROP FUNCTION IF EXISTS "+table+"_notify")
	})
	return sqlStore(tb, outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: db, Table: table}), db
}

func openCollection(tb testing.TB, bus *jetstream.Bus, name string) *jetstream.Collection {
	tb.Helper()
	c, err := bus.Collections().Open(tb.Context(), name)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

func openBus(tb testing.TB, cfg jetstream.Config) *jetstream.Bus {
	tb.Helper()
	if cfg.URL == "" {
		cfg.Server = natstest.Embed(tb, tb.TempDir())
	}
	cfg.Logger = logger(tb)
	b, err := jetstream.Open(context.Background(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

func eventually(tb testing.TB, what string, f func() bool) {
	tb.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}

func sqlHarness(s *outbox.SQLStore, db *sql.DB) outboxtest.Harness {
	return outboxtest.Harness{Store: s, KeepsSent: true, Add: func(ctx context.Context, r *outbox.Record) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		if err := s.Add(ctx, tx, r); err != nil {
			return err
		}
		return tx.Commit()
	}}
}

func TestSQLiteStore(t *testing.T) {
	t.Parallel()
	outboxtest.Run(t, func(t *testing.T) outboxtest.Harness {
		t.Helper()
		return sqlHarness(newSQLite(t))
	})
}

func TestPostgresStore(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	outboxtest.Run(t, func(t *testing.T) outboxtest.Harness {
		t.Helper()
		return sqlHarness(newPostgres(t, address))
	})
}

func TestKVStore(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{})
	n := 0
	outboxtest.Run(t, func(t *testing.T) outboxtest.Harness {
		t.Helper()
		n++
		s, err := outbox.NewKVStore(outbox.KVConfig{Collection: openCollection(t, bus, fmt.Sprint("outbox-", n))})
		if err != nil {
			t.Fatal(err)
		}
		return outboxtest.Harness{Store: s, Add: s.Add}
	})
}
