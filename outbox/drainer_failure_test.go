package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
	"eventhub/outbox/pgtest"
)

// What one drainer publishes is stored, but it is killed before it learns that, and the server
// forgets the ids.
func TestWhatTheServerForgotIsLookedUp(t *testing.T) {
	t.Parallel()
	rules := []topics.Rule{{Pattern: "short", DuplicateWindow: time.Second}, {Pattern: "long"}}
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: rules}))
	for i := range 10 {
		r.add("short", fmt.Sprint("k", i%3))
		r.add("short", "")
		r.add("long", "k")
	}
	hang := make(chan struct{})
	release := sync.OnceFunc(func() { close(hang) })
	t.Cleanup(release)
	var stored atomic.Int64
	r.bus.set(nil, func(string, jetstream.PublishOptions) error {
		stored.Add(1)
		<-hang
		return unknownOutcome()
	})
	// A lease that ran out here would be claimed and published again.
	d := r.start(func(c *outbox.Config) { c.Lease = 2 * time.Second })
	eventually(t, "all lanes are published to", func() bool { return stored.Load() == 14 })
	killed := make(chan struct{})
	go func() { defer close(killed); kill(d) }()
	// so that it is killed before it learns the outcome; either way it is unknown
	outlast(t, 50*time.Millisecond)
	release()
	<-killed
	r.bus.set(nil, nil)
	outlast(t, 1200*time.Millisecond)
	eventually(t, "everything is published", func() bool {
		r.drain(func(c *outbox.Config) { c.Margin = 500 * time.Millisecond })
		return r.left() == 0
	})
	r.exactly()
	if found := r.seen.found.Load(); found != 13 { // all but that of topic long, whose window lasts
		t.Errorf("%d were found in the stream, want 13", found)
	}
	if looks := r.bus.looks.Load(); looks != 4 { // three keys, and those without one
		t.Errorf("%d look-ups, want 4", looks)
	}
}

func TestWhatTheStreamCannotSayIsParked(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "short", DuplicateWindow: time.Second, MaxMsgs: 5}}}))
	r.add("short", "a")
	hang := make(chan struct{})
	r.bus.set(nil, func(string, jetstream.PublishOptions) error { <-hang; return unknownOutcome() })
	d := r.start(nil)
	eventually(t, "it is published", func() bool { return len(r.stored()["short/a"]) == 1 })
	killed := make(chan struct{})
	go func() { defer close(killed); kill(d) }()
	outlast(t, 50*time.Millisecond)
	close(hang)
	<-killed
	r.bus.set(nil, nil)
	for range 10 { // pushes it out
		if _, err := r.bus.Publish(t.Context(), "short", []byte("1"), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	outlast(t, 1100*time.Millisecond)
	if _, err := db.ExecContext(t.Context(), "UPDATE outbox SET lease_until = 1 WHERE status = 'claimed'"); err != nil {
		t.Fatal(err)
	}
	if did := r.drain(nil); did.Parked != 1 {
		t.Errorf("got %+v", did)
	}
	list, err := r.Store.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
	if err != nil || len(list) != 1 || !strings.Contains(list[0].LastErr, "cannot say") {
		t.Fatalf("parked are %+v, %v", list, err)
	}
	if n, err := r.Store.Retry(t.Context()); n != 1 || err != nil {
		t.Fatalf("retry: %d, %v", n, err)
	}
	if did := r.drain(nil); did.Published != 1 {
		t.Errorf("got %+v", did)
	}
}

// A row that cannot be read, of which something may have been published, holds up none that it was
// claimed with.
func TestUnreadableRowsHoldUpNobody(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "short", DuplicateWindow: time.Second}}}))
	publish := func() {
		if _, err := r.bus.Bus.Publish(t.Context(), "short", []byte("1"), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	publish()
	for range 6 {
		r.add("short", "")
	}
	for _, query := range []string{
		"UPDATE outbox SET publish_began = added_at - 60000",
		"UPDATE outbox SET headers = '{' WHERE seq = (SELECT MIN(seq) FROM outbox)",
	} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	if did := r.drain(nil); did.Published != 5 || did.Parked != 1 {
		t.Errorf("got %+v", did)
	}
	if looks := r.bus.looks.Load(); looks != 1 {
		t.Errorf("%d look-ups", looks)
	}
}

// Drain ends when NATS or the store stays away; what it did not publish is left.
func TestDrainGivesUp(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	nats := natstest.Start(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{URL: nats.URL()}))
	r.add("orders", "k")
	nats.Stop()
	drain := func(change func(*outbox.Config)) error {
		cfg := outbox.Config{Store: s, Bus: r.bus, Patience: 500 * time.Millisecond, PublishTimeout: 100 * time.Millisecond}
		change(&cfg)
		d, err := outbox.NewDrainer(cfg)
		if err != nil {
			t.Fatal(err)
		}
		did, err := d.Drain(t.Context())
		if did != (outbox.Drained{}) {
			t.Errorf("it did %+v", did)
		}
		return err
	}
	if err := drain(func(*outbox.Config) {}); err == nil || t.Context().Err() != nil {
		t.Errorf("without NATS: %v", err)
	}
	if st := r.stats(); st.Pending != 1 {
		t.Errorf("left are %+v", st)
	}
	nats.Start()
	away := errors.New("no store")
	err := drain(func(c *outbox.Config) { c.Store = brokenStore{c.Store, away} })
	if !errors.Is(err, away) {
		t.Errorf("without a store: %v", err)
	}
}

