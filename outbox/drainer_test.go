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
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
)

func TestDrainerPublishesAllInOrder(t *testing.T) {
	t.Parallel()
	forStores(t, func(r *rig) {
		for i := range 60 {
			r.add("orders", fmt.Sprint("k", i%4))
			r.add("orders", "")
			r.add("mails", "k1")
		}
		r.start(func(c *outbox.Config) { c.BatchSize, c.InFlight = 50, 8 })
		for i := range 20 {
			r.add("orders", fmt.Sprint("k", i%4))
		}
		r.empty()
		r.exactly()
		if most := r.bus.most.Load(); most > 8 || most < 2 {
			r.Errorf("%d publishes at a time, want up to 8", most)
		}
		eventually(r, "the observer is told", func() bool {
			st := r.seen.backlog.Load()
			return r.seen.published.Load() == 200 && r.seen.claimed.Load() >= 200 && st != nil && st.Pending == 0
		})
	})
}

func TestEventIsWhatWasAdded(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "state", Compaction: true}}}))
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
		if err := r.bus.Bus.History(topic).Scan(t.Context(), jetstream.ScanOptions{}, func(got *jetstream.Event) error { e = got; return nil }); err != nil || e == nil {
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
	t.Parallel()
	forStores(t, func(r *rig) {
		for i := range 200 {
			r.add("orders", fmt.Sprint("k", i%9))
			if i%3 == 0 {
				r.add("orders", "")
			}
		}
		short := func(c *outbox.Config) { c.Lease, c.BatchSize, c.InFlight = 200*time.Millisecond, 40, 4 }
		for range 5 {
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

func TestFailuresAreRetriedAndParked(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "small", MaxPayload: 10}, {Pattern: "state", Compaction: true}}}))
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
	t.Parallel()
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
	t.Parallel()
	forStores(t, func(r *rig) {
		for range 4 {
			r.start(func(c *outbox.Config) { c.BatchSize, c.InFlight = 20, 4 })
		}
		for i := range 200 {
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

// timed counts successful calls of Renew, and notes how long the longest call of those took that a
// drainer makes between two renewals.
type timed struct {
	outbox.Store
	n atomic.Int64

	mu      sync.Mutex
	longest time.Duration
}

func (s *timed) took(began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.longest = max(s.longest, time.Since(began))
}

func (s *timed) Renew(ctx context.Context, worker string, lease time.Duration, r []*outbox.Record) ([]string, error) {
	defer s.took(time.Now())
	lost, err := s.Store.Renew(ctx, worker, lease, r)
	if err == nil {
		s.n.Add(1)
	}
	return lost, err
}

func (s *timed) Claim(ctx context.Context, o outbox.ClaimOptions) (outbox.Claim, error) {
	defer s.took(time.Now())
	return s.Store.Claim(ctx, o)
}

func (s *timed) RequeueExpired(ctx context.Context) (int, error) {
	defer s.took(time.Now())
	return s.Store.RequeueExpired(ctx)
}

func (s *timed) Stats(ctx context.Context) (outbox.Stats, error) {
	defer s.took(time.Now())
	return s.Store.Stats(ctx)
}

// A lease that is much shorter than the work is renewed as long as that takes. Where machine and
// store stood still for a quarter of a lease, nothing is proved: the test tries a longer lease.
func TestLeasesAreRenewedWhilePublishing(t *testing.T) {
	t.Parallel()
	forStores(t, func(r *rig) {
		for lease := time.Second; ; lease *= 2 {
			taken, stood := holdBeyond(r, lease)
			if !taken {
				return
			}
			if stood < lease/4 || lease >= 8*time.Second {
				r.Fatalf("another drainer took the record; the lease is %v, and machine and store stood still for at most %v", lease, stood)
			}
			r.Logf("machine and store stood still for %v, with a lease of %v", stood, lease)
		}
	})
}

// holdBeyond holds up a publish for longer than the lease of its record. It returns whether another
// drainer took the record meanwhile, and for how long the machine gave a goroutine no time, and the
// store did not answer, at most.
func holdBeyond(r *rig, lease time.Duration) (taken bool, stood time.Duration) {
	r.Helper()
	r.add("orders", "a")
	hold, began := make(chan struct{}), make(chan struct{}, 10)
	r.bus.set(func(context.Context, string, jetstream.PublishOptions) error {
		began <- struct{}{}
		<-hold
		return nil
	}, nil)
	store := &timed{Store: r.Store}
	short := func(c *outbox.Config) { c.Store, c.Lease = store, lease }
	first := r.start(short)
	<-began
	claimed := time.Now()
	second := r.start(short)
	looked := claimed
	// a third of the lease apart
	eventually(r, "the lease is renewed beyond its end", func() bool {
		now := time.Now()
		stood = max(stood, now.Sub(looked))
		looked = now
		taken = taken || len(began) > 0
		return taken || store.n.Load() >= 5 && now.Sub(claimed) > lease*3/2
	})
	close(hold)
	r.empty()
	r.exactly()
	for _, d := range []*outbox.Drainer{first, second} {
		if err := d.Stop(r.Context()); err != nil {
			r.Error(err)
		}
	}
	store.mu.Lock()
	defer store.mu.Unlock()
	return taken, stood + store.longest
}

func TestStopWithoutStart(t *testing.T) {
	t.Parallel()
	s, _ := newSQLite(t)
	d, err := outbox.NewDrainer(outbox.Config{Store: s, Bus: outbox.JetStream(openBus(t, jetstream.Config{}))})
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
	_, err := outbox.NewDrainer(outbox.Config{BatchSize: -1, Lease: time.Millisecond, Worker: strings.Repeat("w", 129)})
	if err == nil || !strings.Contains(err.Error(), "Store") || !strings.Contains(err.Error(), "batch size") || !strings.Contains(err.Error(), "lease") || !strings.Contains(err.Error(), "worker") {
		t.Errorf("got %v", err)
	}
	for _, cfg := range []outbox.SQLConfig{{}, {Dialect: "mysql"}, {Dialect: outbox.SQLite, Table: "a b"}, {Dialect: outbox.SQLite, Table: "Outbox"}} {
		if _, err := outbox.NewSQLStore(cfg); err == nil {
			t.Errorf("%+v was taken", cfg)
		}
	}
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

// A drainer that lost a lease and has claimed the same records again does not settle them by what
// became of them before.
func TestRecordsClaimedAgainByTheSameDrainer(t *testing.T) {
	t.Parallel()
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
	d := r.drainer(func(c *outbox.Config) { c.Lease = 400 * time.Millisecond })
	outbox.NeverStalls(d)
	r.run(d)
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
