package projections

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// runMirror runs a mirror of topicState until the test ends.
func runMirror(tb testing.TB, cfg MirrorConfig) *Mirror {
	tb.Helper()
	m, stop := startMirror(tb, cfg)
	tb.Cleanup(stop)
	return m
}

func startMirror(tb testing.TB, cfg MirrorConfig) (m *Mirror, stop func()) {
	tb.Helper()
	cfg.Topic, cfg.Logger = topicState, logs(tb)
	m = NewMirror(cfg)
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	return m, sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				tb.Errorf("the mirror ended with: %v", err)
			}
		case <-time.After(patience):
			tb.Error("the mirror does not end")
		}
	})
}

func awaitMirror(tb testing.TB, m *Mirror) {
	tb.Helper()
	select {
	case <-m.Ready():
	case <-time.After(patience):
		tb.Fatal("the mirror is not ready")
	}
}

// forward is a Changed that sees to it that no key goes back.
type forward struct {
	tb   testing.TB
	mu   sync.Mutex
	told map[string]uint64
}

func (f *forward) changed(e *jetstream.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if before := f.told[e.Key]; e.Sequence <= before {
		f.tb.Errorf("key %s went from %d to %d", e.Key, before, e.Sequence)
	}
	f.told[e.Key] = e.Sequence
}

// stateWriter writes to topicState, and knows what was confirmed.
type stateWriter struct {
	mu        sync.Mutex
	confirmed map[string]jetstream.Receipt
	gone      map[string]bool
}

func newStateWriter() *stateWriter {
	return &stateWriter{confirmed: make(map[string]jetstream.Receipt), gone: make(map[string]bool)}
}

// write writes until ctx ends, to keys of its own.
func (w *stateWriter) write(ctx context.Context, tb testing.TB, bus *jetstream.Bus, name string, keys int, seed uint64) {
	tb.Helper()
	rnd := rand.New(rand.NewPCG(5, seed))
	for i := 0; ctx.Err() == nil; i++ {
		key := name + strconv.Itoa(rnd.IntN(keys))
		opts := jetstream.PublishOptions{Key: key, Tombstone: rnd.IntN(8) == 0}
		payload := strconv.Itoa(i)
		if opts.Tombstone {
			payload = ""
		}
		r, err := bus.Publish(context.WithoutCancel(ctx), topicState, []byte(payload), opts)
		if err != nil {
			tb.Error(err)
			return
		}
		w.mu.Lock()
		w.confirmed[key], w.gone[key] = r, opts.Tombstone
		w.mu.Unlock()
	}
}

// known is a copy of what is confirmed.
func (w *stateWriter) known() map[string]uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	known := make(map[string]uint64, len(w.confirmed))
	for key, r := range w.confirmed {
		known[key] = r.Sequence
	}
	return known
}

// wantMirrored compares the mirror with what was confirmed last, once nobody writes any more.
func wantMirrored(tb testing.TB, m *Mirror, w *stateWriter) {
	tb.Helper()
	for key, r := range w.confirmed {
		poll(tb, "the mirror has the newest of "+key, func() bool {
			e, err := m.Get(tb.Context(), key)
			if w.gone[key] {
				return errors.Is(err, jetstream.ErrNotFound)
			}
			return err == nil && e.Sequence == r.Sequence
		})
	}
}

// purge drops the events of the topic but for the newest, as its retention would: none that its
// bucket does not have yet.
func purge(ctx context.Context, tb testing.TB, js natsjs.JetStream, bus *jetstream.Bus, keep uint64) {
	tb.Helper()
	var last jetstream.Event
	_, err := bus.Keys(topicState).EachSince(ctx, jetstream.BucketPosition{}, func(e *jetstream.Event) error {
		last = *e
		return nil
	})
	if err == nil && last.Sequence > keep {
		var s natsjs.Stream
		if s, err = js.Stream(ctx, last.Stream); err == nil {
			err = s.Purge(ctx, natsjs.WithPurgeSequence(last.Sequence-keep+1))
		}
	}
	if err != nil && ctx.Err() == nil {
		tb.Error(err)
	}
}