// brokenStore claims nothing.
type brokenStore struct {
	outbox.Store
	err error
}

func (s brokenStore) Claim(context.Context, outbox.ClaimOptions) (outbox.Claim, error) {
	return outbox.Claim{}, s.err
}

func TestNATSAwayCostsNothing(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, h outboxtest.Harness) {
		t.Helper()
		nats := natstest.Start(t)
		r := newRig(t, h, openBus(t, jetstream.Config{URL: nats.URL()}))
		r.start(func(c *outbox.Config) { c.MaxAttempts, c.PublishTimeout, c.InFlight = 1, 300*time.Millisecond, 8 })
		for i := range 40 {
			r.add("orders", fmt.Sprint("k", i%5))
		}
		r.empty()
		nats.Stop()
		for i := range 200 {
			r.add("orders", fmt.Sprint("k", i%5))
			r.add("new.topic", "")
		}
		outlast(t, time.Second)
		if st := r.stats(); st.Errors > 0 || st.Pending+st.Claimed != 400 {
			t.Fatalf("while it is away: %+v", st)
		}
		if tried := r.bus.tried() - 40; tried > 50 {
			t.Errorf("%d publishes were tried while it was away", tried)
		}
		nats.Start()
		r.empty()
		r.exactly()
		if failed := r.seen.failed.Load(); failed > 0 {
			t.Errorf("%d failures were counted", failed)
		}
		if most := r.bus.most.Load(); most > 8 {
			t.Errorf("%d publishes at a time", most)
		}
	}
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		run(t, sqlHarness(newSQLite(t)))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		run(t, sqlHarness(newPostgres(t, pgtest.Start(t))))
	})
}

// One topic takes nothing while others do: its rows wait, and hold up nobody.
func TestOneTopicAway(t *testing.T) {
	t.Parallel()
	forStores(t, func(r *rig) {
		var closed atomic.Bool
		closed.Store(true)
		r.bus.set(func(_ context.Context, topic string, _ jetstream.PublishOptions) error {
			if topic == "closed" && closed.Load() {
				return unknownOutcome()
			}
			return nil
		}, nil)
		for range 60 {
			r.add("closed", "")
			r.add("closed", "k")
		}
		for i := range 60 {
			r.add("open", fmt.Sprint("k", i%5))
		}
		r.start(func(c *outbox.Config) { c.BatchSize, c.InFlight, c.MaxAttempts = 10, 4, 1 })
		eventually(r, "the other is published", func() bool { return r.left() == 120 })
		if st := r.stats(); st.Errors > 0 {
			r.Errorf("%+v", st)
		}
		outlast(r, 500*time.Millisecond)
		if tried := r.bus.tried(); tried > 60+40 { // a few each time that the pause is over
			r.Errorf("%d publishes were tried to a topic that is away", tried-60)
		}
		closed.Store(false)
		r.empty()
		r.exactly()
	})
}

