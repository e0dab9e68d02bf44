package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/inbox"
)

// effect is a handler whose effect is a row. The table allows the same row twice.
func effect(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO effects (id) VALUES ('"+e.ID+"')")
	return err
}

// A handler that outlives its lease: the event is delivered again while it runs, to several
// members, and it has one effect.
func TestSQLConcurrentDeliveriesHaveOneEffect(t *testing.T) {
	eachDatabase(t, func(t *testing.T, db database) {
		t.Helper()
		b, s := openBus(t), db.store(t, 0)
		db.exec(t, "CREATE TABLE effects (id TEXT NOT NULL)")
		var calls, again atomic.Int64
		redelivered := make(chan struct{})
		once := sync.OnceFunc(func() { close(redelivered) })
		slow := s.Handle("g", func(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error {
			n := calls.Add(1)
			if err := effect(ctx, tx, e); err != nil {
				return err
			}
			if n == 1 {
				<-ctx.Done() // the lease ends
				select {
				case <-redelivered:
				case <-time.After(patience):
				}
				<-time.After(200 * time.Millisecond) // and the other delivery is handled, or waits
			}
			return nil
		})
		handler := func(ctx context.Context, d *jetstream.Delivery) error {
			if d.Attempt > 1 {
				again.Add(1)
				once()
			}
			return slow(ctx, d)
		}
		for range 2 {
			consumeWith(t, b, "t", jetstream.SubscribeOptions{AckTimeout: time.Second, Workers: 4, MaxAttempts: jetstream.NeverGiveUp}, handler)
		}
		publish(t, b, "t", "one", "two")
		eventually(t, "both events have effects", func() bool { return db.number(t, "SELECT COUNT(*) FROM effects") >= 2 })
		eventually(t, "nothing can come any more", func() bool {
			left, err := b.Group("t", "g").Backlog(t.Context())
			return err == nil && left.Waiting == 0 && left.Leased == 0 && left.Floor >= left.Tail
		})
		if n := db.number(t, "SELECT COUNT(*) FROM effects"); n != 2 || again.Load() == 0 {
			t.Errorf("2 events have %d effects, with %d redeliveries", n, again.Load())
		}
		for _, id := range []string{"one", "two"} {
			if seen, err := s.Seen(t.Context(), "t", "g", id); err != nil || !seen {
				t.Errorf("%s: seen %v, %v", id, seen, err)
			}
		}
	})
}

// A handler that fails, or panics, leaves neither an effect nor a mark.
func TestSQLFailuresLeaveNothing(t *testing.T) {
	eachDatabase(t, func(t *testing.T, db database) {
		t.Helper()
		b, s := openBus(t), db.store(t, 0)
		db.exec(t, "CREATE TABLE effects (id TEXT NOT NULL)")
		var calls atomic.Int64
		consumeWith(t, b, "t", jetstream.SubscribeOptions{}, s.Handle("g", func(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error {
			if err := effect(ctx, tx, e); err != nil {
				return err
			}
			switch calls.Add(1) {
			case 1:
				return errors.New("not yet")
			case 2:
				panic("not yet either")
			}
			return nil
		}))
		publish(t, b, "t", "one")
		eventually(t, "the event has its effect", func() bool { return db.number(t, "SELECT COUNT(*) FROM effects") > 0 })
		if n := db.number(t, "SELECT COUNT(*) FROM effects"); n != 1 || calls.Load() != 3 {
			t.Errorf("%d effects after %d calls", n, calls.Load())
		}
	})
}

// A store that fails refuses the event, and its error says nothing of the database.
func TestSQLFailuresOfTheDatabase(t *testing.T) {
	t.Parallel()
	db := open(t, outbox.SQLite, sqliteAddress(t))
	// never migrated
	s, err := inbox.NewSQL(inbox.SQLConfig{Dialect: db.dialect, DB: db.DB, Table: "secret_table"})
	if err != nil {
		t.Fatal(err)
	}
	b := openBus(t)
	failed := make(chan error, 1)
	handle := s.Handle("g", effect)
	consumeWith(t, b, "t", jetstream.SubscribeOptions{MaxAttempts: 1}, func(ctx context.Context, d *jetstream.Delivery) error {
		err := handle(ctx, d)
		failed <- err
		return err
	})
	publish(t, b, "t", "one")
	select {
	case err := <-failed:
		if err == nil || strings.Contains(err.Error(), "secret") || errors.Unwrap(err) == nil {
			t.Errorf("got %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the handler was not called")
	}
}

func TestSQLMarks(t *testing.T) {
	eachDatabase(t, func(t *testing.T, db database) {
		t.Helper()
		s := db.store(t, 2*time.Second)
		mark := func(topic, group, id string) bool {
			t.Helper()
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			first, err := s.Mark(t.Context(), tx, topic, group, id)
			if err != nil {
				t.Fatalf("mark %q: %v", id, err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			return first
		}
		long := strings.Repeat("é", 5_000)
		events := [][3]string{
			{"t", "g", "1"},
			{"t", "h", "1"},
			{"u", "g", "1"},
			{"t", "g", "stream@7"},
			{"t", "g", "a\x00b"},
			{"t", "g", "\xff"},
			{"t", "g", "\xfe"},
			{"t", "g", long},
			{"t", "g", long + "x"},
			{"t", "g", "sha256:1"},
			{"t", "g", ""},
			{"t", "ü '\"", "'"},
		}
		for _, e := range events {
			if !mark(e[0], e[1], e[2]) {
				t.Errorf("%.40q has a mark at first", e)
			}
		}
		again := 0
		for _, e := range events {
			if !mark(e[0], e[1], e[2]) {
				again++
			}
		}
		if again == 0 { // fewer than all where the marks ended meanwhile
			t.Error("no event has its mark")
		}
		// after the TTL, an event counts as new
		eventually(t, "the marks to end", func() bool {
			seen, err := s.Seen(t.Context(), "t", "g", long)
			return err == nil && !seen
		})
		if !mark("t", "g", long) {
			t.Error("an event has its mark after the TTL")
		}
	})
}

// Of many transactions that mark the same event at once, one is the first; when that is rolled
// back, another is.
func TestSQLConcurrentMarks(t *testing.T) {
	eachDatabase(t, func(t *testing.T, db database) {
		t.Helper()
		s := db.store(t, 0)
		for round := range 8 {
			var first, committed atomic.Int64
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					tx, err := db.BeginTx(t.Context(), nil)
					if err != nil {
						t.Error(err)
						return
					}
					defer func() { _ = tx.Rollback() }()
					ok, err := s.Mark(t.Context(), tx, "t", "g", strconv.Itoa(round))
					if err != nil {
						t.Error(err)
						return
					}
					if ok && first.Add(1) > 1 {
						committed.Add(1)
						if err := tx.Commit(); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			if first.Load() != 2 || committed.Load() != 1 {
				t.Fatalf("%d were first, one of them was rolled back", first.Load())
			}
		}
	})
}

func TestSQLCleansInBoundedSteps(t *testing.T) {
	eachDatabase(t, func(t *testing.T, db database) {
		t.Helper()
		b, s := openBus(t), db.storeIn(t, "cleaned", time.Second)
		mark := func(n int) {
			t.Helper()
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			for i := range n {
				if _, err := s.Mark(t.Context(), tx, "old", "g", strconv.Itoa(i)); err != nil {
					t.Fatal(err)
				}
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
		}
		mark(450)
		eventually(t, "the marks to end", func() bool {
			seen, err := s.Seen(t.Context(), "old", "g", "449")
			return err == nil && !seen
		})
		if n, err := s.Clean(t.Context()); err != nil || n != 200 {
			t.Errorf("cleaned %d, %v", n, err)
		}
		// 100 events that are handled remove the next 200
		var calls atomic.Int64
		consumeWith(t, b, "t", jetstream.SubscribeOptions{}, s.Handle("g", func(context.Context, *sql.Tx, *jetstream.Event) error {
			calls.Add(1)
			return nil
		}))
		for i := range 100 {
			publish(t, b, "t", fmt.Sprint("new", i))
		}
		eventually(t, "the events are handled", func() bool { return calls.Load() == 100 })
		eventually(t, "200 more marks to be removed", func() bool {
			return db.number(t, "SELECT COUNT(*) FROM cleaned WHERE topic = 'old'") == 50
		})
	})
}

func TestSQLConfig(t *testing.T) {
	t.Parallel()
	db := open(t, outbox.SQLite, sqliteAddress(t))
	for want, cfg := range map[string]inbox.SQLConfig{
		`dialect ""`:                {DB: db.DB},
		"no DB is given":            {Dialect: outbox.SQLite},
		`table "Inbox"`:             {Dialect: outbox.SQLite, DB: db.DB, Table: "Inbox"},
		`SQLite reserves names`:     {Dialect: outbox.SQLite, DB: db.DB, Table: "sqlite_x"},
		"TTL 1ms: must be at least": {Dialect: outbox.SQLite, DB: db.DB, TTL: time.Millisecond},
	} {
		if _, err := inbox.NewSQL(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v", want, err)
		}
	}
}
