package inbox_test

import (
	"context"
	"database/sql"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/inbox"
	"eventhub/outbox/pgtest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{"consumer": natstest.Told(consume)})
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

const patience = time.Minute

func logger(tb testing.TB) *slog.Logger {
	tb.Helper()
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func openBus(tb testing.TB) *jetstream.Bus {
	tb.Helper()
	b, err := jetstream.Open(context.Background(), jetstream.Config{Server: natstest.Embed(tb, tb.TempDir()), AckWait: 6 * time.Second, Logger: logger(tb)})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

// database is a database that the test closes.
type database struct {
	*sql.DB
	dialect outbox.Dialect
}

func open(tb testing.TB, dialect outbox.Dialect, address string) database {
	tb.Helper()
	db, err := sql.Open(drivers[dialect], address)
	if err != nil {
		tb.Fatal(err)
	}
	db.SetMaxIdleConns(8) // else connections come and go
	tb.Cleanup(func() { _ = db.Close() })
	return database{db, dialect}
}

var drivers = map[outbox.Dialect]string{outbox.SQLite: "sqlite", outbox.PostgreSQL: "pgx"}

func sqliteAddress(tb testing.TB) string {
	tb.Helper()
	return "file:" + filepath.Join(tb.TempDir(), "test.db") + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(20000)&_pragma=synchronous(NORMAL)&_txlock=immediate"
}

// eachDatabase runs a test on SQLite and PostgreSQL.
func eachDatabase(t *testing.T, test func(t *testing.T, db database)) {
	t.Helper()
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, open(t, outbox.SQLite, sqliteAddress(t)))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, open(t, outbox.PostgreSQL, pgtest.Start(t)))
	})
}

// store makes a store.
func (db database) store(tb testing.TB, ttl time.Duration) *inbox.SQL {
	tb.Helper()
	return db.storeIn(tb, inbox.DefaultTable, ttl)
}

// storeIn is store with the name of the table.
func (db database) storeIn(tb testing.TB, table string, ttl time.Duration) *inbox.SQL {
	tb.Helper()
	s, err := inbox.NewSQL(inbox.SQLConfig{Dialect: db.dialect, DB: db.DB, Table: table, TTL: ttl, Logger: logger(tb)})
	if err != nil {
		tb.Fatal(err)
	}
	for range 2 { // the second finds all there
		if err := s.Migrate(tb.Context()); err != nil {
			tb.Fatal(err)
		}
	}
	return s
}

func (db database) exec(tb testing.TB, query string) {
	tb.Helper()
	if _, err := db.ExecContext(tb.Context(), query); err != nil {
		tb.Fatal(err)
	}
}

func (db database) number(tb testing.TB, query string) (n int) {
	tb.Helper()
	if err := db.QueryRowContext(tb.Context(), query).Scan(&n); err != nil {
		tb.Fatal(err)
	}
	return n
}

func eventually(tb testing.TB, what string, ask func() bool) {
	tb.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(patience)
	for !ask() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}

func publish(tb testing.TB, b *jetstream.Bus, topic string, ids ...string) {
	tb.Helper()
	for _, id := range ids {
		if _, err := b.Publish(tb.Context(), topic, []byte("1"), jetstream.PublishOptions{ID: id}); err != nil {
			tb.Fatal(err)
		}
	}
}

// consumeWith consumes a topic until the test ends.
func consumeWith(tb testing.TB, b *jetstream.Bus, topic string, opts jetstream.SubscribeOptions, handler func(context.Context, *jetstream.Delivery) error) {
	tb.Helper()
	opts.From = jetstream.FromEarliest
	sub, err := b.Consume(tb.Context(), topic, "g", opts, handler)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = sub.Stop(context.Background()) })
}
