package eventhub_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

func rig(t *testing.T) (*hubtest.Hub, *eventhub.Client) {
	t.Helper()
	hub := hubtest.New(t)
	return hub, connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
}

func TestTheEndOfAHandlerAcknowledges(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var got list[string]
	s := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(fmt.Sprintf("%s %d %v %s %s %c", d.Payload, d.Attempt, d.Topic == topic, d.Group, d.Headers["a"], d.Record()[0]))
		return nil
	})
	if s.Topic() != topic || s.Group() != "g" {
		t.Error(s.Topic(), s.Group())
	}
	if _, err := c.Publish(t.Context(), topic, 1, eventhub.PublishOptions{Headers: map[string]string{"a": "b"}}); err != nil {
		t.Fatal(err)
	}
	publish(t, c, topic, 2)
	eventually(t, "two events", func() bool { return len(got.get()) == 2 })
	settled(t, hub, topic)
	if want := []string{"1 1 true g b {", "2 1 true g  {"}; !slices.Equal(got.get(), want) {
		t.Errorf("got %q, want %q", got.get(), want)
	}
}

func TestWhatAHandlerReturnsOrPanicsWithRefuses(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	var reported list[error]
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token, OnError: reported.add})
	topic, twice := newTopic(), 2
	var letters list[string]
	for name, h := range map[string]eventhub.Handler{
		"returns": func(context.Context, *eventhub.Delivery) error { return errors.New("broken") },
		"panics":  func(context.Context, *eventhub.Delivery) error { panic("a fault") },
		"exits": func(context.Context, *eventhub.Delivery) error {
			runtime.Goexit()
			return nil
		},
	} {
		subscribe(t, c, topic, name, eventhub.SubscribeOptions{MaxAttempts: &twice}, h)
	}
	subscribe(t, c, "dlq."+topic, "operators", eventhub.SubscribeOptions{From: eventhub.FromEarliest}, func(_ context.Context, d *eventhub.Delivery) error {
		var letter struct {
			Group, Err string
			Attempts   int
		}
		if err := d.Decode(&letter); err != nil {
			return err
		}
		letters.add(fmt.Sprint(letter.Group, ": ", letter.Err, " ", letter.Attempts))
		return nil
	})
	publish(t, c, topic, 1)
	eventually(t, "three dead letters", func() bool { return len(letters.get()) == 3 })
	got := letters.get()
	slices.Sort(got)
	if want := []string{"exits: the handler ended its goroutine 2", "panics: panic: a fault 2", "returns: broken 2"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	eventually(t, "two panics", func() bool { return len(reported.get()) == 2 })
	p, ok := errors.AsType[*eventhub.PanicError](reported.get()[0])
	if !ok || p.Value != "a fault" || p.Topic != topic || p.Group != "panics" || len(p.Stack) == 0 {
		t.Errorf("reported %v", reported.get())
	}
}

func TestAHandlerMaySettleItsEventItself(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var got list[string]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		if d.Attempt == 1 {
			got.add(fmt.Sprint(d.Nack("not now", 0), d.Ack()))
			return nil
		}
		got.add(fmt.Sprint(d.Extend(time.Minute), d.Ack(), d.Ack(), d.Nack("", 0), d.Extend(time.Minute)))
		return errors.New("too late to refuse")
	})
	publish(t, c, topic, 1)
	eventually(t, "two attempts", func() bool { return len(got.get()) == 2 })
	settled(t, hub, topic)
	if want := []string{"true false", "true true false false false"}; !slices.Equal(got.get(), want) {
		t.Errorf("got %q", got.get())
	}
}

func TestManualEventsAreOpenUntilTheyAreSettled(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var got list[*eventhub.Delivery]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{Manual: true}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(d)
		return nil
	})
	publish(t, c, topic, 0, 1, 2)
	eventually(t, "three events", func() bool { return len(got.get()) == 3 })
	if n := unsettled(t, hub, topic, "g"); n != 3 {
		t.Errorf("%d are not settled", n)
	}
	d := got.get()
	if !d[1].Ack() || !d[0].Extend(time.Minute) {
		t.Error("refused")
	}
	eventually(t, "one is settled", func() bool { return unsettled(t, hub, topic, "g") == 2 })
	d[2].Nack("again", 0)
	eventually(t, "one comes again", func() bool { return len(got.get()) == 4 })
	again := got.get()[3]
	if again.Attempt != 2 || again.ID != d[2].ID {
		t.Errorf("attempt %d of %s", again.Attempt, again.ID)
	}
	d[0].Ack()
	again.Ack()
	settled(t, hub, topic)
}

