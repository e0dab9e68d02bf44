package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
	"eventhub/outbox/pgtest"
)

func TestDrainerPublishesAllInOrder(t *testing.T) {
	forStores(t, func(r *rig) {
		for i := range 150 {
			r.add("orders", fmt.Sprint("k", i%4))
			r.add("orders", "")
			r.add("mails", "k1")
		}
		r.start(func(c *outbox.Config) { c.BatchSize, c.InFlight = 50, 8 })
		for i := range 50 {
			r.add("orders", fmt.Sprint("k", i%4))
		}
		r.empty()
		r.exactly()
		if most := r.bus.most.Load(); most > 8 || most < 2 {
			r.Errorf("%d publishes at a time, want up to 8", most)
		}
		eventually(r, "the observer is told", func() bool {
			st := r.seen.backlog.Load()
			return r.seen.published.Load() == 500 && r.seen.claimed.Load() >= 500 && st != nil && st.Pending == 0
		})
	})
}

func TestEventIsWhatWasAdded(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []jetstream.TopicRule{{Pattern: "state", Compaction: true}}}))
	rec := &outbox.Record{
		Topic: "orders", Key: "a:1/b", Type: "Placed", Payload: []byte(`{"n": 12345678901234567890}`), Headers: map[string]string{"x": "y"},
		SID: "s", Tags: []string{"t"}, CausedBy: []string{"c"}, TS: 1234567890123,
	}
	for _, rec := range []*outbox.Record{rec, {Topic: "state", Key: "k", Tombstone: true}} {
		if err := r.Add(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
	}
	if did := r.drain(nil); did.Published != 2 {
		t.Fatalf("got %+v", did)
	}
	last := func(topic string) *jetstream.Event {
		var e *jetstream.Event
		if err := r.bus.Scan(t.Context(), topic, jetstream.ScanOptions{}, func(got *jetstream.Event) error { e = got; return nil }); err != nil || e == nil {
			t.Fatalf("got %v, %v", e, err)
		}
		return e
	}
	e := last("orders")
	if e.ID != rec.ID || e.Key != rec.Key || e.Headers["type"] != "Placed" || e.Headers["x"] != "y" || string(e.Payload) != string(rec.Payload) ||
		e.SID != "s" || !slices.Equal(e.Tags, rec.Tags) || !slices.Equal(e.CausedBy, rec.CausedBy) || e.TS != rec.TS {
		t.Errorf("got %+v", e)
	}
	if e := last("state"); !e.Tombstone || e.Key != "k" {
		t.Errorf("got %+v, want a tombstone", e)
	}
}

// Drainers are killed over and over in the middle of publishes.
func TestKilledDrainersPublishOnce(t *testing.T) {
	forStores(t, func(r *rig) {
		for i := range 300 {
			r.add("orders", fmt.Sprint("k", i%9))
			if i%3 == 0 {
				r.add("orders", "")
			}
		}
		short := func(c *outbox.Config) { c.Lease, c.BatchSize, c.InFlight = 200*time.Millisecond, 40, 4 }
		for range 8 {
			reached := make(chan struct{})
			var n atomic.Int64
			r.bus.set(nil, func(string, jetstream.PublishOptions) error {
				if n.Add(1) == 20 {
					close(reached)
				}
				return nil
			})
			d := r.start(short)
			<-reached
			kill(d)
		}
		r.bus.set(nil, nil)
		r.start(short)
		r.empty()
		r.exactly()
	})
}

// What one drainer publishes is stored, but it is killed before it learns that, and the server forgets the ids.
func TestWhatTheServerForgotIsLookedUp(t *testing.T) {
	rules := []jetstream.TopicRule{{Pattern: "short", DuplicateWindow: time.Second}, {Pattern: "long"}}
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: rules}))
	for i := range 10 {
		r.add("short", fmt.Sprint("k", i%3))
		r.add("short", "")
		r.add("long", "k")
	}
	hang := make(chan struct{})
	var stored atomic.Int64
	r.bus.set(nil, func(string, jetstream.PublishOptions) error {
		stored.Add(1)
		<-hang
		return unknownOutcome()
	})
	d := r.start(func(c *outbox.Config) { c.Lease = 100 * time.Millisecond })
	eventually(t, "all lanes are published to", func() bool { return stored.Load() == 14 })
	killed := make(chan struct{})
	go func() { defer close(killed); kill(d) }()
	outlast(t, 50*time.Millisecond) // so that it is killed before it learns the outcome; either way it is unknown
	close(hang)
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
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []jetstream.TopicRule{{Pattern: "short", DuplicateWindow: time.Second, MaxMsgs: 5}}}))
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

// A row that cannot be read, of which something may have been published, holds up none that it was claimed with.
func TestUnreadableRowsHoldUpNobody(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []jetstream.TopicRule{{Pattern: "short", DuplicateWindow: time.Second}}}))
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

