package jetstream

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// The long forms, as in RELIABILITY.md:
//
//	go test ./jetstream -run TestReadYourWrite -ryw.tries 100000 -ryw.cluster 10000 -ryw.rate 10000 -v -timeout 60m
var (
	rywTries   = flag.Int("ryw.tries", 500, "publishes that are read back on one server")
	rywCluster = flag.Int("ryw.cluster", 60, "publishes that are read back on a cluster of three")
	rywRate    = flag.Int("ryw.rate", 1_000, "events a second that native clients publish meanwhile")
)

// Sizes of reading back.
const (
	rywTopic   = "state.readback"
	rywKeys    = 64 // few, so that publishers and readers meet
	rywWorkers = 3  // a hub
	rywNoise   = 2  // native publishers

	// Keys of each of them. One page shows all keys, so that none leaves it while it is looked for.
	rywNoiseKeys = 50
	rywPage      = rywKeys + rywNoise*rywNoiseKeys + 1
)

// What was confirmed is what a read of its key gives, or something newer: through any hub, under
// load, removed keys included.
func TestReadYourWrite(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	r := &readback{tries: *rywTries}
	for range 2 {
		r.hubs = append(r.hubs, openRemote(t, Config{URL: url, Topics: compactedRules}))
	}
	r.run(t, url)
}

// The same on a cluster, whose hubs are connected to different servers, and whose leaders change.
func TestReadYourWriteOnACluster(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 3)
	r := &readback{tries: *rywCluster, cluster: c}
	for _, n := range c.nodes {
		r.hubs = append(r.hubs, openRemote(t, Config{URL: n.URL(), Replicas: 3, Topics: compactedRules}))
	}
	r.run(t, c.urls())
}

