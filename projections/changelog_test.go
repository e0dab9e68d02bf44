package projections

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/outbox/pgtest"
)

// compactedBus is a bus on which rows.** are compacted topics.
func compactedBus(tb testing.TB, cfg jetstream.Config) *jetstream.Bus {
	tb.Helper()
	cfg.Topics = append(cfg.Topics, topics.Rule{Pattern: "rows.**", Compaction: true})
	return openBus(tb, cfg)
}

// eachDatabase runs a test against SQLite and PostgreSQL. open may be called for several
// connections to one database.
func eachDatabase(t *testing.T, test func(t *testing.T, dialect Dialect, open func() *sql.DB)) {
	t.Helper()
	connect := func(t *testing.T, driver, dsn string) *sql.DB {
		t.Helper()
		db, err := sql.Open(driver, dsn)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = db.Close() })
		return db
	}
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		file := filepath.Join(t.TempDir(), "rows.db")
		test(t, SQLite, func() *sql.DB {
			return connect(t, "sqlite", "file:"+file+"?_pragma=busy_timeout(10000)&_pragma=journal_mode(wal)&_txlock=immediate")
		})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		dsn := pgtest.Start(t)
		test(t, PostgreSQL, func() *sql.DB { return connect(t, "pgx", dsn) })
	})
}

func openTable(tb testing.TB, cfg SQLTableConfig) *SQLTable {
	tb.Helper()
	table, err := OpenSQLTable(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return table
}

// startChangelog runs a changelog until stop is called, or the test ends.
func startChangelog(tb testing.TB, c Changelog) (stop func()) {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				tb.Errorf("the changelog ended with: %v", err)
			}
		case <-time.After(patience):
			tb.Error("the changelog does not end")
		}
	})
	tb.Cleanup(stop)
	return stop
}

// rows reads what is in a table.
func rows(tb testing.TB, db *sql.DB, table string) map[string]string {
	tb.Helper()
	found := make(map[string]string)
	r, err := db.QueryContext(tb.Context(), "SELECT key, payload FROM "+table)
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	for r.Next() {
		var key, payload string
		if err := r.Scan(&key, &payload); err != nil {
			tb.Fatal(err)
		}
		found[key] = payload
	}
	if err := r.Err(); err != nil {
		tb.Fatal(err)
	}
	return found
}

// awaitRows waits until a table holds what is wanted.
func awaitRows(tb testing.TB, db *sql.DB, table string, want map[string]string) {
	tb.Helper()
	timeout := time.After(patience)
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		got := rows(tb, db, table)
		if maps.Equal(got, want) {
			return
		}
		select {
		case <-ticker.C:
		case <-timeout:
			for key := range want {
				if got[key] != want[key] {
					tb.Errorf("row %q is %q, want %q", key, got[key], want[key])
				}
			}
			tb.Fatalf("%d rows, want %d", len(got), len(want))
		}
	}
}