func TestFailuresAreRetriedAndParked(t *testing.T) {
	forStores(t, func(r *rig) {
		bad := r.add("orders", "a")
		r.add("orders", "a")
		flaky := r.add("orders", "b")
		after := r.add("orders", "b")
		var fails atomic.Int64
		r.bus.set(func(_ context.Context, _ string, o jetstream.PublishOptions) error {
			if o.ID == bad || o.ID == flaky && fails.Add(1) <= 3 {
				return errors.New("poison")
			}
			return nil
		}, nil)
		r.start(func(c *outbox.Config) { c.MaxAttempts = 4 })
		eventually(r, "one is parked", func() bool { return r.stats().Errors == 1 })
		eventually(r, "others go on", func() bool { return len(r.stored()["orders/b"]) == 2 })
		if got := r.stored(); !slices.Equal(got["orders/b"], []string{flaky, after}) || len(got["orders/a"]) > 0 {
			r.Errorf("got %q", got)
		}
		list, err := r.Store.List(context.Background(), outbox.ListOptions{Status: outbox.Errored})
		if err != nil || len(list) != 1 || list[0].ID != bad || list[0].Attempts != 4 || list[0].LastErr != "poison" {
			r.Fatalf("parked are %+v, %v", list, err)
		}
		r.bus.set(nil, nil)
		if n, err := r.Store.Retry(context.Background(), bad); n != 1 || err != nil {
			r.Fatalf("retry: %d, %v", n, err)
		}
		r.empty()
		r.exactly()
	})
}

func TestKeysCanGoOnPastWhatIsParked(t *testing.T) {
	forStores(t, func(r *rig) {
		bad := r.add("orders", "a")
		behind := r.add("orders", "a")
		r.bus.set(refuse(bad), nil)
		r.start(func(c *outbox.Config) { c.MaxAttempts, c.PassErrors = 2, true })
		eventually(r, "the key goes on", func() bool { return slices.Equal(r.stored()["orders/a"], []string{behind}) })
		eventually(r, "one is parked", func() bool { return r.stats().Errors == 1 && r.left() == 0 })
	})
}

func TestWhatTheBusNeverTakesIsParkedAtOnce(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []jetstream.TopicRule{{Pattern: "small", MaxPayload: 10}, {Pattern: "state", Compaction: true}}}))
	// By plain SQL, as another language would.
	for _, row := range [][5]string{
		{"bad_topic", "a..b", "k", "1", ""},
		{"bad_options", "orders", "k", "1", `{"Nats-Msg-Id":"x"}`},
		{"keyless", "state", "", "1", ""},
		{"too large", "small", "k", `"0123456789"`, ""},
		{"no headers", "orders", "l", "1", "{"},
		{"good", "orders", "m", "1", ""},
	} {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload, headers) VALUES (?, ?, ?, ?, ?)",
			row[0], row[1], row[2], row[3], row[4]); err != nil {
			t.Fatal(err)
		}
	}
	if did := r.drain(nil); did.Published != 1 || did.Parked != 5 || did.Failed != 0 {
		t.Errorf("got %+v", did)
	}
	list, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
	if err != nil {
		t.Fatal(err)
	}
	for _, rec := range list {
		if rec.Attempts != 1 || rec.LastErr == "" {
			t.Errorf("%s: %d attempts, %q", rec.ID, rec.Attempts, rec.LastErr)
		}
	}
}

func TestGracefulStopFinishesWhatIsClaimed(t *testing.T) {
	forStores(t, func(r *rig) {
		for i := range 60 {
			r.add("orders", fmt.Sprint("k", i%3))
		}
		began, hold := make(chan struct{}), make(chan struct{})
		var once sync.Once
		r.bus.set(func(context.Context, string, jetstream.PublishOptions) error {
			once.Do(func() { close(began) })
			<-hold
			return nil
		}, nil)
		d := r.start(func(c *outbox.Config) { c.BatchSize = 30 })
		<-began
		stopped := make(chan error, 1)
		go func() { stopped <- d.Stop(context.Background()) }()
		outlast(r, 20*time.Millisecond)
		close(hold)
		if err := <-stopped; err != nil {
			r.Fatal(err)
		}
		if err := d.Stop(context.Background()); err != nil {
			r.Errorf("the second time: %v", err)
		}
		if st := r.stats(); st.Claimed != 0 || st.Pending < 30 || st.Pending == 60 {
			r.Errorf("%+v is left: want nothing claimed, and what was not claimed", st)
		}
	})
}