func TestAManualLeaseThatRunsOutBringsTheEventAgain(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var got list[*eventhub.Delivery]
	var contexts list[context.Context]
	s := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{Manual: true, AckTimeout: time.Second, MaxAttempts: new(int)}, func(ctx context.Context, d *eventhub.Delivery) error {
		contexts.add(ctx)
		got.add(d)
		return nil
	})
	publish(t, c, topic, 1)
	eventually(t, "a second attempt", func() bool { return len(got.get()) >= 2 })
	if contexts.get()[0].Err() == nil || got.get()[0].Ack() {
		t.Error("the first lease still counts")
	}
	eventually(t, "the last one is settled", func() bool {
		all := got.get()
		all[len(all)-1].Ack()
		return unsettled(t, hub, topic, "g") == 0
	})
	// An event whose lease has ended, and that went elsewhere, is not held for ever.
	if err := s.Drain(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestNoMoreHandlersRunThanWereAskedFor(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var running, most, done atomic.Int64
	three := make(chan struct{})
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{Concurrency: 3}, func(context.Context, *eventhub.Delivery) error {
		now := running.Add(1)
		for m := most.Load(); now > m && !most.CompareAndSwap(m, now); m = most.Load() {
		}
		if now == 3 && done.Load() == 0 {
			close(three)
		}
		<-three
		runtime.Gosched()
		running.Add(-1)
		done.Add(1)
		return nil
	})
	if _, err := c.PublishMany(t.Context(), topic, numbers(60, func(int) {})); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all are handled", func() bool { return done.Load() == 60 })
	if most.Load() != 3 {
		t.Errorf("%d at a time", most.Load())
	}
	settled(t, hub, topic)
	for _, opts := range []eventhub.SubscribeOptions{{Concurrency: -1}, {MaxInFlight: 10_001}, {MaxLease: -1}} {
		_, err := c.Subscribe(t.Context(), topic, "none", opts, nothing)
		failsWith(t, err, "bad_options", false)
	}
}

func TestOneHandlerAtATimeKeepsTheOrder(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var got list[string]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(string(d.Payload))
		return nil
	})
	if _, err := c.PublishMany(t.Context(), topic, numbers(1_000, func(int) {})); err != nil {
		t.Fatal(err)
	}
	settled(t, hub, topic)
	for i, p := range got.get() {
		if p != strconv.Itoa(i) {
			t.Fatalf("event %d is %s", i, p)
		}
	}
}

func TestALeaseLivesAsLongAsItsHandlerAndThoseThatWait(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var attempts list[int]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{AckTimeout: 2 * time.Second}, func(ctx context.Context, d *eventhub.Delivery) error {
		attempts.add(d.Attempt)
		select {
		case <-time.After(2300 * time.Millisecond):
		case <-ctx.Done():
		}
		return nil
	})
	publish(t, c, topic, 1, 2)
	settled(t, hub, topic)
	if !slices.Equal(attempts.get(), []int{1, 1}) {
		t.Errorf("attempts %v", attempts.get())
	}
}

func TestALeaseIsNotProlongedForEverAndItsHandlerNotRunBesideItself(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var attempts list[int]
	stuck := make(chan struct{})
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{AckTimeout: time.Second, MaxLease: 1, MaxAttempts: new(int), Concurrency: 2}, func(_ context.Context, d *eventhub.Delivery) error {
		attempts.add(d.Attempt)
		<-stuck
		return nil
	})
	other := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	publish(t, c, topic, 1)
	eventually(t, "the handler runs", func() bool { return len(attempts.get()) == 1 })
	var elsewhere atomic.Int64
	subscribe(t, other, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		elsewhere.Store(int64(d.Attempt))
		return nil
	})
	eventually(t, "another member gets the event", func() bool { return elsewhere.Load() > 1 })
	if !slices.Equal(attempts.get(), []int{1}) {
		t.Errorf("attempts %v", attempts.get())
	}
	close(stuck)
	settled(t, hub, topic)
}

