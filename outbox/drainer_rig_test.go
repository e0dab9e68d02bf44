package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
	"eventhub/outbox/pgtest"
)

// watcher is a bus whose publishes a test can see and refuse.
type watcher struct {
	*jetstream.Bus
	mu     sync.Mutex
	before beforePublish
	after  afterPublish
	calls  map[string]int // by id

	now, most, looks atomic.Int64 // publishes under way, the most at a time; look-ups
}

type (
	// an error refuses
	beforePublish = func(ctx context.Context, topic string, o jetstream.PublishOptions) error
	// it is stored; an error hides that
	afterPublish = func(topic string, o jetstream.PublishOptions) error
)

func (w *watcher) Publish(ctx context.Context, topic string, payload []byte, o jetstream.PublishOptions) (jetstream.Receipt, error) {
	n := w.now.Add(1)
	defer w.now.Add(-1)
	for m := w.most.Load(); n > m && !w.most.CompareAndSwap(m, n); m = w.most.Load() {
	}
	w.mu.Lock()
	if w.calls == nil {
		w.calls = make(map[string]int)
	}
	w.calls[o.ID]++
	before, after := w.before, w.after
	w.mu.Unlock()
	if before != nil {
		if err := before(ctx, topic, o); err != nil {
			return jetstream.Receipt{}, err
		}
	}
	r, err := w.Bus.Publish(ctx, topic, payload, o)
	if err == nil && after != nil {
		err = after(topic, o)
	}
	return r, err
}

func (w *watcher) History(topic string) outbox.History {
	return counting{w.Bus.History(topic), &w.looks}
}

// counting counts look-ups.
type counting struct {
	jetstream.History
	looks *atomic.Int64
}

func (c counting) FindIDs(ctx context.Context, s jetstream.IDSearch) (map[string]bool, bool, error) {
	c.looks.Add(1)
	return c.History.FindIDs(ctx, s)
}

func (w *watcher) Now(ctx context.Context) (time.Time, error) {
	if w.Bus == nil {
		return time.Now(), nil
	}
	return w.Bus.Admin().NATS().Now(ctx)
}

func (w *watcher) MaxPayload() int {
	if w.Bus == nil {
		return outbox.DefaultMaxPayload
	}
	return w.Bus.MaxPayload()
}

func (w *watcher) set(before beforePublish, after afterPublish) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before, w.after = before, after
}

// tried is how many publishes were tried.
func (w *watcher) tried() (total int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, n := range w.calls {
		total += n
	}
	return total
}

// refuse is a beforePublish that refuses one id.
func refuse(id string) beforePublish {
	return func(_ context.Context, _ string, o jetstream.PublishOptions) error {
		if o.ID == id {
			return errors.New("poison")
		}
		return nil
	}
}

// unknownOutcome is what the bus says when no answer came.
func unknownOutcome() error {
	return &jetstream.Error{Code: jetstream.CodePublishFailed, Msg: "the outcome is unknown", Err: errors.New("no reply in time")}
}

// counts is an Observer.
type counts struct {
	claimed, unclaimed, published, found, failed, parked, skew, unsettled atomic.Int64
	backlog                                                               atomic.Pointer[outbox.Stats]
}

func (c *counts) Claimed(rows int, _ time.Duration) { c.claimed.Add(int64(rows)) }

func (c *counts) ClaimFailed() { c.unclaimed.Add(1) }

func (c *counts) SettleFailed() { c.unsettled.Add(1) }

func (c *counts) Published(_ time.Duration, found bool) {
	c.published.Add(1)
	if found {
		c.found.Add(1)
	}
}

func (c *counts) Failed(parked bool) {
	c.failed.Add(1)
	if parked {
		c.parked.Add(1)
	}
}

func (c *counts) Backlog(s outbox.Stats) { c.backlog.Store(&s) }

func (c *counts) ClockSkew(skew time.Duration) { c.skew.Store(int64(skew)) }

// rig is a store and a bus, and what was added.
type rig struct {
	testing.TB
	outboxtest.Harness
	bus   *watcher
	added map[string][]string // ids by topic/key, in order
	n     int
	seen  *counts
}

func newRig(tb testing.TB, h outboxtest.Harness, bus *jetstream.Bus) *rig {
	tb.Helper()
	return &rig{TB: tb, Harness: h, bus: &watcher{Bus: bus}, added: make(map[string][]string), seen: new(counts)}
}

// forStores runs a test with each kind of store, at the same time.
func forStores(t *testing.T, run func(r *rig)) {
	t.Helper()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		run(newRig(t, sqlHarness(newSQLite(t)), openBus(t, jetstream.Config{})))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		run(newRig(t, sqlHarness(newPostgres(t, pgtest.Start(t))), openBus(t, jetstream.Config{})))
	})
	t.Run("kv", func(t *testing.T) {
		t.Parallel()
		bus := openBus(t, jetstream.Config{})
		s, err := outbox.NewKVStore(outbox.KVConfig{Collection: openCollection(t, bus, "outbox")})
		if err != nil {
			t.Fatal(err)
		}
		run(newRig(t, outboxtest.Harness{Store: s, Add: s.Add}, bus))
	})
}

