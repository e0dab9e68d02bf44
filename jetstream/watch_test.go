package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// watcher collects what a Watch says.
type watcher struct {
	t      testing.TB
	cancel context.CancelFunc
	done   chan error

	mu     sync.Mutex
	values map[string]string // of keys that were not removed
	seqs   map[string]uint64
	calls  int
	nils   int
	early  int // tombstones before the nil
	atNil  map[string]string
}

func watchState(tb testing.TB, b *Bus, keys ...string) *watcher {
	tb.Helper()
	w := &watcher{t: tb, done: make(chan error, 1), values: make(map[string]string), seqs: make(map[string]uint64)}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	go func() { w.done <- b.Keys("state.a").Watch(ctx, keys, w.see) }()
	tb.Cleanup(w.stop)
	return w
}

func (w *watcher) stop() {
	w.cancel()
	if err := <-w.done; !errors.Is(err, context.Canceled) && !errors.Is(err, event.ErrClosed) {
		w.t.Errorf("the watch ended with %v", err)
	}
	w.done <- context.Canceled
}

func (w *watcher) see(e *event.Event) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	if e == nil {
		w.nils++
		w.atNil = make(map[string]string)
		for k, v := range w.values {
			w.atNil[k] = v
		}
		return nil
	}
	// the same one may come again where a repair has replaced a foreign entry
	if e.Sequence < w.seqs[e.Key] {
		w.t.Errorf("key %s went from %d to %d", e.Key, w.seqs[e.Key], e.Sequence)
	}
	w.seqs[e.Key] = e.Sequence
	if w.values[e.Key] = string(e.Payload); e.Tombstone {
		delete(w.values, e.Key)
		if w.nils == 0 {
			w.early++
		}
	}
	return nil
}

func (w *watcher) shows(key, value string) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("the watch shows %s=%s", key, value), func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.nils == 1 && w.values[key] == value
	})
}

func TestWatchGivesWhatIsPresentAndThenChanges(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	empty := watchState(t, b) // which makes the topic
	eventually(t, "the watch of nothing says so", func() bool {
		empty.mu.Lock()
		defer empty.mu.Unlock()
		return empty.nils == 1
	})
	for i := range 10 {
		set(t, b, "state.a", strconv.Itoa(i), strconv.Itoa(i))
	}
	filled(t, b, "state.a", "3", remove(t, b, "state.a", "3"))
	all, some := watchState(t, b), watchState(t, b, "3", "4", "new")
	all.shows("4", "4")
	some.shows("4", "4")
	if len(all.atNil) != 9 || len(some.atNil) != 1 || all.early+some.early > 0 {
		t.Errorf("%v, %v; %d and %d tombstones before", all.atNil, some.atNil, all.early, some.early)
	}
	set(t, b, "state.a", "3", "33")
	set(t, b, "state.a", "5", "55")
	set(t, b, "state.a", "new", "1")
	remove(t, b, "state.a", "4")
	for _, w := range []*watcher{empty, all, some} {
		w.shows("3", "33")
		w.shows("new", "1")
		w.shows("4", "")
	}
	all.shows("5", "55")
	if len(some.values) != 2 {
		t.Errorf("%v", some.values)
	}
}

// TestWatchShowsEveryKeyBesideWriters wants every key that is there before it is told that these
// are all.
func TestWatchShowsEveryKeyBesideWriters(t *testing.T) {
	t.Parallel()
	const keys, watches = 40, 20
	for _, watched := range [][]string{nil, {"3", "17", "39"}} {
		t.Run(fmt.Sprint(watched), func(t *testing.T) {
			b := open(t, Config{Topics: compactedRules})
			defer busy(t, b, keys, "1")()
			want := keys
			if watched != nil {
				want = len(watched)
			}
			for range watches {
				seen := make(map[string]bool)
				err := b.Keys("state.a").Watch(t.Context(), watched, func(e *event.Event) error {
					if e == nil {
						return errAll
					}
					seen[e.Key] = true
					return nil
				})
				if err != errAll || len(seen) != want { //nolint:errorlint // it is returned as it is
					t.Fatalf("the watch shows %d keys, %d are there (%v)", len(seen), want, err)
				}
			}
		})
	}
}

// errAll ends a watch that has shown all.
var errAll = errors.New("these are all")

func TestWatchReturnsTheErrorOfItsFunction(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	stop := errors.New("stop")
	if err := b.Keys("state.a").Watch(t.Context(), nil, func(*event.Event) error { return stop }); err != stop { //nolint:errorlint // it is returned as it is
		t.Errorf("got %v", err)
	}
	err := b.Keys("state.a").Watch(t.Context(), make([]string, 1_001), func(*event.Event) error { return nil })
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadOptions {
		t.Errorf("got %v", err)
	}
	err = b.Keys("plain").Watch(t.Context(), nil, func(*event.Event) error { return nil })
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeBadTopic {
		t.Errorf("got %v", err)
	}
}

