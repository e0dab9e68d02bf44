package projections

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// oddKeys have bytes that subjects, file names and KV keys do not take.
var oddKeys = []string{"host:name:1", "a.b.c", "*", ">", "a b", "ä€\u2028", "=41", "%2F/..", ".", "\"\\", "\x7f", strings.Repeat("k", 512), strings.Repeat("€", 170)}

// TestStatesFollowTheStream has one instance and all that can come on a topic.
func TestStatesFollowTheStream(t *testing.T) { // not in parallel: the hub must not stand still
	url := startNATS(t)
	bus := openBus(t, jetstream.Config{URL: url})
	spied := &spy{Bus: JetStream(bus)}
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	seen := newTally()
	put(t, bus, topicCounts, "before", "0")
	run(t, spied, Projection{From: jetstream.FromEarliest, Observer: seen})
	s := newStream(bus, topicCounts)
	keyed, n := 1, 40
	for range n {
		for _, key := range oddKeys {
			s.put(t, key)
			keyed++
		}
		s.put(t, "")
		s.flush(t)
		put(t, bus, topicCounts, "gone", "1")
		remove(t, bus, topicCounts, "gone")
		put(t, bus, topicCounts, "back", "1")
		remove(t, bus, topicCounts, "back")
		put(t, bus, topicCounts, "back", "2")
		if err := nc.Publish("keyed.native=2E1."+topicCounts, []byte("no json")); err != nil {
			t.Fatal(err)
		}
		keyed += 6
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	poll(t, "all events are applied", func() bool { return seen.outcome(Applied) >= keyed })
	workedOff(t, spied, "counter")
	want := fold(t, bus, 0, appendEvent)
	if len(want) != len(oddKeys)+3 {
		t.Fatalf("there are %d keys", len(want))
	}
	wantStates(t, viewed(t, spied, "counter"), want)
	if got := seen.outcome(Applied); got != keyed || seen.outcome(Known)+seen.outcome(Poisoned) > 0 {
		t.Errorf("it was told of %v, want %d applied", seen.outcomes, keyed)
	}
	if n := spied.lookups.Load(); n != 0 {
		t.Errorf("an only member that has seen everything looked %d times for what it has missed", n)
	}
	v, err := OpenView(t.Context(), spied, "counter")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"gone", "never"} {
		if s, err := v.Get(t.Context(), key); err != nil || s.Value != nil {
			t.Errorf("key %s has the state %+v (%v), want none", key, s, err)
		}
	}
	if s, err := v.Get(t.Context(), "a.b.c"); err != nil || string(s.Value) != want["a.b.c"] {
		t.Errorf("key a.b.c has the state %+v (%v), want %q", s, err, want["a.b.c"])
	}
}

// TestInstancesComeAndGo starts and stops instances at random while events come in.
func TestInstancesComeAndGo(t *testing.T) {
	const most, keys, steps, perStep = 3, 40, 20, 40
	url := startNATS(t)
	rnd := rand.New(rand.NewPCG(5, 1))
	var buses [most]*jetstream.Bus
	var instances [most]*running
	for i := range buses {
		buses[i] = openBus(t, jetstream.Config{URL: url})
	}
	toggle := func(i int) {
		if instances[i] != nil {
			instances[i].stop(t)
			instances[i] = nil
			return
		}
		instances[i] = run(t, JetStream(buses[i]), Projection{From: jetstream.FromEarliest, InFlight: 1 + rnd.IntN(64), CacheKeys: 1 + rnd.IntN(keys)})
	}
	streams := []*stream{newStream(buses[0], topicCounts), newStream(buses[1], topicCounts)}
	toggle(0)
	for range steps {
		for range perStep {
			streams[rnd.IntN(2)].put(t, "k"+strconv.Itoa(rnd.IntN(keys)))
		}
		toggle(rnd.IntN(most))
	}
	for _, s := range streams {
		s.flush(t)
	}
	if instances[1] == nil {
		toggle(1)
	}
	workedOff(t, JetStream(buses[0]), "counter")
	wantStates(t, viewed(t, JetStream(buses[0]), "counter"), fold(t, buses[0], 0, appendEvent))
}

