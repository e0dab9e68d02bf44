package eventhub_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	eventhub "eventhub/sdk/go"
)

// state is what a watch tells.
type state struct {
	mu      sync.Mutex
	values  map[string]string
	resets  []string
	current int
	unknown []string // keys that were deleted and not there
}

func (s *state) options(opts eventhub.WatchOptions) eventhub.WatchOptions {
	opts.OnReset = func(r eventhub.Reset) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.resets = append(s.resets, r.Reason)
	}
	opts.OnCurrent = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.current++
	}
	return opts
}

func (s *state) change(_ context.Context, c *eventhub.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.values == nil {
		s.values = make(map[string]string)
	}
	if !c.Deleted {
		s.values[c.Key] = string(c.Payload)
		return
	}
	if _, there := s.values[c.Key]; !there {
		s.unknown = append(s.unknown, c.Key)
	}
	delete(s.values, c.Key)
}

// wants waits for these values, and for so many times that they were current. The resets must be
// these.
func (s *state) wants(t *testing.T, values map[string]string, current int, resets ...string) {
	t.Helper()
	var got string
	deadline := time.After(patience)
	for {
		s.mu.Lock()
		got = fmt.Sprintf("%v, %d times, resets %q, unknown %q", s.values, s.current, s.resets, s.unknown)
		done := maps.Equal(s.values, values) && (current < 0 || s.current == current && slices.Equal(s.resets, resets)) && s.unknown == nil
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-deadline:
			t.Fatalf("got %.3000s\nwant %v, %d times, resets %q", got, values, current, resets)
		}
	}
}