func TestWatchEndsWithTheBus(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	w := watchState(t, b)
	r := set(t, b, "state.a", "k", "1")
	filled(t, b, "state.a", "k", r)
	w.shows("k", "1")
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	err := <-w.done
	if w.done <- err; !errors.Is(err, event.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if err := b.Keys("state.a").Watch(t.Context(), nil, w.see); !errors.Is(err, event.ErrClosed) {
		t.Errorf("got %v", err)
	}
}

// Readers that boot at any moment while several write end with what the stream ends with, and never
// go back.
func TestWatchHasNoGap(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	const writers, keys, each, unconfirmed = 4, 50, 500, 100
	set(t, b, "state.a", "0", "0")
	var booted atomic.Bool // all readers are there
	var all sync.WaitGroup
	for n := range writers {
		all.Go(func() {
			p := b.NewPublisher()
			slots := make(chan struct{}, unconfirmed)
			for i := 0; i < each || !booted.Load(); i++ {
				key := strconv.Itoa((i*7 + n) % keys)
				opts := PublishOptions{Key: key, Tombstone: i%11 == 0}
				payload := []byte(strconv.Itoa(i*writers + n))
				if opts.Tombstone {
					payload = nil
				}
				slots <- struct{}{}
				if err := p.PublishAsync(t.Context(), "state.a", payload, opts, func(_ event.Receipt, err error) {
					<-slots
					if err != nil {
						t.Error(err)
					}
				}); err != nil {
					t.Error(err)
					return
				}
			}
			if err := p.Flush(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	watchers := []*watcher{watchState(t, b)}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for i := range 20 {
		<-tick.C
		if i%2 == 0 {
			watchers = append(watchers, watchState(t, b))
		} else {
			watchers = append(watchers, watchState(t, b, numbers(keys/2)...))
		}
	}
	booted.Store(true)
	all.Wait()
	for _, key := range []string{"end", "1"} { // the last key of either kind
		set(t, b, "state.a", key, "end")
	}
	want, err := b.Keys("state.a").GetConsistent(t.Context(), append(numbers(keys), "end"))
	if err != nil {
		t.Fatal(err)
	}
	for i, w := range watchers {
		w.shows("1", "end")
		w.mu.Lock()
		for key, e := range want {
			number, err := strconv.Atoi(key)
			if i%2 == 0 && i > 0 && (err != nil || number >= keys/2) {
				continue // not watched
			}
			if w.values[key] != string(e.Payload) {
				t.Errorf("watcher %d: key %s is %q, want %q", i, key, w.values[key], e.Payload)
			}
		}
		for key := range w.values {
			if want[key] == nil {
				t.Errorf("watcher %d: key %s was removed", i, key)
			}
		}
		if w.nils != 1 {
			t.Errorf("watcher %d: f(nil) came %d times", i, w.nils)
		}
		w.mu.Unlock()
	}
}

func TestWatchGoesOnWhenTheBucketIsMadeAnew(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	for i := range 10 {
		set(t, b, "state.a", strconv.Itoa(i), "old")
		set(t, b, "state.a", strconv.Itoa(i), "new")
	}
	w, some := watchState(t, b), watchState(t, b, "3")
	w.shows("9", "new")
	some.shows("3", "new")
	if err := b.conn.JS.DeleteStream(t.Context(), "KV_latest_state_a"); err != nil {
		t.Fatal(err)
	}
	set(t, b, "state.a", "3", "newer")
	set(t, b, "state.a", "x", "1")
	w.shows("3", "newer")
	some.shows("3", "newer")
	w.shows("x", "1")
}

func TestWatchGoesOnWhenTheTopicIsMadeAnew(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: compactedRules})
	set(t, b, "state.a", "a", "1")
	r := set(t, b, "state.a", "b", "1")
	filled(t, b, "state.a", "b", r)
	var mu sync.Mutex
	// sequences begin again, which the other watcher does not allow
	values := make(map[string]string)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- b.Keys("state.a").Watch(ctx, nil, func(e *event.Event) error {
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				values[e.Key] = string(e.Payload)
			}
			return nil
		})
	}()
	shows := func(key, value string) {
		t.Helper()
		eventually(t, key+" is shown", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return values[key] == value
		})
	}
	shows("b", "1")
	if err := b.conn.JS.DeleteStream(t.Context(), objectName("state.a")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the topic is created again", func() bool {
		_, err := b.Publish(t.Context(), "state.a", []byte("2"), PublishOptions{Key: "a"})
		return err == nil
	})
	shows("a", "2")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}