// behindHistory answers some questions as a leader that has applied nothing yet.
type behindHistory struct {
	History
	left *atomic.Int64
}

func (h behindHistory) NextOfKey(ctx context.Context, key string, after uint64) (*jetstream.Event, error) {
	if h.left.Add(-1) >= 0 {
		return nil, jetstream.ErrNotFound
	}
	return h.History.NextOfKey(ctx, key, after)
}

func (h behindHistory) Bounds(ctx context.Context) (first, last uint64, err error) {
	if h.left.Load() > 0 {
		return 1, 0, nil
	}
	return h.History.Bounds(ctx)
}

type behindBus struct {
	Bus
	left atomic.Int64
}

func (b *behindBus) History(topic string) History {
	return behindHistory{b.Bus.History(topic), &b.left}
}

// TestALeaderThatIsBehind looks for an event that another member holds, at a leader that has not
// caught up. The event is not taken for one that is gone.
func TestALeaderThatIsBehind(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{URL: startNATS(t)})
	for _, payload := range []string{"1", "2", "3"} {
		put(t, bus, topicCounts, "k", payload)
	}
	held := make(chan *jetstream.Delivery, 1)
	other, err := bus.Subscribe(t.Context(), topicCounts, "counter", jetstream.SubscribeOptions{From: jetstream.FromEarliest, MaxInFlight: 1}, func(h *jetstream.Held) {
		if d, ok := h.Begin(); ok {
			held <- d
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	first := <-held
	behind := &behindBus{Bus: JetStream(bus)}
	behind.left.Store(3)
	run(t, behind, Projection{From: jetstream.FromEarliest})
	poll(t, "the events are applied", func() bool { return viewed(t, behind, "counter")["k"] == "1 2 3 " })
	if left := behind.left.Load(); left > 0 {
		t.Errorf("%d questions were not asked", left)
	}
	if err := first.Nack("not mine", 0); err != nil {
		t.Error(err)
	}
	if err := other.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	workedOff(t, behind, "counter")
	wantStates(t, viewed(t, behind, "counter"), fold(t, bus, 0, appendEvent))
}

// TestGroupIsMoved sets the group back and forward under instances that are at work.
func TestGroupIsMoved(t *testing.T) {
	t.Parallel()
	const keys, rounds, perRound = 20, 3, 100
	url := startNATS(t)
	one, two := openBus(t, jetstream.Config{URL: url}), openBus(t, jetstream.Config{URL: url})
	seen := newTally()
	p := Projection{From: jetstream.FromEarliest, Observer: seen}
	run(t, JetStream(one), p)
	run(t, JetStream(two), p)
	rnd := rand.New(rand.NewPCG(5, 2))
	s := newStream(one, topicCounts)
	for range rounds {
		for range perRound {
			s.put(t, "k"+strconv.Itoa(rnd.IntN(keys)))
		}
		if err := two.Group(topicCounts, "counter").Seek(t.Context(), jetstream.FromEarliest); err != nil {
			t.Fatal(err)
		}
	}
	s.flush(t)
	workedOff(t, JetStream(one), "counter")
	want := fold(t, one, 0, appendEvent)
	wantStates(t, viewed(t, JetStream(one), "counter"), want)

	// Forward: what is passed over is not made up for by the next event of its key.
	if got := seen.outcome(Applied); got != rounds*perRound {
		t.Errorf("%d events were applied, want %d", got, rounds*perRound)
	}
}

// TestPassedOverEventsStayOut moves the group forward past events that nobody has had.
func TestPassedOverEventsStayOut(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	p := Projection{From: jetstream.FromEarliest}
	put(t, bus, topicCounts, "k", "1")
	first := run(t, JetStream(bus), p)
	poll(t, "the first event is applied", func() bool { return viewed(t, JetStream(bus), "counter")["k"] == "1 " })
	workedOff(t, JetStream(bus), "counter")
	first.stop(t)
	put(t, bus, topicCounts, "k", "2")
	if err := bus.Group(topicCounts, "counter").Seek(t.Context(), jetstream.Position{}); err != nil {
		t.Fatal(err)
	}
	put(t, bus, topicCounts, "k", "3")
	run(t, JetStream(bus), p)
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 3 "})
}

// TestWhereAProjectionBegins wants nothing from before the start in any state.
func TestWhereAProjectionBegins(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	const keys = 5
	publishAll := func(from int) (last jetstream.Receipt) {
		for i := range 4 * keys {
			last = put(t, bus, topicCounts, "k"+strconv.Itoa(i%keys), strconv.Itoa(from+i))
		}
		return last
	}
	before := publishAll(0)
	// A moment that lies between the events before and those after it.
	moment := time.Now()
	poll(t, "the clock goes on", func() bool { return time.Since(moment) > 5*time.Millisecond })
	for name, from := range map[string]jetstream.Position{
		"latest": {}, "ts": jetstream.FromTime(moment.Add(time.Millisecond)), "after": jetstream.FromAfterID(before.ID),
	} {
		run(t, JetStream(bus), Projection{Group: name, From: from})
		poll(t, "the group is made", func() bool {
			_, err := bus.Group(topicCounts, name).Backlog(t.Context())
			return err == nil
		})
	}
	publishAll(100)
	want := fold(t, bus, before.Sequence+1, appendEvent)
	for _, name := range []string{"latest", "ts", "after"} {
		workedOff(t, JetStream(bus), name)
		wantStates(t, viewed(t, JetStream(bus), name), want)
	}
}

func TestWrongProjections(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	put(t, bus, topicCounts, "k", "1")
	for name, p := range map[string]Projection{
		"name":       {Name: "No Name"},
		"topic":      {Topic: "a..b"},
		"group":      {Name: "x", Group: "a\x00"},
		"long group": {Name: "x", Group: strings.Repeat("g", 128)},
		"limits":     {InFlight: -1},
		"in flight":  {InFlight: 10_001},
		"unknown id": {From: jetstream.FromAfterID("nobody's")},
	} {
		t.Run(name, func(t *testing.T) {
			r := runAway(t, JetStream(bus), p)
			defer r.cancel()
			if err := r.wait(t); err == nil {
				t.Error("no error")
			}
		})
	}
}

// letter is a dead letter.
type letter struct {
	Topic    string `json:"topic"`
	Group    string `json:"group"`
	Err      string `json:"err"`
	Attempts int    `json:"attempts"`
	Original struct {
		ID      string          `json:"id"`
		Key     string          `json:"key"`
		Payload json.RawMessage `json:"payload"`
	} `json:"original"`
}

func readLetters(tb testing.TB, bus *jetstream.Bus) map[string]letter {
	tb.Helper()
	all := make(map[string]letter)
	for _, payload := range letters(tb, bus) {
		var l letter
		if err := json.Unmarshal(payload, &l); err != nil {
			tb.Fatal(err)
		}
		if _, twice := all[l.Original.ID]; twice {
			tb.Errorf("event %s has two dead letters", l.Original.ID)
		}
		all[l.Original.ID] = l
	}
	return all
}

// TestPoison wants an event that cannot be applied among the dead letters, and the next events of
// its key applied.
func TestPoison(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	var tried atomic.Int64
	bad := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		switch string(e.Payload) {
		case `"permanent"`:
			return nil, fmt.Errorf("read it: %w", Permanent(errors.New("no number")))
		case `"failing"`:
			tried.Add(1)
			return nil, errors.New("out of luck")
		}
		return appendEvent(ctx, state, e)
	}
	seen := newTally()
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: bad, Attempts: 3, Observer: seen})
	var receipts []jetstream.Receipt
	for _, payload := range []string{"1", `"permanent"`, "2", `"failing"`, "3", `"permanent"`, "4"} {
		receipts = append(receipts, put(t, bus, topicCounts, "k", payload))
	}
	workedOff(t, JetStream(bus), "counter")
	poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied) >= 4 && seen.outcome(Poisoned) >= 3 })
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 2 3 4 "})
	if tried.Load() != 3 {
		t.Errorf("it was tried %d times, want 3", tried.Load())
	}
	dead := readLetters(t, bus)
	if len(dead) != 3 {
		t.Errorf("there are %d dead letters, want 3", len(dead))
	}
	for i, want := range map[int]letter{
		1: {Err: "read it: no number", Attempts: 1}, 3: {Err: "out of luck", Attempts: 3}, 5: {Err: "read it: no number", Attempts: 1},
	} {
		got := dead[receipts[i].ID]
		if got.Topic != topicCounts || got.Group != "counter" || got.Original.Key != "k" || got.Err != want.Err || got.Attempts != want.Attempts {
			t.Errorf("the dead letter of event %d is %+v, want %+v", i, got, want)
		}
	}
	if n := seen.outcome(Poisoned); n != 3 {
		t.Errorf("%d events were poisoned, want 3", n)
	}
}