// Publishes whose outcome stays unknown, stored or not, here and there: the rows behind wait.
func TestUnknownOutcomesKeepTheOrder(t *testing.T) {
	t.Parallel()
	forStores(t, func(r *rig) {
		for i := range 100 {
			r.add("orders", fmt.Sprint("k", i%3))
		}
		var before, after atomic.Int64
		r.bus.set(func(context.Context, string, jetstream.PublishOptions) error {
			if before.Add(1)%10 == 5 {
				return unknownOutcome()
			}
			return nil
		}, func(string, jetstream.PublishOptions) error {
			if after.Add(1)%10 == 8 {
				return unknownOutcome()
			}
			return nil
		})
		r.start(func(c *outbox.Config) { c.BatchSize, c.MaxAttempts = 20, 1 })
		r.empty()
		r.exactly()
		if failed := r.seen.failed.Load(); failed > 0 {
			r.Errorf("%d failures were counted", failed)
		}
	})
}

// The database cannot be reached for a while, and comes back.
func TestStoreAway(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	h := sqlHarness(s, db)
	store := &flakyStore{Store: h.Store}
	h.Store = store
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	for i := range 50 {
		r.add("orders", fmt.Sprint("k", i%3))
	}
	store.fails.Store(true)
	d := r.start(func(c *outbox.Config) { c.Lease = 500 * time.Millisecond })
	eventually(t, "it tries", func() bool { return store.calls.Load() > 2 })
	var once sync.Once
	r.bus.set(nil, func(string, jetstream.PublishOptions) error {
		once.Do(func() { store.fails.Store(true) })
		return nil
	})
	store.fails.Store(false)
	eventually(t, "it publishes, and cannot say so", func() bool { return r.seen.published.Load() > 0 && store.fails.Load() })
	outlast(t, 700*time.Millisecond) // longer than the lease
	store.fails.Store(false)
	r.empty()
	r.exactly()
	if err := d.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// The clock of NATS went back after a publish whose outcome is unknown: the record is not taken for
// one that was never published, though its publish seems to have begun later than now.
func TestNATSClockGoesBack(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "short", DuplicateWindow: time.Second}}}))
	for _, key := range []string{"a", "a", "b", ""} {
		id := r.add("short", key)
		if _, err := r.bus.Publish(t.Context(), "short", []byte(`"it was stored"`), jetstream.PublishOptions{ID: id, Key: key}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.ExecContext(t.Context(), "UPDATE outbox SET publish_began = added_at + 30000"); err != nil {
		t.Fatal(err)
	}
	outlast(t, 1200*time.Millisecond) // longer than the window
	r.drain(nil)
	r.exactly()
	if found := r.seen.found.Load(); found != 4 {
		t.Errorf("%d were found in the stream, want 4", found)
	}
}

// goneStore is one whose host is gone without a word: only the end of a context ends a call of it.
type goneStore struct {
	outbox.Store
	claims atomic.Int64
}

func (*goneStore) RequeueExpired(context.Context) (int, error) { return 0, nil }

func (*goneStore) Listen(context.Context, outbox.Sleeper) error { return outbox.ErrCannotListen }

func (*goneStore) Now(ctx context.Context) (time.Time, error) {
	<-ctx.Done()
	return time.Time{}, ctx.Err()
}

func (s *goneStore) Claim(ctx context.Context, _ outbox.ClaimOptions) (outbox.Claim, error) {
	s.claims.Add(1)
	<-ctx.Done()
	return outbox.Claim{}, ctx.Err()
}

func TestStoreThatNeverAnswersIsAskedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(goneStore)
		d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: new(watcher)})
		if err != nil {
			t.Fatal(err)
		}
		d.Start()
		outlast(t, 5*time.Minute)
		if n := s.claims.Load(); n < 3 {
			t.Errorf("%d claims in 5 minutes, want one a minute", n)
		}
		kill(d)
	})
}