// add adds a record and returns its id.
func (r *rig) add(topic, key string) string {
	r.Helper()
	r.n++
	rec := &outbox.Record{ID: fmt.Sprintf("id-%06d", r.n), Topic: topic, Key: key, Payload: []byte(strconv.Itoa(r.n))}
	if err := r.Add(r.Context(), rec); err != nil {
		r.Fatal(err)
	}
	r.added[topic+"/"+key] = append(r.added[topic+"/"+key], rec.ID)
	return rec.ID
}

func (r *rig) drainer(change func(*outbox.Config)) *outbox.Drainer {
	r.Helper()
	cfg := outbox.Config{
		Store: r.Store, Bus: r.bus, Poll: 10 * time.Millisecond, RetryFirst: 10 * time.Millisecond, RetryMax: 50 * time.Millisecond,
		StatsEvery: 20 * time.Millisecond, Observer: r.seen, Logger: logger(r),
	}
	if change != nil {
		change(&cfg)
	}
	d, err := outbox.NewDrainer(cfg)
	if err != nil {
		r.Fatal(err)
	}
	return d
}

// start starts a drainer that the test stops.
func (r *rig) start(change func(*outbox.Config)) *outbox.Drainer {
	r.Helper()
	d := r.drainer(change)
	r.run(d)
	return d
}

// run starts a drainer that the test stops.
func (r *rig) run(d *outbox.Drainer) {
	r.Helper()
	d.Start()
	r.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := d.Stop(ctx); err != nil {
			r.Errorf("stop: %v", err)
		}
	})
}

// drain publishes what there is.
func (r *rig) drain(change func(*outbox.Config)) outbox.Drained {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	did, err := r.drainer(change).Drain(ctx)
	if err != nil {
		r.Fatal(err)
	}
	return did
}

// kill ends a drainer in the middle of its work.
func kill(d *outbox.Drainer) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = d.Stop(ctx)
}

func (r *rig) stats() outbox.Stats {
	r.Helper()
	st, err := r.Store.Stats(context.Background())
	if err != nil {
		r.Fatal(err)
	}
	return st
}

// left is how many are pending or claimed.
func (r *rig) left() int {
	r.Helper()
	st := r.stats()
	return st.Pending + st.Claimed
}

// empty waits until everything is published. Something of it must be within the patience, again and
// again.
func (r *rig) empty() {
	r.Helper()
	for left := -1; left != 0; {
		before := left
		eventually(r, "everything is published", func() bool {
			left = r.left()
			return left != before
		})
	}
}

// stored are the ids of the events of the topics that records were added for, by topic/key.
func (r *rig) stored() map[string][]string {
	r.Helper()
	stored, topics := make(map[string][]string), make(map[string]bool)
	for lane := range r.added {
		topic, _, _ := strings.Cut(lane, "/")
		topics[topic] = true
	}
	for topic := range topics {
		if err := r.bus.Bus.History(topic).Scan(context.Background(), jetstream.ScanOptions{Limit: 1_000_000}, func(e *jetstream.Event) error {
			stored[topic+"/"+e.Key] = append(stored[topic+"/"+e.Key], e.ID)
			return nil
		}); err != nil {
			r.Fatal(err)
		}
	}
	return stored
}

// exactly asserts that what was added is stored, once each, in order for each key.
func (r *rig) exactly() {
	r.Helper()
	stored := r.stored()
	for lane, want := range r.added {
		got := stored[lane]
		if strings.HasSuffix(lane, "/") { // no key, no order
			slices.Sort(got)
		}
		if !slices.Equal(got, want) {
			r.Errorf("lane %s has %d events, want %d:\n%q\n%q", lane, len(got), len(want), got, want)
		}
	}
}

// outlast waits for a time whose end nothing tells: the server's window, or that nothing happens
// meanwhile.
func outlast(tb testing.TB, d time.Duration) {
	tb.Helper()
	select {
	case <-time.After(d):
	case <-tb.Context().Done():
	}
}

// flakyStore is a store whose writes fail when told to.
type flakyStore struct {
	outbox.Store
	fails atomic.Bool
	calls atomic.Int64
}

var errAway = errors.New("the database is away")

func (s *flakyStore) Claim(ctx context.Context, o outbox.ClaimOptions) (outbox.Claim, error) {
	s.calls.Add(1)
	if s.fails.Load() {
		return outbox.Claim{}, errAway
	}
	return s.Store.Claim(ctx, o)
}

func (s *flakyStore) Settle(ctx context.Context, worker string, st outbox.Settlement) (outbox.Unsettled, error) {
	if s.fails.Load() {
		return outbox.Unsettled{}, errAway
	}
	return s.Store.Settle(ctx, worker, st)
}

func (s *flakyStore) Renew(ctx context.Context, worker string, lease time.Duration, r []*outbox.Record) ([]string, error) {
	if s.fails.Load() {
		return nil, errAway
	}
	return s.Store.Renew(ctx, worker, lease, r)
}