// TestFailingKeyHoldsUpNobody has a key whose event fails for long, with 300 more behind it.
func TestFailingKeyHoldsUpNobody(t *testing.T) {
	t.Parallel()
	const queued, others = 300, 200 // InFlight is 100
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	cured := make(chan struct{})
	apply := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		if string(e.Payload) == `"bad"` {
			select {
			case <-cured:
			default:
				return nil, errors.New("not yet")
			}
		}
		return appendEvent(ctx, state, e)
	}
	put(t, bus, topicCounts, "bad", `"bad"`)
	s := newStream(bus, topicCounts)
	for range queued {
		s.put(t, "bad")
	}
	for i := range others {
		s.put(t, "k"+strconv.Itoa(i%50))
	}
	s.flush(t)
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: apply, Attempts: 1_000_000, InFlight: 100})
	want := fold(t, bus, 0, appendEvent)
	without := make(map[string]string)
	for key, state := range want {
		if key != "bad" {
			without[key] = state
		}
	}
	poll(t, "the other keys are worked off", func() bool {
		backlog, err := bus.Group(topicCounts, "counter").Backlog(t.Context())
		return err == nil && backlog.Waiting == 0 && backlog.Leased == 1+queued
	})
	wantStates(t, viewed(t, JetStream(bus), "counter"), without)
	close(cured)
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), want)
	if n := len(letters(t, bus)); n != 0 {
		t.Errorf("there are %d dead letters", n)
	}
}