func TestSeveralDrainers(t *testing.T) {
	forStores(t, func(r *rig) {
		for range 4 {
			r.start(func(c *outbox.Config) { c.BatchSize, c.InFlight = 20, 4 })
		}
		for i := range 400 {
			r.add("orders", fmt.Sprint("k", i%13))
			if i%4 == 0 {
				r.add("orders", "")
			}
		}
		r.empty()
		r.exactly()
		r.bus.mu.Lock()
		defer r.bus.mu.Unlock()
		for id, n := range r.bus.calls {
			if n != 1 {
				r.Errorf("%s was published %d times", id, n)
			}
		}
	})
}

// A lease that is much shorter than the work is renewed as long as that takes.
func TestLeasesAreRenewedWhilePublishing(t *testing.T) {
	forStores(t, func(r *rig) {
		r.add("orders", "a")
		hold, began := make(chan struct{}), make(chan struct{}, 10)
		r.bus.set(func(context.Context, string, jetstream.PublishOptions) error {
			began <- struct{}{}
			<-hold
			return nil
		}, nil)
		short := func(c *outbox.Config) { c.Lease = 500 * time.Millisecond }
		r.start(short)
		<-began
		r.start(short)
		outlast(r, 1500*time.Millisecond)
		if len(began) > 0 {
			r.Error("another drainer took it")
		}
		close(hold)
		r.empty()
		r.exactly()
	})
}

func TestNATSAwayCostsNothing(t *testing.T) {
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
	t.Run("sqlite", func(t *testing.T) { run(t, sqlHarness(newSQLite(t))) })
	t.Run("postgres", func(t *testing.T) { run(t, sqlHarness(newPostgres(t, pgtest.Start(t)))) })
}

// One topic takes nothing while others do: its rows wait, and hold up nobody.
func TestOneTopicAway(t *testing.T) {
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

func TestStopWithoutStart(t *testing.T) {
	s, _ := newSQLite(t)
	d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: openBus(t, jetstream.Config{})})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := d.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	d.Start()
	if _, err := d.Drain(t.Context()); err == nil {
		t.Error("it began after its end")
	}
}

func TestBadConfig(t *testing.T) {
	_, err := outbox.NewDrainer(outbox.Config{BatchSize: -1, Lease: time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "Store") || !strings.Contains(err.Error(), "batch size") || !strings.Contains(err.Error(), "lease") {
		t.Errorf("got %v", err)
	}
	for _, cfg := range []outbox.SQLConfig{{}, {Dialect: "mysql"}, {Dialect: outbox.SQLite, Table: "a b"}, {Dialect: outbox.SQLite, Table: "Outbox"}} {
		if _, err := outbox.NewSQLStore(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
}

// The store's clock went back after a publish whose outcome is unknown, as when another server of a database takes over: the
// record is not taken for one that was never published.
func TestStoreClockGoesBack(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []jetstream.TopicRule{{Pattern: "short", DuplicateWindow: time.Second}}}))
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

func (*goneStore) Listen(context.Context, func()) error { return outbox.ErrCannotListen }

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

// renewStore cannot renew leases until some have ended.
type renewStore struct {
	outbox.Store
	ended atomic.Bool
}

func (s *renewStore) Renew(ctx context.Context, worker string, lease time.Duration, r []*outbox.Record) ([]string, error) {
	if !s.ended.Load() {
		return nil, errAway
	}
	return s.Store.Renew(ctx, worker, lease, r)
}

func (s *renewStore) RequeueExpired(ctx context.Context) (int, error) {
	n, err := s.Store.RequeueExpired(ctx)
	if n > 0 {
		s.ended.Store(true)
	}
	return n, err
}

// A drainer that lost a lease and has claimed the same records again does not settle them by what became of them before.
func TestRecordsClaimedAgainByTheSameDrainer(t *testing.T) {
	s, db := newSQLite(t)
	h := sqlHarness(s, db)
	h.Store = &renewStore{Store: s}
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	first, second := make(chan struct{}), make(chan struct{})
	var calls atomic.Int64
	r.bus.set(func(_ context.Context, _ string, o jetstream.PublishOptions) error {
		if o.ID != "id-000001" {
			return nil
		}
		switch calls.Add(1) {
		case 1:
			<-first
			return unknownOutcome()
		case 2:
			<-second
		}
		return nil
	}, nil)
	r.add("orders", "k")
	r.add("orders", "k")
	r.start(func(c *outbox.Config) { c.Lease = 400 * time.Millisecond })
	eventually(t, "it has claimed them again", func() bool { return calls.Load() == 2 })
	close(first)
	outlast(t, 300*time.Millisecond)
	held, err := s.List(t.Context(), outbox.ListOptions{Status: outbox.Claimed})
	if err != nil || len(held) != 2 || calls.Load() != 2 {
		t.Errorf("%d records are claimed after %d publishes of the first, want 2 and 2; %v", len(held), calls.Load(), err)
	}
	for _, rec := range held {
		if rec.PublishBegan == 0 {
			t.Errorf("%s is taken for unsent while it is published", rec.ID)
		}
	}
	close(second)
	r.empty()
	r.exactly()
}
