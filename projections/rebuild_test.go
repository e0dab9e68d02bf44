package projections

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// prefixed is appendEvent for states that begin with a prefix, which is the one of what is there,
// if anything is.
func prefixed(prefix string) func(context.Context, []byte, *jetstream.Event) ([]byte, error) {
	return func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		if state == nil {
			state = []byte(prefix)
		}
		return appendEvent(ctx, state, e)
	}
}

func counterProjection(prefix string) Projection {
	return Projection{Topic: topicCounts, Group: "counter", From: jetstream.FromEarliest, Apply: prefixed(prefix), grace: time.Second}
}

// rebuildRig is two live instances with a stream of events.
type rebuildRig struct {
	one, two *jetstream.Bus
	quiet    func()
}

const rebuildKeys = 30

func newRebuildRig(t *testing.T) *rebuildRig {
	t.Helper()
	url := startNATS(t)
	r := &rebuildRig{one: openBus(t, jetstream.Config{URL: url}), two: openBus(t, jetstream.Config{URL: url})}
	run(t, JetStream(r.one), counterProjection("old "))
	run(t, JetStream(r.two), counterProjection("old "))
	s := newStream(r.one, topicCounts)
	next := func() { s.put(t, "k"+strconv.Itoa(s.next%rebuildKeys)) }
	for range 10 * rebuildKeys {
		next()
	}
	s.flush(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(4 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				next()
			}
		}
	})
	var once sync.Once // OnceFunc would turn the end of a test that fails here into a panic
	r.quiet = func() {
		once.Do(func() {
			close(stop)
			wg.Wait()
			s.flush(t)
		})
	}
	t.Cleanup(r.quiet)
	return r
}

// versionNow is the one.
func versionNow(tb testing.TB, bus Bus) version {
	tb.Helper()
	v := newVersions(bus, &Projection{Name: "counter"})
	if err := v.open(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	n, _, err := v.current(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return n
}

func (r *rebuildRig) check(t *testing.T, prefix string) {
	t.Helper()
	r.quiet()
	p := counterProjection("")
	workedOff(t, JetStream(r.one), p.groupOf(versionNow(t, JetStream(r.one)).Version))
	wantStates(t, viewed(t, JetStream(r.two), "counter"), fold(t, r.one, 0, prefixed(prefix)))
}

// TestRebuildBesideTheLive changes Apply under two busy instances; readers see the old states, and
// then the new ones.
func TestRebuildBesideTheLive(t *testing.T) {
	t.Parallel()
	r := newRebuildRig(t)
	poll(t, "the states are there", func() bool { return len(viewed(t, JetStream(r.one), "counter")) == rebuildKeys })
	readers, stopReading := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var reads atomic.Int64
	defer wg.Wait()
	defer stopReading()
	view, err := OpenView(t.Context(), JetStream(r.two), "counter")
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		changed, last := false, 0
		for readers.Err() == nil {
			s, err := view.Get(t.Context(), "k1")
			if err != nil {
				t.Errorf("get: %v", err)
				return
			}
			prefix, counts, _ := strings.Cut(string(s.Value), " ")
			n := len(strings.Fields(counts))
			switch {
			case prefix == "new":
				changed = true
			case prefix != "old" || changed:
				t.Errorf("the state is %q after the swap (%v)", s.Value, changed)
				return
			}
			// The new version may be behind the old one by what is on its way, not by more.
			if n+20 < last {
				t.Errorf("a state of %d events comes after one of %d", n, last)
			}
			last = n
			reads.Add(1)
			_ = pause(readers, 2*time.Millisecond) // or it would starve all others
		}
	})
	wg.Go(func() {
		for readers.Err() == nil {
			prefixes, keys := make(map[string]int), make(map[string]bool)
			err := view.Each(t.Context(), func(key string, s State) error {
				prefix, _, _ := strings.Cut(string(s.Value), " ")
				prefixes[prefix]++
				keys[key] = true
				return nil
			})
			if err != nil && !errors.Is(err, ErrRebuilt) {
				t.Errorf("each: %v", err)
				return
			}
			if err == nil && (len(prefixes) != 1 || len(keys) < rebuildKeys) {
				t.Errorf("all states at a time are %v", prefixes)
				return
			}
			_ = pause(readers, 2*time.Millisecond)
		}
	})
	if err := Rebuild(t.Context(), JetStream(r.one), counterProjection("new ")); err != nil {
		t.Fatal(err)
	}
	seen := reads.Load()
	poll(t, "the readers read on", func() bool { return reads.Load() > seen+10 })
	stopReading()
	wg.Wait()
	r.check(t, "new ")
	p := counterProjection("")
	if _, err := r.one.Group(topicCounts, p.groupOf(1)).Backlog(t.Context()); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the old group is still there: %v", err)
	}
	if at := versionNow(t, JetStream(r.one)); at.Version != 2 || len(at.Left) != 0 {
		t.Errorf("the version is %+v", at)
	}
}