// TestPoisonedThousand has a key all of whose events are poison.
func TestPoisonedThousand(t *testing.T) {
	const queued = 1_000
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	apply := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		if e.Key == "bad" {
			return nil, Permanent(errors.New("bad"))
		}
		return appendEvent(ctx, state, e)
	}
	s := newStream(bus, topicCounts)
	for i := range queued {
		s.put(t, "bad")
		if i%10 == 0 {
			s.put(t, "k"+strconv.Itoa(i%7))
		}
	}
	s.flush(t)
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: apply})
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, apply))
	if n := len(readLetters(t, bus)); n != queued {
		t.Errorf("there are %d dead letters, want %d", n, queued)
	}
}

// TestPassingErrors wants the events of a key to wait for one that fails for a while.
func TestPassingErrors(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	var mu sync.Mutex
	failed := make(map[string]int)
	apply := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		mu.Lock()
		defer mu.Unlock()
		if failed[e.ID]++; e.Sequence%7 == 0 && failed[e.ID] < 4 {
			return nil, errors.New("not now")
		}
		return appendEvent(ctx, state, e)
	}
	s := newStream(bus, topicCounts)
	for i := range 60 {
		s.put(t, "k"+strconv.Itoa(i%5))
	}
	s.flush(t)
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: apply})
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, appendEvent))
	if n := len(letters(t, bus)); n != 0 {
		t.Errorf("there are %d dead letters", n)
	}
}

// TestSlowKey has a key whose Apply hangs: the others go on, and ending hands everything back at
// once.
func TestSlowKey(t *testing.T) { // not in parallel: the hub must not stand still
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir()), AckWait: time.Hour})
	hang := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
		if e.Key == "slow" {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return appendEvent(ctx, state, e)
	}
	s := newStream(bus, topicCounts)
	for i := range 200 {
		if s.put(t, "k"+strconv.Itoa(i%5)); i%40 == 0 {
			s.put(t, "slow")
		}
	}
	s.flush(t)
	want := fold(t, bus, 0, appendEvent)
	first := run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: hang, InFlight: 16})
	poll(t, "the other keys are worked off", func() bool {
		got := viewed(t, JetStream(bus), "counter")
		return got["k0"] == want["k0"] && got["k4"] == want["k4"]
	})
	first.stop(t)
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest})
	workedOff(t, JetStream(bus), "counter") // the leases came back before AckWait
	wantStates(t, viewed(t, JetStream(bus), "counter"), want)
}