func TestAnEventThatComesAgainIsSettledByTheHandlerThatRuns(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	broken := connect(t, p.url, opts)
	topic := newTopic()
	var runs atomic.Int64
	going := make(chan struct{})
	lost := make(chan error, 1)
	s := subscribe(t, broken, topic, "g", eventhub.SubscribeOptions{Concurrency: 4}, func(ctx context.Context, _ *eventhub.Delivery) error {
		runs.Add(1)
		<-going
		lost <- ctx.Err()
		return nil
	})
	publish(t, c, topic, 1)
	eventually(t, "the handler runs", func() bool { return runs.Load() == 1 })
	for range 3 {
		cutOnce(t, p, broken, states)
	}
	eventually(t, "the event is here again", func() bool { return unsettled(t, hub, topic, "g") == 1 })
	close(going)
	settled(t, hub, topic)
	if runs.Load() != 1 || receive(t, "the context's end", lost) == nil {
		t.Errorf("%d runs", runs.Load())
	}
	eventually(t, "nothing is handled", func() bool { return s.Active() == 0 })
}

func TestAnAcknowledgementLostWithItsConnectionCostsNoSecondRun(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	p := startProxy(t, hub.WebSocket)
	broken := connect(t, p.url, fast(hub.Token))
	topic := newTopic()
	var runs list[string]
	subscribe(t, broken, topic, "g", eventhub.SubscribeOptions{}, func(ctx context.Context, d *eventhub.Delivery) error {
		runs.add(string(d.Payload))
		p.cut()
		<-ctx.Done() // the connection has ended
		return nil
	})
	publish(t, c, topic, 1)
	eventually(t, "the handler runs", func() bool { return len(runs.get()) > 0 })
	settled(t, hub, topic)
	if len(runs.get()) != 1 {
		t.Errorf("runs %q", runs.get())
	}
}

// A handler that acknowledges early and goes on must not run beside itself either.
func TestAnEarlyAcknowledgementStartsNoSecondHandler(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	broken := connect(t, p.url, opts)
	topic := newTopic()
	p.deafen(false)
	var runs atomic.Int64
	going := make(chan struct{})
	subscribe(t, broken, topic, "g", eventhub.SubscribeOptions{Concurrency: 4}, func(ctx context.Context, d *eventhub.Delivery) error {
		runs.Add(1)
		p.cut()
		<-ctx.Done()
		d.Ack() // is lost
		<-going
		return nil
	})
	publish(t, c, topic, 1)
	eventually(t, "another connection", func() bool {
		n := 0
		for _, s := range states.get() {
			if s == eventhub.StateReady {
				n++
			}
		}
		return n >= 2
	})
	settled(t, hub, topic)
	close(going)
	if runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
}

func TestEventsGivesOneAfterTheOther(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	if _, err := c.PublishMany(t.Context(), topic, numbers(50, func(int) {})); err != nil {
		t.Fatal(err)
	}
	n := 0
	for d, err := range c.Events(t.Context(), topic, "g", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
		if err != nil || string(d.Payload) != strconv.Itoa(n) {
			t.Fatal(n, err)
		}
		if n++; n == 50 {
			break // leaves the group, and gives this event back
		}
	}
	if left := unsettled(t, hub, topic, "g"); left != 1 {
		t.Errorf("%d are not settled", left)
	}
	for d, err := range c.Events(t.Context(), topic, "g", eventhub.SubscribeOptions{}) {
		if err != nil || string(d.Payload) != "49" || d.Attempt != 2 || !d.Ack() {
			t.Fatal(err)
		}
		break
	}
	settled(t, hub, topic)
	for _, err := range c.Events(t.Context(), "no..topic", "g", eventhub.SubscribeOptions{}) {
		failsWith(t, err, "bad_topic", false)
	}
}

func TestAContextEndsASubscriptionAndALoop(t *testing.T) {
	t.Parallel()
	_, c := rig(t)
	topic := newTopic()
	ctx, cancel := context.WithCancel(t.Context())
	s, err := c.Subscribe(ctx, topic, "g", eventhub.SubscribeOptions{}, nothing)
	if err != nil {
		t.Fatal(err)
	}
	var got list[string]
	over := make(chan struct{})
	go func() {
		defer close(over)
		for d, err := range c.Events(ctx, topic, "loop", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
			if err != nil {
				t.Error(err)
			} else {
				got.add(string(d.Payload))
			}
		}
	}()
	publish(t, c, topic, 0)
	eventually(t, "an event", func() bool { return len(got.get()) == 1 })
	cancel()
	receive(t, "the end of the loop", over)
	receive(t, "the end of the subscription", s.Done())
	if s.Err() != nil {
		t.Error(s.Err())
	}
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, nothing) // the name is free
	_, err = c.Subscribe(ctx, topic, "late", eventhub.SubscribeOptions{}, nothing)
	failsWith(t, err, "aborted", false)
}