func native(tb testing.TB, url string) natsjs.JetStream {
	tb.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		tb.Fatal(err)
	}
	return js
}

// TestMirrorsBootDuringWrites boots mirrors of all kinds while writers, compactors and the topic's
// retention are at work: what was confirmed before a boot is there when it is ready, no key goes
// back, and in the end all have all.
func TestMirrorsBootDuringWrites(t *testing.T) {
	const boots, keys = 12, 30
	url := startNATS(t)
	bus, other := openBus(t, jetstream.Config{URL: url, Topics: compacted}), openBus(t, jetstream.Config{URL: url, Topics: compacted})
	js := native(t, url)
	put(t, bus, topicState, "first", "0")
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	w := newStateWriter()
	for i, b := range []*jetstream.Bus{bus, other} {
		wg.Go(func() { w.write(ctx, t, b, string(rune('a'+i)), keys, uint64(i)) })
	}
	background, endBackground := context.WithCancel(t.Context())
	defer endBackground()
	wg.Go(func() {
		if err := newCompactor(t, JetStream(other)).Run(background); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() {
		tick := time.NewTicker(70 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-background.Done():
				return
			case <-tick.C:
				purge(background, t, js, bus, 100)
			}
		}
	})
	var mirrors []*Mirror
	for i := range boots {
		cfg := MirrorConfig{Bus: JetStream([]*jetstream.Bus{bus, other}[i%2])}
		if i%4 < 2 {
			cfg.Snapshot = topicSnapshots
		}
		if i%3 == 0 {
			cfg.MaxKeys = keys / 2
		} else {
			cfg.Changed = (&forward{tb: t, told: make(map[string]uint64)}).changed
		}
		known := w.known()
		m, end := startMirror(t, cfg)
		awaitMirror(t, m)
		for key, seq := range known {
			e, err := m.Get(t.Context(), key)
			if err == nil && e.Sequence < seq {
				t.Errorf("boot %d: %s is at %d, %d was confirmed before", i, key, e.Sequence, seq)
			}
			if errors.Is(err, jetstream.ErrNotFound) {
				// It must have been removed by then.
				if e, err := bus.Keys(topicState).Get(t.Context(), key); err == nil && e.Sequence == seq && !e.Tombstone {
					t.Errorf("boot %d: %s is missing, %d was confirmed before", i, key, seq)
				}
			}
		}
		if n := m.Len(); cfg.MaxKeys > 0 && n > cfg.MaxKeys {
			t.Errorf("%d keys are held, want %d at most", n, cfg.MaxKeys)
		}
		if i < boots-6 && i%2 == 0 {
			end()
			continue
		}
		t.Cleanup(end)
		mirrors = append(mirrors, m)
	}
	stop()
	endBackground()
	wg.Wait()
	for _, m := range mirrors {
		wantMirrored(t, m, w)
	}
}

// TestMirrorWhoseSnapshotsAreTooOld boots from snapshots behind which the topic has dropped
// everything.
func TestMirrorWhoseSnapshotsAreTooOld(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	bus := openBus(t, jetstream.Config{URL: url, Topics: compacted})
	put(t, bus, topicState, "removed", "1")
	put(t, bus, topicState, "same", "1")
	compact(t, bus, newCompactor(t, JetStream(bus)), put(t, bus, topicState, "changed", "1"))
	put(t, bus, topicState, "changed", "2")
	put(t, bus, topicState, "new", "1")
	last := remove(t, bus, topicState, "removed")
	bucketHas(t, bus, last.Sequence)
	purge(t.Context(), t, native(t, url), bus, 0)

	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), Snapshot: topicSnapshots, Changed: (&forward{tb: t, told: make(map[string]uint64)}).changed})
	awaitMirror(t, m)
	check := func(want map[string]string) {
		t.Helper()
		for key, payload := range want {
			e, err := m.Get(t.Context(), key)
			if payload == "" && !errors.Is(err, jetstream.ErrNotFound) || payload != "" && (err != nil || string(e.Payload) != payload) {
				t.Errorf("%s is %+v (%v), want %q", key, e, err, payload)
			}
		}
	}
	check(map[string]string{"removed": "", "same": "1", "changed": "2", "new": "1"})
	r := put(t, bus, topicState, "removed", "3")
	poll(t, "the mirror follows", func() bool {
		e, err := m.Get(t.Context(), "removed")
		return err == nil && e.Sequence == r.Sequence
	})
}