// flaky is a Store in which a Save sometimes fails, before or after it was done, and another
// instance sometimes is first.
type flaky struct {
	Store
	mu    sync.Mutex
	rnd   *rand.Rand
	clock time.Duration // how far the times of saved states are off
}

func (f *flaky) Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (State, error) {
	f.mu.Lock()
	what := 10
	if f.rnd != nil {
		what = f.rnd.IntN(8)
	}
	f.mu.Unlock()
	switch what {
	case 0:
		return State{}, errors.New("not done")
	case 1, 2:
		if _, err := f.Store.Save(ctx, key, old, next, cause); err != nil {
			return State{}, err
		}
		if what == 2 {
			return State{}, ErrConflict // as if another instance had applied the same event
		}
		return State{}, errors.New("done, but who knows")
	}
	s, err := f.Store.Save(ctx, key, old, next, cause)
	s.StoredAt += int64(f.clock)
	return s, err
}

// TestUnknownOutcomes wants each event once whatever a Store's answers say.
func TestUnknownOutcomes(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	s := newStream(bus, topicCounts)
	for i := range 150 {
		s.put(t, "k"+strconv.Itoa(i%20))
	}
	s.flush(t)
	rnd := rand.New(rand.NewPCG(5, 3))
	p := Projection{From: jetstream.FromEarliest, Store: func(ctx context.Context, version int) (Store, error) {
		states, err := OpenStates(ctx, JetStream(bus), StatesBucket("counter", version))
		return &flaky{Store: states, rnd: rnd}, err
	}}
	run(t, JetStream(bus), p)
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, appendEvent))
	if n := len(letters(t, bus)); n != 0 {
		t.Errorf("there are %d dead letters", n)
	}
}

// TestClockBehind wants nothing doubled by a hub whose clock is behind that of the server.
func TestClockBehind(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	s := newStream(bus, topicCounts)
	for i := range 100 {
		s.put(t, "k"+strconv.Itoa(i%10))
	}
	s.flush(t)
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Store: func(ctx context.Context, version int) (Store, error) {
		states, err := OpenStates(ctx, JetStream(bus), StatesBucket("counter", version))
		return &flaky{Store: states, clock: -time.Hour}, err
	}})
	workedOff(t, JetStream(bus), "counter")
	if err := bus.Group(topicCounts, "counter").Seek(t.Context(), jetstream.FromEarliest); err != nil {
		t.Fatal(err)
	}
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, appendEvent))
}

// TestConnectionCut stops the server and starts it again while events are under way.
func TestConnectionCut(t *testing.T) {
	t.Parallel()
	const keys, cuts, perCut = 30, 2, 150
	srv := natstest.Start(t)
	// what was under way comes again after AckWait
	one, two := openBus(t, jetstream.Config{URL: srv.URL(), AckWait: ackWait / 2}), openBus(t, jetstream.Config{URL: srv.URL(), AckWait: ackWait / 2})
	run(t, JetStream(one), Projection{From: jetstream.FromEarliest})
	run(t, JetStream(two), Projection{From: jetstream.FromEarliest})
	rnd := rand.New(rand.NewPCG(5, 4))
	for round := range cuts + 1 {
		for range perCut {
			// A publish that is cut off may be repeated, or not: the states follow what is stored.
			_, _ = one.Publish(t.Context(), topicCounts, []byte(strconv.Itoa(round)), jetstream.PublishOptions{Key: "k" + strconv.Itoa(rnd.IntN(keys))})
		}
		if round < cuts {
			srv.Stop()
			srv.Start()
			poll(t, "the hubs are connected", func() bool { return one.Ready(t.Context()) == nil && two.Ready(t.Context()) == nil })
		}
	}
	workedOff(t, JetStream(one), "counter")
	wantStates(t, viewed(t, JetStream(one), "counter"), fold(t, one, 0, appendEvent))
}