func TestAGroupIsJoinedOnce(t *testing.T) {
	t.Parallel()
	_, c := rig(t)
	topic := newTopic()
	s := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, nothing)
	_, err := c.Subscribe(t.Context(), topic, "g", eventhub.SubscribeOptions{}, nothing)
	failsWith(t, err, "already_subscribed", false)
	if err := errors.Join(s.Unsubscribe(t.Context()), s.Unsubscribe(t.Context())); err != nil {
		t.Error(err)
	}
	again := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, nothing)
	if err := again.Drain(t.Context()); err != nil {
		t.Error(err)
	}
	_, err = c.Subscribe(t.Context(), topic, "", eventhub.SubscribeOptions{}, nothing)
	failsWith(t, err, "bad_group", false)
	_, err = c.Subscribe(t.Context(), topic, "x", eventhub.SubscribeOptions{From: eventhub.FromTS}, nothing)
	failsWith(t, err, "bad_options", false)
	_, err = c.Subscribe(t.Context(), topic, "y", eventhub.SubscribeOptions{Extra: map[string]any{"from": "nowhere"}}, nothing)
	failsWith(t, err, "bad_options", false)
}

func TestPauseOutlivesAReconnect(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	broken := connect(t, p.url, opts)
	topic := newTopic()
	var got list[string]
	s := subscribe(t, broken, topic, "g", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(string(d.Payload))
		return nil
	})
	if err := s.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	publish(t, c, topic, 1)
	cutOnce(t, p, broken, states)
	publish(t, c, topic, 2)
	publish(t, broken, newTopic(), "an answer that comes after events, if there were any")
	if len(got.get()) != 0 {
		t.Errorf("got %q", got.get())
	}
	if err := s.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	settled(t, hub, topic)
	if all := got.get(); len(all) != 2 {
		t.Errorf("got %q", all)
	}
}

func TestUnsubscribeGivesBackAndDrainFinishes(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	going := make(chan struct{})
	var runs atomic.Int64
	handler := func(context.Context, *eventhub.Delivery) error {
		runs.Add(1)
		<-going
		return nil
	}
	leaving := subscribe(t, c, topic, "leaves", eventhub.SubscribeOptions{}, handler)
	draining := subscribe(t, c, topic, "drains", eventhub.SubscribeOptions{}, handler)
	publish(t, c, topic, 1)
	eventually(t, "both run", func() bool { return runs.Load() == 2 })
	if err := leaving.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
	drained := make(chan error, 1)
	go func() { drained <- draining.Drain(t.Context()) }()
	publish(t, c, topic, 2)
	close(going)
	if err := receive(t, "the drain", drained); err != nil {
		t.Error(err)
	}
	if n := unsettled(t, hub, topic, "leaves"); n != 2 {
		t.Errorf("%d are not settled", n)
	}
	eventually(t, "the first is settled", func() bool { return unsettled(t, hub, topic, "drains") <= 1 })
}

func TestCloseLetsHandlersFinish(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	closing := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
	topic := newTopic()
	var begun, done atomic.Int64
	subscribe(t, closing, topic, "g", eventhub.SubscribeOptions{Concurrency: 4}, func(context.Context, *eventhub.Delivery) error {
		begun.Add(1)
		<-time.After(50 * time.Millisecond)
		done.Add(1)
		return nil
	})
	if _, err := c.PublishMany(t.Context(), topic, numbers(40, func(int) {})); err != nil {
		t.Fatal(err)
	}
	eventually(t, "some run", func() bool { return begun.Load() > 0 })
	if err := closing.Close(); err != nil {
		t.Error(err)
	}
	if begun.Load() != done.Load() {
		t.Errorf("%d began, %d are done", begun.Load(), done.Load())
	}
	eventually(t, "those that are done are settled", func() bool { return unsettled(t, hub, topic, "g") == 40-int(done.Load()) })
}

