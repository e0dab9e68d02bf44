package projections

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// secret is what the panics of the tests say. Only the log may show it.
const secret = "secret of the process"

// book keeps what is logged.
type book struct {
	tb  testing.TB
	mu  sync.Mutex
	buf bytes.Buffer
}

func newBook(tb testing.TB) *book {
	tb.Helper()
	return &book{tb: tb}
}

func (b *book) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *book) logger() *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

// wantPanic wants a panic in the log, with the stack of the function that panicked.
func (b *book) wantPanic(function string) {
	b.tb.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	text := b.buf.String()
	if !strings.Contains(text, secret) || !strings.Contains(text, "stack=") || !strings.Contains(text, function) {
		b.tb.Errorf("the log has no panic with its stack (function %s):\n%s", function, text)
	}
}

// wantSilent wants letters that tell that something panicked, and nothing of what or where.
func wantSilent(tb testing.TB, bus *jetstream.Bus, topic string) {
	tb.Helper()
	err := bus.History("dlq."+topic).Scan(tb.Context(), jetstream.ScanOptions{Limit: 1_000}, func(e *jetstream.Event) error {
		if text := string(e.Payload); !strings.Contains(text, "panicked") || strings.Contains(text, "secret") ||
			strings.Contains(text, "goroutine") || strings.Contains(text, ".go") {
			tb.Errorf("the dead letter says too little or too much: %s", text)
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
}

// panicky is appendEvent that panics at payload "bad", and the first time it sees "once".
type panicky struct{ bad, once atomic.Int64 }

func (p *panicky) apply(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
	switch string(e.Payload) {
	case `"bad"`:
		p.bad.Add(1)
		panic(secret)
	case `"once"`:
		if p.once.Add(1) == 1 {
			panic(fmt.Errorf("an error: %s", secret))
		}
	}
	return appendEvent(ctx, state, e)
}

// TestPanicOfApply wants an event at which Apply panics to be tried again, then dead-lettered;
// nobody else takes notice.
func TestPanicOfApply(t *testing.T) {
	t.Parallel()
	ownKey := func(e *jetstream.Event) (string, error) {
		if e.Key == "" {
			return "", errors.New("no key")
		}
		return e.Key, nil
	}
	for name, key := range map[string]func(*jetstream.Event) (string, error){"keys of the events": nil, "keys of its own": ownKey} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
			log, seen := newBook(t), newTally()
			var p panicky
			run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Key: key, Apply: p.apply, Attempts: 3, Observer: seen, Logger: log.logger()})
			put(t, bus, topicCounts, "k", "1")
			bad := put(t, bus, topicCounts, "k", `"bad"`)
			put(t, bus, topicCounts, "other", "2")
			put(t, bus, topicCounts, "k", `"once"`)
			put(t, bus, topicCounts, "k", "3")
			workedOff(t, JetStream(bus), "counter")
			poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied) >= 4 && seen.outcome(Poisoned) >= 1 })
			wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": `1 "once" 3 `, "other": "2 "})
			if p.bad.Load() != 3 || p.once.Load() != 2 {
				t.Errorf("the one was tried %d times, want 3, the other %d times, want 2", p.bad.Load(), p.once.Load())
			}
			dead := readLetters(t, bus)
			if l := dead[bad.ID]; len(dead) != 1 || l.Attempts != 3 {
				t.Errorf("the dead letters are %+v, want one after 3 attempts", dead)
			}
			wantSilent(t, bus, topicCounts)
			log.wantPanic("(*panicky).apply")
		})
	}
}

// TestPanicOfKey has a Key that panics at one event for good, and at another one once.
func TestPanicOfKey(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	log, seen := newBook(t), newTally()
	var once atomic.Bool
	key := func(e *jetstream.Event) (string, error) {
		if string(e.Payload) == `"bad"` || string(e.Payload) == `"once"` && once.CompareAndSwap(false, true) {
			panic(secret)
		}
		return e.Key, nil
	}
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Key: key, Attempts: 2, Observer: seen, Logger: log.logger()})
	for _, payload := range []string{"1", `"bad"`, `"once"`, "2"} {
		put(t, bus, topicCounts, "k", payload)
	}
	workedOff(t, JetStream(bus), "counter")
	poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied) >= 3 && seen.outcome(Poisoned) >= 1 })
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": `1 "once" 2 `})
	if n := len(readLetters(t, bus)); n != 1 {
		t.Errorf("there are %d dead letters, want 1", n)
	}
	wantSilent(t, bus, topicCounts)
	log.wantPanic("TestPanicOfKey")
}

// panickyStore panics on its way to the real one.
type panickyStore struct {
	Store
	load, save func(key string, value []byte)
}

func (s *panickyStore) Load(ctx context.Context, key string) (State, error) {
	s.load(key, nil)
	return s.Store.Load(ctx, key)
}