// write publishes n random changes of the keys to topic, and keeps state in step.
func write(tb testing.TB, bus *jetstream.Bus, topic string, rng *rand.Rand, keys, n int, state map[string]string) {
	tb.Helper()
	p := bus.NewPublisher()
	for i := range n {
		key := fmt.Sprintf("k:%d", rng.IntN(keys))
		payload := fmt.Sprintf(`{"n":%d,"r":%d}`, i, rng.Int64())
		opts := jetstream.PublishOptions{Key: key}
		if opts.Tombstone = rng.IntN(5) == 0; opts.Tombstone {
			payload = "null"
			delete(state, key)
		} else {
			state[key] = payload
		}
		if err := p.PublishAsync(tb.Context(), topic, []byte(payload), opts, func(_ jetstream.Receipt, err error) {
			if err != nil {
				tb.Errorf("publish: %v", err)
			}
		}); err != nil {
			tb.Fatal(err)
		}
	}
	if err := p.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// TestChangelog lets two instances with connections of their own write one table, and restarts
// them, while events come in.
func TestChangelog(t *testing.T) {
	t.Parallel()
	eachDatabase(t, func(t *testing.T, dialect Dialect, open func() *sql.DB) {
		t.Helper()
		bus := compactedBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
		rng := rand.New(rand.NewPCG(1, 2))
		state := make(map[string]string)
		db := open()
		run := func() func() {
			table := openTable(t, SQLTableConfig{DB: open(), Dialect: dialect, Table: "things"})
			return startChangelog(t, Changelog{Bus: JetStream(bus), Topic: "rows.things", Group: "copy", From: jetstream.FromEarliest, Into: table, Batch: 50})
		}
		write(t, bus, "rows.things", rng, 40, 150, state)
		stops := []func(){run(), run()}
		for i := range 4 {
			write(t, bus, "rows.things", rng, 40, 80, state)
			stops[i%2]()
			stops[i%2] = run()
		}
		awaitRows(t, db, "things", state)
		// All of it comes again: nothing goes back.
		if err := bus.Group("rows.things", "copy").Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
		write(t, bus, "rows.things", rng, 40, 100, state)
		awaitRows(t, db, "things", state)
	})
}

// TestChangelogWritesInOneTransaction counts events in rows of its own: an event that was lost, or
// written twice, shows.
func TestChangelogWritesInOneTransaction(t *testing.T) {
	t.Parallel()
	const events = 100
	eachDatabase(t, func(t *testing.T, dialect Dialect, open func() *sql.DB) {
		t.Helper()
		bus := compactedBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
		db := open()
		if _, err := db.ExecContext(t.Context(), "CREATE TABLE tally (key TEXT PRIMARY KEY, n BIGINT NOT NULL)"); err != nil {
			t.Fatal(err)
		}
		count := func(ctx context.Context, tx *sql.Tx, changes []Change) error {
			for _, c := range changes {
				if _, err := tx.ExecContext(ctx, "INSERT INTO tally (key, n) VALUES ('all', "+strconv.FormatUint(c.Event.Sequence, 10)+") ON CONFLICT (key) DO UPDATE SET n = tally.n + excluded.n"); err != nil {
					return err
				}
				if c.Event.Sequence%7 == 0 {
					// It fails after it has written, once in a while.
					if rand.IntN(2) == 0 {
						return errors.New("out of luck")
					}
				}
			}
			return nil
		}
		table := openTable(t, SQLTableConfig{DB: open(), Dialect: dialect, Name: "tally", Write: count})
		for range 3 {
			startChangelog(t, Changelog{Bus: JetStream(bus), Topic: "rows.count", Group: "tally", From: jetstream.FromEarliest, Into: table, Batch: 5, Attempts: 1_000})
		}
		want := 0
		for i := range events {
			r, err := bus.Publish(t.Context(), "rows.count", []byte("1"), jetstream.PublishOptions{Key: strconv.Itoa(i)})
			if err != nil {
				t.Fatal(err)
			}
			want += int(r.Sequence)
		}
		timeout := time.After(patience)
		for {
			place, err := table.Checkpoint(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if place.Sequence == events {
				break
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-timeout:
				t.Fatalf("the table is at %+v", place)
			}
		}
		var got int
		if err := db.QueryRowContext(t.Context(), "SELECT n FROM tally WHERE key = 'all'").Scan(&got); err != nil || got != want {
			t.Errorf("the tally is %d (%v), want %d", got, err, want)
		}
	})
}

// TestChangelogPoison has an event whose row is never taken: it goes to the dead letters, and
// others go on.
func TestChangelogPoison(t *testing.T) {
	t.Parallel()
	bus := compactedBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	db, err := sql.Open("pgx", pgtest.Start(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	// PostgreSQL has no text with a NUL.
	want := map[string]string{"a": "1", "b": "2", "c": "3"}
	for _, key := range []string{"a", "b", "poison\x00", "c"} {
		payload := want[key]
		if payload == "" {
			payload = "0"
		}
		if _, err := bus.Publish(t.Context(), "rows.poison", []byte(payload), jetstream.PublishOptions{Key: key}); err != nil {
			t.Fatal(err)
		}
	}
	table := openTable(t, SQLTableConfig{DB: db, Dialect: PostgreSQL, Table: "poisoned"})
	startChangelog(t, Changelog{Bus: JetStream(bus), Topic: "rows.poison", Group: "copy", From: jetstream.FromEarliest, Into: table, Attempts: 2})
	awaitRows(t, db, "poisoned", want)
	dead := awaitLetters(t, bus, "dlq.rows.poison")
	if !strings.Contains(string(dead[0].Payload), `"key":"poison\u0000"`) {
		t.Errorf("the dead letter is %s", dead[0].Payload)
	}
}

func TestOpenSQLTableRefuses(t *testing.T) {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	for want, cfg := range map[string]SQLTableConfig{
		"DB is missing":   {Dialect: SQLite, Table: "t"},
		"dialect":         {DB: db, Dialect: "oracle", Table: "t"},
		"letters":         {DB: db, Dialect: SQLite, Table: "a; DROP TABLE b"},
		"Name is missing": {DB: db, Dialect: SQLite, Write: func(context.Context, *sql.Tx, []Change) error { return nil }},
	} {
		if _, err := OpenSQLTable(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error about %q", err, want)
		}
	}
}