// Close ends the contexts of handlers that do not finish in time, and waits for them.
func TestCloseEndsHandlersThatTakeTooLong(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token, DrainTimeout: 50 * time.Millisecond})
	topic := newTopic()
	running := make(chan struct{})
	var ended atomic.Bool
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, func(ctx context.Context, _ *eventhub.Delivery) error {
		close(running)
		<-ctx.Done()
		ended.Store(true)
		return nil
	})
	publish(t, c, topic, 1)
	receive(t, "the handler runs", running)
	failsWith(t, c.Close(), "aborted", false)
	if !ended.Load() {
		t.Error("Close did not wait for the handler")
	}
	eventually(t, "the event is open", func() bool { return unsettled(t, hub, topic, "g") == 1 })
}

func TestASubscriptionThatTheHubEndsSaysSo(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	var reported list[error]
	c := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token, OnError: reported.add})
	topic := newTopic()
	s := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, nothing)
	if err := hub.Bus.Group(topic, "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, "the end", s.Done())
	failsWith(t, s.Err(), "not_subscribed", false)
	eventually(t, "a report", func() bool { return len(reported.get()) == 1 })
	failsWith(t, reported.get()[0], "not_subscribed", false)
}

func TestOneSubscriptionReadsSeveralTopics(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic, second := newTopic(), newTopic()
	var got list[string]
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{Topics: []string{second}}, func(_ context.Context, d *eventhub.Delivery) error {
		got.add(d.Topic + string(d.Payload))
		return nil
	})
	for i, name := range []string{topic, second} {
		if _, err := c.Publish(t.Context(), name, i, eventhub.PublishOptions{ID: "same"}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both", func() bool { return len(got.get()) == 2 })
	settled(t, hub, topic)
	settled(t, hub, second)
}

func TestDedupeHandlesEachEventOnce(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	var runs atomic.Int64
	store := &eventhub.MemoryStore{Max: 2}
	fails := atomic.Bool{}
	fails.Store(true)
	handler := eventhub.Dedupe(func(context.Context, *eventhub.Delivery) error {
		if fails.Swap(false) {
			return errors.New("the first time")
		}
		runs.Add(1)
		return nil
	}, store, 0)
	both := subscribe(t, c, topic, "g", eventhub.SubscribeOptions{}, handler)
	publish(t, c, topic, 1)
	settled(t, hub, topic)
	if err := both.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := hub.Bus.Group(topic, "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	subscribe(t, c, topic, "g", eventhub.SubscribeOptions{From: eventhub.FromEarliest}, handler)
	settled(t, hub, topic)
	if runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
	for _, id := range []string{"a", "b", "c"} {
		if err := store.Mark(t.Context(), topic, "g", id, time.Hour); err != nil {
			t.Error(err)
		}
	}
	var kept []string
	for _, id := range []string{"a", "b", "c"} {
		if seen, _ := store.Seen(t.Context(), topic, "g", id); seen {
			kept = append(kept, id)
		}
	}
	if !slices.Equal(kept, []string{"b", "c"}) {
		t.Errorf("kept %q of at most two", kept)
	}
}

// Acknowledgements leave together: what waits while the connection is busy shares a frame. Many
// members and handlers settle everything.
func TestManyHandlersSettleEverything(t *testing.T) {
	t.Parallel()
	hub, c := rig(t)
	topic := newTopic()
	const n = 3_000
	var mu sync.Mutex
	seen := map[string]int{}
	for range 2 {
		member := connect(t, hub.WebSocket, eventhub.Options{Token: hub.Token})
		subscribe(t, member, topic, "g", eventhub.SubscribeOptions{Concurrency: 50, MaxInFlight: 500}, func(_ context.Context, d *eventhub.Delivery) error {
			mu.Lock()
			defer mu.Unlock()
			seen[string(d.Payload)]++
			return nil
		})
	}
	if _, err := c.PublishMany(t.Context(), topic, numbers(n, func(int) {})); err != nil {
		t.Fatal(err)
	}
	settled(t, hub, topic)
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != n {
		t.Errorf("%d events", len(seen))
	}
	for p, runs := range seen {
		if runs != 1 {
			t.Errorf("%s was handled %d times", p, runs)
		}
	}
}