// TestMirrorIsOvertaken has a mirror that is so slow that the topic drops what it has not read.
func TestMirrorIsOvertaken(t *testing.T) {
	const keys, events = 6_000, 12_000 // the first is what a reader may have fetched
	url := startNATS(t)
	bus := openBus(t, jetstream.Config{URL: url, Topics: compacted})
	put(t, bus, topicState, "first", "0")
	goOn := make(chan struct{})
	arrived := make(chan struct{})
	once := sync.OnceFunc(func() { close(arrived) })
	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), Changed: func(e *jetstream.Event) {
		if e.Key == "stop" {
			once()
			<-goOn
		}
	}})
	awaitMirror(t, m)
	put(t, bus, topicState, "stop", "0")
	select {
	case <-arrived:
	case <-time.After(patience):
		t.Fatal("the mirror does not follow")
	}
	s := newStream(bus, topicState)
	for i := range events {
		s.put(t, "k"+strconv.Itoa(i%keys))
	}
	s.flush(t)
	remove(t, bus, topicState, "first")
	last := put(t, bus, topicState, "last", "1")
	bucketHas(t, bus, last.Sequence)
	purge(t.Context(), t, native(t, url), bus, 1)
	close(goOn)
	poll(t, "the mirror has the last event", func() bool {
		e, err := m.Get(t.Context(), "last")
		return err == nil && e.Sequence == last.Sequence
	})
	for i := range keys {
		e, err := m.Get(t.Context(), "k"+strconv.Itoa(i))
		if err != nil || string(e.Payload) != strconv.Itoa(events-keys+i+1) {
			t.Fatalf("key %d is %+v (%v)", i, e, err)
		}
	}
	if e, err := m.Get(t.Context(), "first"); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("a key that was removed is %+v (%v)", e, err)
	}
}

// TestMirrorOfATopicThatIsNotThere begins before the topic does.
func TestMirrorOfATopicThatIsNotThere(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), Snapshot: topicSnapshots})
	awaitMirror(t, m)
	r := put(t, bus, topicState, "k", "1")
	poll(t, "the mirror follows", func() bool {
		e, err := m.Get(t.Context(), "k")
		return err == nil && e.Sequence == r.Sequence
	})
}

// TestMirrorOverTheLimit reads what it does not hold.
func TestMirrorOverTheLimit(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), Topics: compacted})
	for i := range 10 {
		put(t, bus, topicState, "k"+strconv.Itoa(i), strconv.Itoa(i))
	}
	seen := newTally()
	m := runMirror(t, MirrorConfig{Bus: JetStream(bus), MaxKeys: 3, Observer: seen})
	awaitMirror(t, m)
	for i := range 10 {
		if e, err := m.Get(t.Context(), "k"+strconv.Itoa(i)); err != nil || string(e.Payload) != strconv.Itoa(i) {
			t.Errorf("key %d is %+v (%v)", i, e, err)
		}
	}
	if m.Len() != 3 || seen.limit("mirror_keys") != 1 {
		t.Errorf("%d keys are held, the limit was reached %d times", m.Len(), seen.limit("mirror_keys"))
	}
	if _, err := m.Get(t.Context(), "none"); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("a key that does not exist: %v", err)
	}
}