// TestRebuildThatEndsEarly wants the live version left alone, and the next rebuild complete.
func TestRebuildThatEndsEarly(t *testing.T) {
	t.Parallel()
	r := newRebuildRig(t)
	slow := counterProjection("bad ")
	for i := range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		begun := make(chan struct{})
		once := sync.OnceFunc(func() { close(begun) })
		var n atomic.Int64
		p := slow
		p.Apply = func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
			if n.Add(1) == int64(20*(i+1)) {
				once()
			}
			if n.Load() >= int64(20*(i+1)) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return slow.Apply(ctx, state, e)
		}
		ended := make(chan error, 1)
		go func() { ended <- Rebuild(ctx, JetStream(r.one), p) }()
		select {
		case <-begun:
		case <-time.After(patience):
			t.Fatal("the rebuild does not begin")
		}
		cancel()
		if err := <-ended; err == nil {
			t.Error("a rebuild that was ended is done")
		}
		if at := versionNow(t, JetStream(r.one)); at.Version != 1 {
			t.Fatalf("the version is %+v", at)
		}
	}
	for _, state := range viewed(t, JetStream(r.one), "counter") {
		if !strings.HasPrefix(state, "old ") {
			t.Fatalf("a live state is %q", state)
		}
	}
	if err := Rebuild(t.Context(), JetStream(r.two), counterProjection("new ")); err != nil {
		t.Fatal(err)
	}
	r.check(t, "new ")
}

// TestTwoRebuilds begins a second one while the first is under way: one of them is done, and the
// states are whole.
func TestTwoRebuilds(t *testing.T) {
	t.Parallel()
	r := newRebuildRig(t)
	begun := make(chan struct{})
	goOn := make(chan struct{})
	once := sync.OnceFunc(func() { close(begun) })
	first := counterProjection("first ")
	apply := first.Apply
	first.Apply = func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		once()
		select {
		case <-goOn:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return apply(ctx, state, e)
	}
	ended := make(chan error, 1)
	go func() { ended <- Rebuild(t.Context(), JetStream(r.one), first) }()
	select {
	case <-begun:
	case <-time.After(patience):
		t.Fatal("the rebuild does not begin")
	}
	err := Rebuild(t.Context(), JetStream(r.two), counterProjection("second "))
	close(goOn)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Error("the first rebuild was done too")
	}
	r.check(t, "second ")
}

// writerFunc is a writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestRebuildAfterRebuild goes through versions, as deployments do.
func TestRebuildAfterRebuild(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	s := newStream(bus, topicCounts)
	for i := range 100 {
		s.put(t, "k"+strconv.Itoa(i%10))
	}
	s.flush(t)
	live := run(t, JetStream(bus), counterProjection("0 "))
	workedOff(t, JetStream(bus), "counter")
	for i := range 2 {
		ctx, cancel := context.WithCancel(t.Context())
		p := counterProjection(strconv.Itoa(i+1) + " ")
		p.grace = time.Hour
		swapped := make(chan struct{})
		p.Logger = slog.New(slog.NewTextHandler(writerFunc(func(line []byte) (int, error) {
			if bytes.Contains(line, []byte("projection rebuilt")) {
				close(swapped)
			}
			return len(line), nil
		}), nil))
		ended := make(chan error, 1)
		go func() { ended <- Rebuild(ctx, JetStream(bus), p) }()
		select {
		case <-swapped:
		case <-time.After(patience):
			t.Fatal("there is no swap")
		}
		if at := versionNow(t, JetStream(bus)); at.Version != i+2 {
			t.Errorf("the version is %+v, want %d", at, i+2)
		}
		cancel() // within the grace: what is left of the old one is removed by the next
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		s.put(t, "k0")
		s.flush(t)
		workedOff(t, JetStream(bus), p.groupOf(i+2))
		wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, p.Apply))
	}
	if at := versionNow(t, JetStream(bus)); at.Version != 3 || !slices.Equal(at.Left, []int{2}) {
		t.Errorf("the version is %+v", at)
	}
	if _, err := bus.Group(topicCounts, "counter").Backlog(t.Context()); !errors.Is(err, jetstream.ErrNotFound) {
		t.Errorf("the first group is still there: %v", err)
	}
	// An instance that starts later runs the newest one.
	live.stop(t)
	put(t, bus, topicCounts, "late", "1")
	p := counterProjection("2 ")
	run(t, JetStream(bus), p)
	workedOff(t, JetStream(bus), p.groupOf(3))
	got, want := viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, p.Apply)
	if !maps.Equal(got, want) {
		wantStates(t, got, want)
	}
}