// TestWhatNoStoreTakes has states and keys that are too large: dead letters, and nobody waits for
// them.
func TestWhatNoStoreTakes(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]func(bus Bus) func(context.Context, int) (Store, error){
		"bucket": func(Bus) func(context.Context, int) (Store, error) { return nil },
		"topic": func(bus Bus) func(context.Context, int) (Store, error) {
			return func(context.Context, int) (Store, error) { return NewTopicStore(bus, "counted"), nil }
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := startNATS(t)
			bus := openBus(t, jetstream.Config{URL: url, Topics: []topics.Rule{{Pattern: "counted", Compaction: true}}})
			nc, err := nats.Connect(url)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			huge := bytes.Repeat([]byte("9"), 2<<20)
			apply := func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
				if string(e.Payload) == `"huge"` {
					return huge, nil
				}
				return appendEvent(ctx, state, e)
			}
			seen := newTally()
			run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Apply: apply, Store: store(JetStream(bus)), Observer: seen})
			put(t, bus, topicCounts, "k", "1")
			put(t, bus, topicCounts, "k", `"huge"`)
			put(t, bus, topicCounts, "k", "2")
			if err := nc.Publish("keyed."+strings.Repeat("k", 600)+"."+topicCounts, []byte("1")); err != nil {
				t.Fatal(err)
			}
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
			put(t, bus, topicCounts, "k", "3")
			poll(t, "all is worked off", func() bool { return seen.outcome(Applied) == 3 && seen.outcome(Poisoned) == 2 })
			workedOff(t, JetStream(bus), "counter")
			if n := len(readLetters(t, bus)); n != 2 {
				t.Errorf("there are %d dead letters, want 2", n)
			}
			if store(JetStream(bus)) == nil {
				wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 2 3 "})
			} else if e, err := bus.Keys("counted").Get(t.Context(), "k"); err != nil || string(e.Payload) != "1 2 3 " {
				t.Errorf("the state is %v (%v)", e, err)
			}
		})
	}
}

// TestBusClosed wants a projection to end, with an error, when its bus is closed under it.
func TestBusClosed(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]Projection{
		"keyed":   {From: jetstream.FromEarliest},
		"ordered": {From: jetstream.FromEarliest, Key: func(e *jetstream.Event) (string, error) { return e.Key, nil }},
	} {
		t.Run(name, func(t *testing.T) {
			bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
			if err != nil {
				t.Fatal(err)
			}
			put(t, bus, topicCounts, "k", "1")
			r := runAway(t, JetStream(bus), p)
			defer r.cancel()
			poll(t, "the event is applied", func() bool { return viewed(t, JetStream(bus), "counter")["k"] == "1 " })
			if err := bus.Close(); err != nil {
				t.Fatal(err)
			}
			if err := r.wait(t); !errors.Is(err, jetstream.ErrClosed) {
				t.Errorf("it ended with %v, want ErrClosed", err)
			}
		})
	}
}

// TestEndWhileBusy ends instances in the middle of their work, again and again.
func TestEndWhileBusy(t *testing.T) {
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	s := newStream(bus, topicCounts)
	for i := range 2_000 {
		s.put(t, "k"+strconv.Itoa(i%100))
	}
	s.flush(t)
	before := goleak.IgnoreCurrent()
	rnd := rand.New(rand.NewPCG(5, 6))
	seen := newTally()
	for round := range 10 {
		done := seen.outcome(Applied)
		r := run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Observer: seen, InFlight: 50})
		goal := done + rnd.IntN(200)
		poll(t, "it works", func() bool {
			b, err := bus.Group(topicCounts, "counter").Backlog(t.Context())
			done := err == nil && b.Waiting+b.Leased == 0
			// The backlog is empty also for a moment after the group's consumer was made.
			return seen.outcome(Applied) > goal || done && seen.outcome(Applied) > 0
		})
		r.stop(t)
		if round == 0 {
			before = goleak.IgnoreCurrent() // the bus starts some of its own at the first use
		}
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest, Observer: seen})
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), fold(t, bus, 0, appendEvent))
}