func (s *panickyStore) Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (State, error) {
	s.save(key, next.Value)
	return s.Store.Save(ctx, key, old, next, cause)
}

// TestPanicOfStore has a Store of the user's that panics when it is opened, at one key, at one
// value, and now and then.
func TestPanicOfStore(t *testing.T) {
	t.Parallel()
	var opened, loaded, saved atomic.Int64
	for name, c := range map[string]struct {
		open       func()
		load, save func(string, []byte)
		dead       int
		want       map[string]string
	}{
		"open once": {
			open: func() {
				if opened.Add(1) == 1 {
					panic(secret)
				}
			},
			want: map[string]string{"a": `1 "x" 2 `, "b": "3 "},
		},
		"load once": {
			load: func(string, []byte) {
				if loaded.Add(1) == 1 {
					panic(secret)
				}
			},
			want: map[string]string{"a": `1 "x" 2 `, "b": "3 "},
		},
		"save once": {
			save: func(string, []byte) {
				if saved.Add(1) == 1 {
					panic(secret)
				}
			},
			want: map[string]string{"a": `1 "x" 2 `, "b": "3 "},
		},
		"load of a key": {
			load: func(key string, _ []byte) {
				if key == "a" {
					panic(secret)
				}
			},
			dead: 3, want: map[string]string{"b": "3 "},
		},
		"save of a key": {
			save: func(key string, _ []byte) {
				if key == "a" {
					panic(secret)
				}
			},
			dead: 3, want: map[string]string{"b": "3 "},
		},
		"save of a value": {
			save: func(_ string, value []byte) {
				if bytes.HasSuffix(value, []byte(`"x" `)) {
					panic(secret)
				}
			},
			dead: 1, want: map[string]string{"a": "1 2 ", "b": "3 "},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
			log, seen := newBook(t), newTally()
			store := &panickyStore{load: c.load, save: c.save}
			if store.load == nil {
				store.load = func(string, []byte) {}
			}
			if store.save == nil {
				store.save = func(string, []byte) {}
			}
			open := func(ctx context.Context, _ int) (Store, error) {
				if c.open != nil {
					c.open()
				}
				states, err := OpenStates(ctx, JetStream(bus), StatesBucket("counter", 1))
				store.Store = states
				return store, err
			}
			run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Store: open, Attempts: 2, Observer: seen, Logger: log.logger()})
			for _, e := range []struct{ key, payload string }{{"a", "1"}, {"a", `"x"`}, {"a", "2"}, {"b", "3"}} {
				put(t, bus, topicCounts, e.key, e.payload)
			}
			workedOff(t, JetStream(bus), "counter")
			poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied)+seen.outcome(Poisoned) >= 4 })
			wantStates(t, viewed(t, JetStream(bus), "counter"), c.want)
			if n := len(readLetters(t, bus)); n != c.dead {
				t.Errorf("there are %d dead letters, want %d", n, c.dead)
			}
			if c.dead > 0 {
				wantSilent(t, bus, topicCounts)
			}
			log.wantPanic("TestPanicOfStore")
		})
	}
}

// panickyObserver panics at whatever it is told.
type panickyObserver struct{ *tally }

func (o panickyObserver) Projected(projection string, outcome Outcome) {
	o.tally.Projected(projection, outcome)
	panic(secret)
}

func (o panickyObserver) LimitReached(limit string) {
	o.tally.LimitReached(limit)
	panic(secret)
}

// TestPanicOfObserver wants events applied although whoever is told of them panics.
func TestPanicOfObserver(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	log, seen := newBook(t), newTally()
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Observer: panickyObserver{seen}, CacheKeys: 1, Logger: log.logger()})
	put(t, bus, topicCounts, "a", "1")
	put(t, bus, topicCounts, "b", "2")
	put(t, bus, topicCounts, "a", "3")
	workedOff(t, JetStream(bus), "counter")
	poll(t, "the observer is told", func() bool { return seen.outcome(Applied) == 3 && seen.limit("projection_cache") > 0 })
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"a": "1 3 ", "b": "2 "})
	if n := len(letters(t, bus)); n != 0 {
		t.Errorf("there are %d dead letters", n)
	}
	log.wantPanic("panickyObserver.Projected")
}

