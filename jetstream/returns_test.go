package jetstream

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// heldBy is how many events the subscriptions hold that are not begun.
func heldBy(subs ...*Subscription) (n int) {
	for _, s := range subs {
		s.mu.Lock()
		for _, d := range s.out {
			if !d.begun {
				n++
			}
		}
		s.mu.Unlock()
	}
	return n
}

// Subscriptions that take nothing fetch little more than their Holder allows, however many there
// are and whatever they ask for. One that takes what comes still gets all.
func TestUnreadEventsAreBounded(t *testing.T) {
	t.Parallel()
	const events, groups, limit = 1000, 5, 300
	seen := new(counter)
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "unread", numbers(events)...)
	holder := NewHolder(HolderLimits{Unread: limit}, seen.LimitReached)
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: maxInFlightLimit, BatchSize: maxInFlightLimit}
	fetch := func(h *Holder) (subs []*Subscription) {
		opts := opts
		opts.Holder = h
		for i := range groups {
			s, err := b.Subscribe(t.Context(), "unread", "g"+strconv.Itoa(i), opts, ignore)
			if err != nil {
				t.Fatal(err)
			}
			subs = append(subs, s)
		}
		return subs
	}
	stop := func(subs []*Subscription) {
		var wg sync.WaitGroup
		for _, s := range subs {
			wg.Go(func() {
				if err := s.Stop(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	free := fetch(nil)
	eventually(t, "all is fetched without a limit", func() bool { return heldBy(free...) == events*groups })
	stop(free)

	subs := fetch(holder)
	eventually(t, "the limit is reached", func() bool { return seen.limit(LimitUnread) > 0 })
	most := 0
	for range 50 {
		most = max(most, heldBy(subs...))
		<-time.After(10 * time.Millisecond)
	}
	if bound := limit + groups*fewUnread; most > bound || most < limit/2 {
		t.Errorf("%d events are held at most, the limit is %d and the bound %d", most, limit, bound)
	}
	opts.Holder = holder
	k := take(t, b, "unread", "reader", opts)
	if got := k.payloads(events); !slices.Equal(got, numbers(events)) {
		t.Errorf("one that takes what comes got %d events: %.5q …", len(got), got)
	}
	stop(append(subs, k.sub))
	if n := holder.unread.Load(); n != 0 || holder.reserved.Load() != 0 || !holder.Idle() {
		t.Errorf("after the end, %d events are unread and %d reserved", n, holder.reserved.Load())
	}
}

// What nobody had is given back with one note for many events, and another hub still counts no
// attempt for it: however often that is repeated, and with events between that others have.
func TestGivingBackManyTakesOneNote(t *testing.T) {
	t.Parallel()
	const events = 1000
	url := natsServer(t)
	a, b := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, a, "many", numbers(events)...)
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: events, BatchSize: events}
	notes := func() uint64 {
		s, err := a.conn.JS.Stream(t.Context(), "KV_"+native.AttemptsBucket)
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.LastSeq
	}
	before := notes()
	const rounds = 3
	for round := range rounds {
		hub := []*Bus{a, b}[round%2]
		s, err := hub.Subscribe(t.Context(), "many", "g", opts, ignore)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "all is held, and its attempts are known", func() bool {
			s.mu.Lock()
			defer s.mu.Unlock()
			return len(s.out) == events && !slices.ContainsFunc(s.out, func(d *Delivery) bool { return !d.resolved })
		})
		if err := s.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := notes() - before; n > rounds {
		t.Errorf("%d events were given back %d times with %d notes", events, rounds, n)
	}
	k := take(t, b, "many", "g", opts)
	for i := range events {
		d := k.next()
		if d.Attempt != 1 || d.delivered != rounds+1 {
			t.Fatalf("event %s is attempt %d, delivery %d", d.Event.Payload, d.Attempt, d.delivered)
		}
		if i%2 == 0 { // every second one fails once
			if err := d.Nack("", time.Hour); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A hub that had the events before asks the bucket about none of them.
func TestAGroupThatComesBackKnowsItsEvents(t *testing.T) {
	t.Parallel()
	const events = 200
	seen := &missing{}
	b := open(t, Config{URL: natsServer(t), Observer: seen})
	publishAll(t, b, "back", numbers(events)...)
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: events, BatchSize: events}
	first := take(t, b, "back", "g", opts)
	for range events {
		first.next()
	}
	if err := first.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := seen.count()
	again := take(t, b, "back", "g", opts)
	for range events {
		if d := again.next(); d.Attempt != 2 {
			t.Errorf("event %s is attempt %d", d.Event.Payload, d.Attempt)
		}
	}
	if n := seen.count() - before; n > events/10 {
		t.Errorf("%d questions found nothing", n)
	}
}

// missing counts questions for entries that do not exist.
type missing struct {
	event.NopObserver
	mu sync.Mutex
	n  int
}

func (m *missing) JetStreamError(code int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if code == 10037 {
		m.n++
	}
}

func (m *missing) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.n
}

// What a lost client had is given back at the pace of its Holder, and takes its places until then.
func TestWhatALostClientHadIsGivenBackInTurn(t *testing.T) {
	t.Parallel()
	const events, limit = 1000, 250
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "lost", numbers(events)...)
	holder := NewHolder(HolderLimits{Held: events, Unread: limit}, nil)
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: events, BatchSize: events, Holder: holder}
	k := take(t, b, "lost", "g", opts)
	for range events {
		k.next()
	}
	began := time.Now()
	if err := k.sub.Disconnect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if holder.Idle() {
		t.Error("the Holder has all its places while events are being given back")
	}
	opts.Holder = nil
	again := take(t, b, "lost", "g", opts)
	for range events {
		if d := again.next(); d.Attempt != 2 {
			t.Errorf("event %s is attempt %d", d.Event.Payload, d.Attempt)
		}
	}
	if took, least := time.Since(began), (events-2*returnBatch)*time.Second/(2*limit); took < least {
		t.Errorf("%d events were given back within %v, want at least %v", events, took, least)
	}
	eventually(t, "the Holder has its places", holder.Idle)
}

// What the hub asks again and waits for is no stall of the process.
func TestOwnWorkIsNoStall(t *testing.T) {
	t.Parallel()
	unlessStalled(t, func(log *slog.Logger) error {
		b := open(t, Config{URL: natsServer(t), AckWait: 3 * time.Second, Logger: log})
		defer func() { _ = b.Close() }()
		publishAll(t, b, "work", "1")
		k := take(t, b, "work", "g", SubscribeOptions{From: FromEarliest})
		d := k.next()
		done := make(chan struct{})
		b.soon.add(func() {
			<-time.After(2 * time.Duration(b.clock.Limit))
			close(done)
		})
		<-done
		<-time.After(time.Duration(b.clock.Limit) / 2) // the stall watch looks
		if err := d.Ack(); err != nil {
			return errors.New("the lease was given up")
		}
		return nil
	})
}

// The runs say of each event what a map would say, and drop what is settled.
func TestSparedRuns(t *testing.T) {
	t.Parallel()
	var runs native.SparedRuns
	want := make(map[uint64]int)
	floor := uint64(0)
	for range 200 {
		var ds []*Delivery
		for seq := uint64(rand.N(60)); seq < 300; seq += 1 + uint64(rand.N(3)*rand.N(30)) {
			if seq > floor {
				ds = append(ds, &Delivery{seq: seq, spared: rand.N(3)})
				want[seq] = ds[len(ds)-1].spared + 1
			}
		}
		floor = max(floor, uint64(rand.N(100)))
		var left []*Delivery
		if runs, left = addSpared(runs, ds, floor); len(left) > 0 {
			t.Fatalf("%d events found no room", len(left))
		}
		for seq := range uint64(400) {
			n := want[seq]
			if seq <= floor {
				n = 0
			}
			if got := runs.Of(seq); got != n {
				t.Fatalf("event %d: %d, want %d; %v", seq, got, n, runs)
			}
		}
		for i := 1; i < len(runs); i++ {
			if runs[i][0] <= runs[i-1][1] || runs[i][0] == runs[i-1][1]+1 && runs[i][2] == runs[i-1][2] {
				t.Fatalf("runs %d and %d: %v", i-1, i, runs)
			}
		}
	}
}

// Beyond the most runs, events keep notes of their own.
func TestSparedRunsAreBounded(t *testing.T) {
	t.Parallel()
	var ds []*Delivery
	for i := range 2 * maxSparedRuns {
		ds = append(ds, &Delivery{seq: uint64(2*i + 1)})
	}
	runs, left := addSpared(nil, ds, 0)
	if len(runs) != maxSparedRuns || len(left) != maxSparedRuns {
		t.Errorf("%d runs, %d events have no room", len(runs), len(left))
	}
	if runs.Of(left[0].seq) != 0 || runs.Of(ds[0].seq) != 1 {
		t.Error("the runs do not say what they should")
	}
}
