package projections

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
)

// topicCounts is the topic of the tests of keyed projections.
const topicCounts = "counts"

// appendEvent is an Apply that shows what was lost, doubled or out of order: a state is the
// payloads of its key's events. Tombstones remove it.
func appendEvent(_ context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
	if e.Tombstone {
		return nil, nil
	}
	return fmt.Appendf(nil, "%s%s ", state, e.Payload), nil
}

// fold applies all events of topicCounts in order, from a sequence on.
func fold(tb testing.TB, bus *jetstream.Bus, from uint64, apply func(context.Context, []byte, *jetstream.Event) ([]byte, error)) map[string]string {
	tb.Helper()
	states := make(map[string]string)
	err := bus.History(topicCounts).Scan(tb.Context(), jetstream.ScanOptions{Limit: 10_000_000}, func(e *jetstream.Event) error {
		if e.Key == "" || e.Sequence < from {
			return nil
		}
		var old []byte
		if s, ok := states[e.Key]; ok {
			old = []byte(s)
		}
		switch next, err := apply(tb.Context(), old, e); {
		case err != nil:
			return nil //nolint:nilerr // a dead letter
		case next == nil:
			delete(states, e.Key)
		default:
			states[e.Key] = string(next)
		}
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return states
}

// viewed are the states of a projection.
func viewed(tb testing.TB, bus Bus, name string) map[string]string {
	tb.Helper()
	v, err := OpenView(tb.Context(), bus, name)
	if err != nil {
		tb.Fatal(err)
	}
	states := make(map[string]string)
	err = v.Each(tb.Context(), func(key string, s State) error {
		states[key] = string(s.Value)
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return states
}

// wantStates compares all states of a projection.
func wantStates(tb testing.TB, got, want map[string]string) {
	tb.Helper()
	wrong := 0
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if got[key] != want[key] {
			if wrong++; wrong <= 5 {
				tb.Errorf("key %q has the state\n%q, want\n%q", key, got[key], want[key])
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[key]; !ok {
			if wrong++; wrong <= 5 {
				tb.Errorf("key %q has the state %q, want none", key, got[key])
			}
		}
	}
	if wrong > 0 {
		tb.Errorf("%d of %d states are wrong", wrong, len(want))
	}
}

// poll asks again and again until f says that it is so.
func poll(tb testing.TB, what string, f func() bool) {
	tb.Helper()
	pollFor(tb, patience, what, f)
}

func pollFor(tb testing.TB, limit time.Duration, what string, f func() bool) {
	tb.Helper()
	timeout := time.After(limit)
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for !f() {
		select {
		case <-ticker.C:
		case <-timeout:
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// workedOff waits until a group has settled everything.
func workedOff(tb testing.TB, bus Bus, group string) {
	tb.Helper()
	workedOffIn(tb, patience, bus, group)
}

func workedOffIn(tb testing.TB, limit time.Duration, bus Bus, group string) {
	tb.Helper()
	var last jetstream.Backlog
	var err error
	timeout := time.After(limit)
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		last, err = bus.Group(topicCounts, group).Backlog(tb.Context())
		// The server's count of what waits comes a moment after a publish is confirmed; the floor
		// is exact.
		if err == nil && last.Waiting == 0 && last.Leased == 0 && last.Floor >= last.Tail {
			return
		}
		select {
		case <-ticker.C:
		case <-timeout:
			tb.Fatalf("group %s is not done: %+v (%v)", group, last, err)
		}
	}
}

// running is a projection that runs.
type running struct {
	cancel context.CancelFunc
	ended  chan struct{}
	err    error
}

// run runs a projection until stop is called, or the test ends. Ending must be no error.
func run(tb testing.TB, bus Bus, p Projection) *running {
	tb.Helper()
	r := runAway(tb, bus, p)
	tb.Cleanup(func() { r.stop(tb) })
	return r
}

// runAway is run for those who look at the end themselves.
func runAway(tb testing.TB, bus Bus, p Projection) *running {
	tb.Helper()
	if p.Topic == "" {
		p.Topic = topicCounts
	}
	if p.Group == "" {
		p.Group = "counter"
	}
	if p.Apply == nil {
		p.Apply = appendEvent
	}
	if p.Logger == nil {
		p.Logger = logs(tb)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	r := &running{cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.err = Run(ctx, bus, p)
	}()
	return r
}

func (r *running) stop(tb testing.TB) {
	tb.Helper()
	r.cancel()
	if err := r.wait(tb); err != nil {
		tb.Errorf("the projection ended with: %v", err)
	}
}

func (r *running) wait(tb testing.TB) error {
	tb.Helper()
	select {
	case <-r.ended:
		return r.err
	case <-time.After(patience):
		tb.Fatal("the projection does not end")
		return nil
	}
}

func logs(tb testing.TB) *slog.Logger {
	tb.Helper()
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// put publishes an event of a key.
func put(tb testing.TB, bus *jetstream.Bus, topic, key, payload string) jetstream.Receipt {
	tb.Helper()
	r, err := bus.Publish(tb.Context(), topic, []byte(payload), jetstream.PublishOptions{Key: key})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// remove publishes a tombstone.
func remove(tb testing.TB, bus *jetstream.Bus, topic, key string) jetstream.Receipt {
	tb.Helper()
	r, err := bus.Publish(tb.Context(), topic, nil, jetstream.PublishOptions{Key: key, Tombstone: true})
	if err != nil {
		tb.Fatal(err)
	}
	return r
}

// stream publishes many events without waiting for each. It reports the first failure when it is
// flushed.
type stream struct {
	pub    *jetstream.Publisher
	topic  string
	next   int
	lossy  bool // failures are none of the test's business
	failed atomic.Pointer[error]
}

func newStream(bus *jetstream.Bus, topic string) *stream {
	return &stream{pub: bus.NewPublisher(), topic: topic}
}

// put publishes the next number as an event of a key.
func (s *stream) put(tb testing.TB, key string) {
	tb.Helper()
	s.next++
	err := s.pub.PublishAsync(tb.Context(), s.topic, strconv.AppendInt(nil, int64(s.next), 10), jetstream.PublishOptions{Key: key}, func(_ jetstream.Receipt, err error) {
		if err != nil {
			s.failed.CompareAndSwap(nil, &err)
		}
	})
	if err != nil && !s.lossy {
		tb.Fatal(err)
	}
}

func (s *stream) flush(tb testing.TB) {
	tb.Helper()
	if err := s.pub.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	if err := s.failed.Load(); err != nil && !s.lossy {
		tb.Fatal(*err)
	}
}

// spy is a bus that counts, and fails, what a test is about; the rest is the real one's.
type spy struct {
	Bus
	lookups atomic.Int64 // NextOfKey
}

func (s *spy) History(topic string) History { return spiedHistory{s.Bus.History(topic), s} }

type spiedHistory struct {
	History
	spy *spy
}

func (h spiedHistory) NextOfKey(ctx context.Context, key string, after uint64) (*jetstream.Event, error) {
	h.spy.lookups.Add(1)
	return h.History.NextOfKey(ctx, key, after)
}

// tally is an Observer that counts.
type tally struct {
	mu       sync.Mutex
	outcomes map[Outcome]int
	limits   map[string]int
}

func newTally() *tally { return &tally{outcomes: make(map[Outcome]int), limits: make(map[string]int)} }

func (c *tally) Projected(_ string, o Outcome) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outcomes[o]++
}

func (c *tally) LimitReached(limit string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.limits[limit]++
}

func (c *tally) outcome(o Outcome) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.outcomes[o]
}

func (c *tally) limit(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.limits[name]
}

// letters are the dead letters of topicCounts.
func letters(tb testing.TB, bus *jetstream.Bus) [][]byte {
	tb.Helper()
	var all [][]byte
	err := bus.History("dlq."+topicCounts).Scan(tb.Context(), jetstream.ScanOptions{Limit: 100_000}, func(e *jetstream.Event) error {
		all = append(all, bytes.Clone(e.Payload))
		return nil
	})
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		tb.Fatal(err)
	}
	return all
}

// awaitLetters waits until a topic of dead letters has some, and returns them.
func awaitLetters(tb testing.TB, bus *jetstream.Bus, topic string) (all []*jetstream.Event) {
	tb.Helper()
	poll(tb, "letters on "+topic, func() bool {
		all = nil
		err := bus.History(topic).Scan(tb.Context(), jetstream.ScanOptions{}, func(e *jetstream.Event) error {
			all = append(all, e)
			return nil
		})
		if err != nil {
			tb.Fatal(err)
		}
		return len(all) > 0
	})
	return all
}