// TestPanicInRebuild wants a rebuild to come to its end over an event at which Apply panics.
func TestPanicInRebuild(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	log := newBook(t)
	var fine, bad atomic.Int64
	r := run(t, JetStream(bus), Projection{From: jetstream.FromEarliest})
	for _, payload := range []string{"1", `"bad"`, "2"} {
		put(t, bus, topicCounts, "k", payload)
	}
	workedOff(t, JetStream(bus), "counter")
	r.stop(t)
	err := Rebuild(t.Context(), JetStream(bus), Projection{
		Topic: topicCounts, Group: "counter", Attempts: 2, Logger: log.logger(), grace: time.Second,
		Apply: func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
			if string(e.Payload) == `"bad"` {
				bad.Add(1)
				panic(secret)
			}
			fine.Add(1)
			return appendEvent(ctx, state, e)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 2 "})
	if bad.Load() != 2 || fine.Load() != 2 || len(letters(t, bus)) != 1 {
		t.Errorf("%d tries, %d applied, %d dead letters: want 2, 2 and 1", bad.Load(), fine.Load(), len(letters(t, bus)))
	}
	log.wantPanic("TestPanicInRebuild")
}

// TestPanicOfTable has a Write that panics at one row for good, and at another one once: both in
// the transaction.
func TestPanicOfTable(t *testing.T) {
	t.Parallel()
	bus := compactedBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	log := newBook(t)
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "rows.db")+"?_pragma=busy_timeout(10000)&_txlock=immediate")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if _, err := db.ExecContext(t.Context(), "CREATE TABLE copied (key TEXT PRIMARY KEY, payload TEXT)"); err != nil {
		t.Fatal(err)
	}
	var once atomic.Bool
	table := openTable(t, SQLTableConfig{DB: db, Dialect: SQLite, Name: "copied", Write: func(ctx context.Context, tx *sql.Tx, changes []Change) error {
		for _, c := range changes {
			if _, err := tx.ExecContext(ctx, "INSERT OR REPLACE INTO copied VALUES (?, ?)", c.Key, string(c.Event.Payload)); err != nil {
				return err
			}
			if c.Key == "bad" || c.Key == "b" && once.CompareAndSwap(false, true) {
				panic(secret)
			}
		}
		return nil
	}})
	startChangelog(t, Changelog{Bus: JetStream(bus), Topic: "rows.panic", Group: "copy", From: jetstream.FromEarliest, Into: table, Attempts: 2, Logger: log.logger()})
	for _, key := range []string{"a", "bad", "b", "c"} {
		put(t, bus, "rows.panic", key, "1")
	}
	awaitRows(t, db, "copied", map[string]string{"a": "1", "b": "1", "c": "1"})
	if dead := awaitLetters(t, bus, "dlq.rows.panic"); len(dead) != 1 || !strings.Contains(string(dead[0].Payload), `"key":"bad"`) {
		t.Errorf("the dead letters are %+v", dead)
	}
	wantSilent(t, bus, "rows.panic")
	log.wantPanic("TestPanicOfTable")
}

// TestPanicOfListeners wants a mirror and a compactor to go on beside a Changed, an Observer and a
// Written that panic.
func TestPanicOfListeners(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	log, seen := newBook(t), newTally()
	var told atomic.Int64
	m := NewMirror(MirrorConfig{
		Bus: JetStream(bus), Topic: topicState, MaxKeys: 2, Observer: panickyObserver{seen}, Logger: log.logger(),
		Changed: func(*jetstream.Event) {
			told.Add(1)
			panic(secret)
		},
	})
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	for _, key := range []string{"a", "b", "c"} {
		put(t, bus, topicState, key, "1")
	}
	poll(t, "the mirror has all keys", func() bool { return told.Load() >= 3 && m.Len() == 2 && seen.limit("mirror_keys") == 1 })
	awaitMirror(t, m)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	log.wantPanic("TestPanicOfListeners")

	log = newBook(t)
	c := NewCompactor(CompactorConfig{Bus: JetStream(bus), Topic: topicState, Snapshot: topicSnapshots, Logger: log.logger(), Written: func(int) { panic(secret) }})
	if n := compact(t, bus, c, put(t, bus, topicState, "d", "1")); n != 4 {
		t.Errorf("%d snapshots were written, want 4", n)
	}
	log.wantPanic("TestPanicOfListeners")
}

// TestEndedGoroutine has an Apply that ends its goroutine, as a test's FailNow does: the projection
// ends with an error that says so, and the event is left for the next instance.
func TestEndedGoroutine(t *testing.T) {
	t.Parallel()
	for name, key := range map[string]func(*jetstream.Event) (string, error){
		"the events' own keys": nil,
		"keys at the same time": func(e *jetstream.Event) (string, error) {
			if e.Key == "" {
				return "", errors.New("no key")
			}
			return e.Key, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
			put(t, bus, topicCounts, "k", "1")
			put(t, bus, topicCounts, "l", "1")
			r := runAway(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Key: key, Apply: func(context.Context, []byte, *jetstream.Event) ([]byte, error) {
				runtime.Goexit()
				return nil, nil
			}})
			defer r.cancel()
			if err := r.wait(t); err == nil || !strings.Contains(err.Error(), "Goexit") {
				t.Errorf("it ended with: %v", err)
			}
			run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Key: key})
			workedOff(t, JetStream(bus), "counter")
			wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 ", "l": "1 "})
		})
	}
}