// openRemote is open for many hubs under load: what they log is no help.
func openRemote(tb testing.TB, cfg Config) *Bus {
	tb.Helper()
	b, err := Open(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

// readback publishes through one hub and reads through another, over and over.
type readback struct {
	hubs    []*Bus
	tries   int
	cluster *natsProcesses // nil: one server
	next    atomic.Int64

	many, page, watch lags
	again             atomic.Int64 // publishes and reads that failed, and were made once more

	mu       sync.Mutex
	answered []answered
	arrivals map[string][]arrival // by key, in order
}

// answered is a publish that was confirmed, arrival an event that a Watch brought.
type (
	answered struct {
		key  string
		seq  uint64
		when time.Time
	}
	arrival struct {
		seq  uint64
		when time.Time
	}
)

// lags are how long after its confirmation a publish was to be seen.
type lags struct {
	mu    sync.Mutex
	took  []time.Duration
	stale int // of how many the first read did not show it
}

func (l *lags) add(took time.Duration, stale bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.took = append(l.took, took)
	if stale {
		l.stale++
	}
}

func (l *lags) String() string {
	if len(l.took) == 0 {
		return "none"
	}
	slices.Sort(l.took)
	at := func(p float64) time.Duration { return l.took[int(p*float64(len(l.took)-1))].Round(time.Microsecond) }
	return fmt.Sprintf("p50 %v, p99 %v, max %v; %d of %d were late at first (%.2f %%)",
		at(0.5), at(0.99), at(1), l.stale, len(l.took), 100*float64(l.stale)/float64(len(l.took)))
}

func (r *readback) run(t *testing.T, url string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	topic, err := r.hubs[0].streams.Topic(ctx, rywTopic, "")
	if err != nil {
		t.Fatal(err)
	}
	if r.cluster != nil {
		r.cluster.healthy(topic.Stream.Name, topic.Bucket.Stream)
	}
	// what a bucket needs to begin is no lag
	filled(t, r.hubs[0], rywTopic, "first", set(t, r.hubs[0], rywTopic, "first", ""))
	var beside, workers sync.WaitGroup
	for i := range rywNoise {
		nc, _ := nativeConn(t, url)
		beside.Go(func() { r.noise(ctx, nc, i) })
	}
	r.arrivals = make(map[string][]arrival)
	watching := make(chan struct{})
	beside.Go(func() { r.follow(ctx, watching) })
	<-watching
	if r.cluster != nil {
		beside.Go(func() { r.stepDowns(ctx, topic.Stream.Name, topic.Bucket.Stream) })
	}
	begin := time.Now()
	for i := range r.hubs {
		for w := range rywWorkers {
			workers.Go(func() {
				if err := r.work(ctx, i, uint64(i*rywWorkers+w)); err != nil {
					t.Error(err)
					cancel()
				}
			})
		}
	}
	workers.Wait()
	took := time.Since(begin)
	r.watched(t, ctx)
	cancel()
	beside.Wait()
	t.Logf("%d publishes were read back in %v; %d requests failed and were made again", r.tries, took.Round(time.Millisecond), r.again.Load())
	t.Logf("behind the confirmation: many keys %v", &r.many)
	t.Logf("behind the confirmation: first page %v", &r.page)
	t.Logf("behind the confirmation: watch %v", &r.watch)
}

// noise publishes other keys natively: at its share of the rate, or as many for each try as a slow
// machine can follow.
func (r *readback) noise(ctx context.Context, nc *nats.Conn, n int) {
	js, err := natsjs.New(nc)
	if err != nil {
		return
	}
	payload := make([]byte, 128)
	const beat = 2 * time.Millisecond
	tick := time.NewTicker(beat)
	defer tick.Stop()
	begin := time.Now()
	for i := 0; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		due := int(time.Since(begin).Seconds() * float64(*rywRate) / rywNoise)
		due = min(due, int(r.next.Load()+1)**rywRate/100)
		for ; i < due && ctx.Err() == nil; i++ {
			// What is lost when a leader changes is no loss here.
			_, _ = js.PublishAsync(fmt.Sprintf("keyed.noise-%d-%d.%s", n, i%rywNoiseKeys, rywTopic), payload, natsjs.WithStallWait(time.Second))
		}
	}
}

// stepDowns makes leaders change while the work goes on.
func (r *readback) stepDowns(ctx context.Context, streams ...string) {
	every := max(r.tries/10, 100)
	for i := 1; ; i++ {
		for r.next.Load() < int64(i*every) {
			if r.hubs[0].conn.Pause(ctx, 10*time.Millisecond) != nil {
				return
			}
		}
		ask, stop := context.WithTimeout(ctx, time.Second)
		// one that has no leader just now cannot
		_ = r.cluster.stepDown(ask, streams[i%len(streams)])
		stop()
	}
}

// follow watches through the last hub.
func (r *readback) follow(ctx context.Context, watching chan struct{}) {
	// it ends with ctx
	_ = r.hubs[len(r.hubs)-1].Keys(rywTopic).Watch(ctx, nil, func(e *event.Event) error {
		if e == nil {
			close(watching)
			return nil
		}
		if e.Key[0] == 'k' {
			r.mu.Lock()
			r.arrivals[e.Key] = append(r.arrivals[e.Key], arrival{e.Sequence, time.Now()})
			r.mu.Unlock()
		}
		return nil
	})
}

// work is one worker: it publishes through its own hub and reads through all in turn.
func (r *readback) work(ctx context.Context, hub int, seed uint64) error {
	random := rand.New(rand.NewPCG(3, seed))
	for {
		try := int(r.next.Add(1))
		if try > r.tries {
			return nil
		}
		key := "k" + strconv.Itoa(random.IntN(rywKeys))
		opts := PublishOptions{Key: key, Tombstone: random.IntN(10) == 0}
		payload := []byte(strconv.Itoa(try))
		if opts.Tombstone {
			payload = nil
		}
		var receipt event.Receipt
		err := r.insist(ctx, func(ctx context.Context) (err error) {
			receipt, err = r.hubs[hub].Publish(ctx, rywTopic, payload, opts)
			return err
		})
		if err != nil {
			return err
		}
		when := time.Now()
		r.mu.Lock()
		r.answered = append(r.answered, answered{key, receipt.Sequence, when})
		r.mu.Unlock()
		reader := r.hubs[(hub+try)%len(r.hubs)]
		written := written{key: key, seq: receipt.Sequence, payload: string(payload), gone: opts.Tombstone}
		if err := r.one(ctx, reader, written); err != nil {
			return err
		}
		if try%4 != 0 {
			continue
		}
		if err := r.consistent(ctx, reader, written); err != nil {
			return err
		}
		if opts.Tombstone {
			// whether a key is missing because of this one cannot be told from reads of many
			continue
		}
		if try%8 == 0 {
			err = r.lag(ctx, &r.many, written, func(ctx context.Context) (*event.Event, error) {
				got, err := reader.Keys(rywTopic).GetMany(ctx, []string{key, "none"})
				return got[key], err
			})
		} else {
			err = r.lag(ctx, &r.page, written, func(ctx context.Context) (*event.Event, error) {
				page, err := reader.Keys(rywTopic).Page(ctx, 0, rywPage)
				i := slices.IndexFunc(page, func(e *event.Event) bool { return e.Key == key })
				if i < 0 || err != nil {
					return nil, err
				}
				return page[i], nil
			})
		}
		if err != nil {
			return err
		}
	}
}

// written is what was confirmed.
type written struct {
	key     string
	seq     uint64
	payload string
	gone    bool
}

// shows is nil if an event is the one that was written, or a newer one of its key.
func (w *written) shows(e *event.Event) error {
	switch {
	case e == nil:
		return fmt.Errorf("%s is missing, and %d was confirmed", w.key, w.seq)
	case e.Key != w.key || e.Sequence < w.seq:
		return fmt.Errorf("%s is %d of %s, and %d was confirmed", w.key, e.Sequence, e.Key, w.seq)
	case e.Sequence == w.seq && (e.Tombstone != w.gone || string(e.Payload) != w.payload):
		return fmt.Errorf("%s is %q at %d (tombstone %v), and %q was confirmed", w.key, e.Payload, e.Sequence, e.Tombstone, w.payload)
	}
	return nil
}

// insist repeats what fails, or stays without an answer, because a leader changes.
func (r *readback) insist(ctx context.Context, f func(context.Context) error) error {
	deadline := time.Now().Add(slow)
	for {
		try, cancel := context.WithTimeout(ctx, 2*time.Second)
		err := f(try)
		cancel()
		if err == nil || errors.Is(err, event.ErrNotFound) || r.cluster == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		r.again.Add(1)
		if err := r.hubs[0].conn.Pause(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// one reads one key, which is never late.
func (r *readback) one(ctx context.Context, b *Bus, w written) error {
	var got map[string]*event.Event
	err := r.insist(ctx, func(ctx context.Context) (err error) {
		got, err = b.Keys(rywTopic).GetMany(ctx, []string{w.key})
		return err
	})
	if err != nil {
		return err
	}
	return r.judge(ctx, b, w, got[w.key], "GetMany")
}

// consistent reads several keys that way.
func (r *readback) consistent(ctx context.Context, b *Bus, w written) error {
	var got map[string]*event.Event
	err := r.insist(ctx, func(ctx context.Context) (err error) {
		got, err = b.Keys(rywTopic).GetConsistent(ctx, []string{"k0", w.key, "k1", "none"})
		return err
	})
	if err != nil {
		return err
	}
	return r.judge(ctx, b, w, got[w.key], "LatestConsistent")
}

// judge knows that a key is missing when it was removed, by this event or a later one.
func (r *readback) judge(ctx context.Context, b *Bus, w written, e *event.Event, read string) error {
	if e == nil {
		err := r.insist(ctx, func(ctx context.Context) (err error) {
			e, err = b.Keys(rywTopic).Get(ctx, w.key)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s gave nothing of %s, and %d was confirmed: %w", read, w.key, w.seq, err)
		}
		if e.Sequence == w.seq && !w.gone {
			return fmt.Errorf("%s gave nothing of %s, and %d was confirmed and is there", read, w.key, w.seq)
		}
	}
	if err := w.shows(e); err != nil {
		return fmt.Errorf("%s: %w", read, err)
	}
	return nil
}

// lag reads until the event is to be seen, or a newer one.
func (r *readback) lag(ctx context.Context, l *lags, w written, read func(context.Context) (*event.Event, error)) error {
	begin := time.Now()
	for reads := 0; ; reads++ {
		var e *event.Event
		err := r.insist(ctx, func(ctx context.Context) (err error) {
			e, err = read(ctx)
			return err
		})
		if err != nil {
			return err
		}
		took := time.Since(begin)
		if w.shows(e) == nil {
			if reads == 0 {
				took = 0 // it was there at once
			}
			l.add(took, reads > 0)
			return nil
		}
		if took > slow {
			return fmt.Errorf("after %v: %w", took, w.shows(e))
		}
		if err := r.hubs[0].conn.Pause(ctx, 100*time.Microsecond); err != nil {
			return err
		}
		// A key that was removed meanwhile is never seen.
		if reads%10 == 9 {
			now, err := r.hubs[0].Keys(rywTopic).Get(ctx, w.key)
			if err == nil && now.Tombstone && now.Sequence > w.seq {
				return nil
			}
		}
	}
}

// watched waits until the Watch has brought the newest event of every key, and computes how late
// each was.
func (r *readback) watched(t *testing.T, ctx context.Context) { //nolint:revive // t first, as everywhere
	t.Helper()
	newest := make(map[string]uint64)
	for _, a := range r.answered {
		newest[a.key] = max(newest[a.key], a.seq)
	}
	deadline := time.Now().Add(slow)
	for {
		missing := ""
		r.mu.Lock()
		for key, seq := range newest {
			if came := r.arrivals[key]; len(came) == 0 || came[len(came)-1].seq < seq {
				missing = fmt.Sprintf("%s at %d", key, seq)
			}
		}
		r.mu.Unlock()
		if missing == "" {
			break
		}
		if time.Now().After(deadline) || r.hubs[0].conn.Pause(ctx, 10*time.Millisecond) != nil {
			t.Errorf("the watch did not bring %s", missing)
			return
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, came := range r.arrivals {
		if !slices.IsSortedFunc(came, func(a, b arrival) int { return int(a.seq) - int(b.seq) }) {
			t.Errorf("the watch went back in time with %s", key)
			return
		}
	}
	for _, a := range r.answered {
		came := r.arrivals[a.key]
		i, _ := slices.BinarySearchFunc(came, a.seq, func(c arrival, seq uint64) int { return int(c.seq) - int(seq) })
		took := came[i].when.Sub(a.when)
		r.watch.add(max(took, 0), took > 0)
	}
}