// watch watches the topic c.s.
func watch(t *testing.T, c *eventhub.Client, opts eventhub.WatchOptions, s *state) *eventhub.Broadcast {
	t.Helper()
	b, err := c.Watch(t.Context(), "c.s", s.options(opts), s.change)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWatchGivesTheStateAndThenEachChange(t *testing.T) {
	t.Parallel()
	hub := compacted(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	put(t, c, "c.s", "a", 1)
	put(t, c, "c.s", "b", 2)
	put(t, c, "c.s", "null", nil)
	remove(t, c, "c.s", "b")
	keysStored(t, hub, "c.s", 4)
	var s state
	watch(t, c, eventhub.WatchOptions{}, &s)
	s.wants(t, map[string]string{"a": "1", "null": "null"}, 1)
	put(t, c, "c.s", "a", 3)
	put(t, c, "c.s", "b", 4)
	remove(t, c, "c.s", "null")
	remove(t, c, "c.s", "never there")
	put(t, c, "c.s", "c", 5)
	s.wants(t, map[string]string{"a": "3", "b": "4", "c": "5"}, 1)
	_, err := c.Watch(t.Context(), "plain", eventhub.WatchOptions{}, s.change)
	failsWith(t, err, "bad_topic", false)
}

func TestWatchTakesASnapshotAfterEachReset(t *testing.T) {
	t.Parallel()
	hub := compacted(t, func(c *facade.Config) { c.Limits.RingFrames, c.Limits.CatchUp = 16, 30 })
	p := startProxy(t, hub.WebSocket)
	c, writer := connect(t, p.url, fast(hub.Token)), connect(t, hub.WebSocket, fast(hub.Token))
	const topic = "c.s"
	for _, key := range []string{"a", "b", "c"} {
		put(t, writer, topic, key, 1)
	}
	keysStored(t, hub, topic, 3)
	var s state
	watch(t, c, eventhub.WatchOptions{}, &s)
	s.wants(t, map[string]string{"a": "1", "b": "1", "c": "1"}, 1)
	var seen news
	other := follow(t, writer, topic, seen.options(eventhub.BroadcastOptions{Slow: eventhub.SlowCatchUp}), seen.event)
	// A short break, which the hub has kept.
	lose(t, p, c, func() { remove(t, writer, topic, "c") })
	put(t, writer, topic, "d", 2)
	s.wants(t, map[string]string{"a": "1", "b": "1", "d": "2"}, 1)
	// Too many changes while it was away: b is gone.
	lose(t, p, c, func() {
		remove(t, writer, topic, "b")
		for i := range 100 {
			put(t, writer, topic, "a", i)
		}
		keysStored(t, hub, topic, 106)
		seen.endsWith(t, "a=99")
	})
	s.wants(t, map[string]string{"a": "99", "d": "2"}, 2, "too_far")
	put(t, writer, topic, "e", 3)
	s.wants(t, map[string]string{"a": "99", "d": "2", "e": "3"}, 2, "too_far")
	// The topic is made anew: all but e are gone.
	lose(t, p, c, func() {
		if err := hub.Bus.Admin().Topic(topic).Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		receive(t, "the hub knows", other.Done())
		put(t, writer, topic, "e", 4)
		keysStored(t, hub, topic, 1)
	})
	s.wants(t, map[string]string{"e": "4"}, 3, "too_far", "stream_changed")
}

// The hub leaves changes out because the network is slow.
func TestWatchTakesASnapshotAfterAGap(t *testing.T) {
	t.Parallel()
	hub := compacted(t, func(c *facade.Config) { c.Limits.RingFrames, c.Limits.WriteStall = 16, time.Hour })
	p := startProxy(t, hub.WebSocket)
	opts := fast(hub.Token)
	opts.PingEvery = time.Hour
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	put(t, writer, "c.s", "gone", 1)
	keysStored(t, hub, "c.s", 1)
	var s state
	watch(t, c, eventhub.WatchOptions{}, &s)
	s.wants(t, map[string]string{"gone": "1"}, 1)
	release := p.hold()
	defer release()
	const n = 60
	for i := range n {
		put(t, writer, "c.s", "large"+strconv.Itoa(i), strings.Repeat("x", 200_000))
	}
	remove(t, writer, "c.s", "gone")
	want := map[string]string{}
	for i := range n {
		remove(t, writer, "c.s", "large"+strconv.Itoa(i))
		put(t, writer, "c.s", "k"+strconv.Itoa(i), i)
		want["k"+strconv.Itoa(i)] = strconv.Itoa(i)
	}
	release()
	s.wants(t, want, -1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.resets, eventhub.ReasonGap) {
		t.Errorf("there was no gap: %q", s.resets)
	}
}

func TestWatchIsRightOverCutsAnywhere(t *testing.T) {
	t.Parallel()
	hub := compacted(t, func(c *facade.Config) { c.Limits.RingFrames, c.Limits.CatchUp = 16, 30 })
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	want := map[string]string{}
	change := func() {
		key := "k" + strconv.Itoa(rand.IntN(50))
		if _, there := want[key]; there && rand.IntN(3) == 0 {
			remove(t, writer, "c.s", key)
			delete(want, key)
			return
		}
		value := rand.IntN(1_000_000)
		put(t, writer, "c.s", key, value)
		want[key] = strconv.Itoa(value)
	}
	for range 100 {
		change()
	}
	keysStored(t, hub, "c.s", 100)
	var s state
	watch(t, c, eventhub.WatchOptions{}, &s)
	stop := cutAnywhere(t, p, 10_000)
	for deadline := time.Now().Add(patience); len(states.get()) < 40; {
		if time.Now().After(deadline) {
			t.Fatalf("there were few cuts: %v", states.get())
		}
		change()
	}
	stop()
	change()
	s.wants(t, want, -1)
}

func TestAWatchThatIsSlowGetsTheNewestValues(t *testing.T) {
	t.Parallel()
	hub := compacted(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	put(t, c, "c.s", "a", 0)
	keysStored(t, hub, "c.s", 1)
	begun, released := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	defer release()
	var once sync.Once
	var got list[string]
	_, err := c.Watch(t.Context(), "c.s", eventhub.WatchOptions{}, func(_ context.Context, ch *eventhub.Change) {
		once.Do(func() {
			close(begun)
			<-released
		})
		got.add(ch.Key + "=" + string(ch.Payload))
	})
	if err != nil {
		t.Fatal(err)
	}
	receive(t, "the first", begun)
	for i := 1; i <= 100; i++ {
		put(t, c, "c.s", "a", i)
		put(t, c, "c.s", "b", i)
	}
	var other news
	follow(t, connect(t, hub.WebSocket, fast(hub.Token)), "c.s", eventhub.BroadcastOptions{History: 1}, other.event)
	eventually(t, "the last event at another client", func() bool { return slices.Contains(other.get(), "b=100") })
	release()
	eventually(t, "the newest", func() bool {
		all := got.get()
		return slices.Contains(all, "a=100") && slices.Contains(all, "b=100")
	})
	if n := len(got.get()); n > 50 {
		t.Errorf("%d changes, although newer ones replace those that wait", n)
	}
}

func TestAWatchOfTooManyKeysEndsWithAClearError(t *testing.T) {
	t.Parallel()
	hub := compacted(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	for i := range 3 {
		put(t, c, "c.s", "k"+strconv.Itoa(i), i)
	}
	keysStored(t, hub, "c.s", 3)
	var s state
	b := watch(t, c, eventhub.WatchOptions{MaxKeys: 3}, &s)
	s.wants(t, map[string]string{"k0": "0", "k1": "1", "k2": "2"}, 1)
	remove(t, c, "c.s", "k0")
	put(t, c, "c.s", "k3", 3)
	s.wants(t, map[string]string{"k3": "3", "k1": "1", "k2": "2"}, 1)
	put(t, c, "c.s", "k4", 4)
	receive(t, "the end", b.Done())
	failsWith(t, b.Err(), eventhub.CodeBufferFull, true)
	if !strings.Contains(b.Err().Error(), "c.s has more than 3 keys") {
		t.Error(b.Err())
	}
	keysStored(t, hub, "c.s", 6)
	begun := make(chan struct{})
	defer close(begun)
	b, err := c.Watch(t.Context(), "c.s", eventhub.WatchOptions{MaxKeys: 2}, func(context.Context, *eventhub.Change) { <-begun })
	if err != nil {
		t.Fatal(err)
	}
	receive(t, "the end", b.Done())
	failsWith(t, b.Err(), eventhub.CodeBufferFull, true)
}

// A handler that panics at a key that has gone is told of the others.
func TestAPanicAtAGoneKeyKeepsNoOtherBack(t *testing.T) {
	t.Parallel()
	hub := compacted(t, func(c *facade.Config) { c.Limits.RingFrames, c.Limits.CatchUp = 16, 30 })
	p := startProxy(t, hub.WebSocket)
	var errs list[string]
	opts := fast(hub.Token)
	opts.OnError = func(err error) { errs.add(err.Error()) }
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	for _, key := range []string{"a", "b", "c"} {
		put(t, writer, "c.s", key, 1)
	}
	keysStored(t, hub, "c.s", 3)
	var s state
	if _, err := c.Watch(t.Context(), "c.s", s.options(eventhub.WatchOptions{}), func(ctx context.Context, ch *eventhub.Change) {
		s.change(ctx, ch)
		if ch.Deleted {
			panic("oh")
		}
	}); err != nil {
		t.Fatal(err)
	}
	s.wants(t, map[string]string{"a": "1", "b": "1", "c": "1"}, 1)
	var seen news
	follow(t, writer, "c.s", seen.options(eventhub.BroadcastOptions{Slow: eventhub.SlowCatchUp}), seen.event)
	lose(t, p, c, func() {
		remove(t, writer, "c.s", "a")
		remove(t, writer, "c.s", "b")
		for i := range 50 {
			put(t, writer, "c.s", "c", i)
		}
		keysStored(t, hub, "c.s", 55)
		seen.endsWith(t, "c=49")
	})
	s.wants(t, map[string]string{"c": "49"}, 2, "too_far")
	if all := errs.get(); !slices.Equal(all, []string{"panic: oh", "panic: oh"}) {
		t.Errorf("told %q", all)
	}
}
