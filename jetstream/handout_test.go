package jetstream

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// Events come without any other call, and wait where the subscriber asks for that.
func TestSubscribeDeliversByItself(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "self", "1", "2")
	got := make(chan string, 10)
	if _, err := b.Subscribe(t.Context(), "self", "live", SubscribeOptions{From: FromEarliest}, func(h *Held) { got <- string(h.Event.Payload) }); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"1", "2"} {
		select {
		case payload := <-got:
			if payload != want {
				t.Errorf("got %s, want %s", payload, want)
			}
		case <-time.After(wait):
			t.Fatal("a subscription is silent")
		}
	}
	late := make(chan string, 10)
	s, err := b.Subscribe(t.Context(), "self", "paused", SubscribeOptions{From: FromEarliest, Paused: true}, func(h *Held) { late <- string(h.Event.Payload) })
	if err != nil {
		t.Fatal(err)
	}
	select {
	case payload := <-late:
		t.Errorf("%s came before Resume", payload)
	case <-time.After(50 * time.Millisecond):
	}
	s.Resume()
	select {
	case <-late:
	case <-time.After(wait):
		t.Fatal("nothing came after Resume")
	}
}

// A group with a TTL outlives the time in which its only member is paused from the beginning.
func TestAMemberThatBeginsPausedKeepsItsGroup(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "kept", "before")
	k := &taker{t: t, group: b.Group("kept", "g"), ch: make(chan *Held, 10)}
	var err error
	if k.sub, err = b.Subscribe(t.Context(), "kept", "g", SubscribeOptions{From: FromEarliest, GroupTTL: time.Second, Paused: true}, func(h *Held) { k.ch <- h }); err != nil {
		t.Fatal(err)
	}
	<-time.After(3 * time.Second) // the time under test
	k.sub.Resume()
	if got := k.payloads(1); got[0] != "before" {
		t.Errorf("got %s", got)
	}
	if n := k.sub.members[0].opened; n != 1 {
		t.Errorf("the member listened anew %d times: its group was gone", n-1)
	}
}

// A Held is begun once, and what settles it exists only from then on.
func TestAHeldIsBegunOnce(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "once", "1", "2")
	k := take(t, b, "once", "g", SubscribeOptions{From: FromEarliest})
	h := <-k.ch
	if !h.Valid() {
		t.Error("not valid before Begin")
	}
	d, ok := h.Begin()
	if !ok || d.Event.ID != h.Event.ID || d.Attempt != h.Attempt {
		t.Fatalf("began %v, %v", d, ok)
	}
	if again, ok := h.Begin(); ok || again != nil {
		t.Error("began twice")
	}
	if sending, ok := h.BeginSend(); ok || sending.Begun() {
		t.Error("began twice, to send")
	}
	if err := d.Ack(); err != nil {
		t.Error(err)
	}
	if h.Valid() {
		t.Error("valid after it was settled")
	}
	if err := d.Ack(); !errors.Is(err, event.ErrNotLeased) {
		t.Errorf("settled twice: %v", err)
	}

	// What did not reach the client stays, and costs no attempt.
	h = <-k.ch
	sending, ok := h.BeginSend()
	if !ok || !sending.Begun() || h.Event.Payload != nil {
		t.Fatalf("began %v with payload %q", ok, h.Event.Payload)
	}
	sending.TakeBack()
	if k.sub.Ack(h.Event.ID) {
		t.Error("an event that was taken back is leased")
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := take(t, b, "once", "g", SubscribeOptions{}).next(); d.Attempt != 1 || string(d.Event.Payload) != "2" {
		t.Errorf("attempt %d of %s", d.Attempt, d.Event.Payload)
	}
}

func TestConsumeRunsSoManyWorkers(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "crew", numbers(8)...)
	running, finish := make(chan struct{}, 8), make(chan struct{})
	s, err := b.Consume(t.Context(), "crew", "g", SubscribeOptions{From: FromEarliest, Workers: 3}, func(context.Context, *Delivery) error {
		running <- struct{}{}
		<-finish
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case <-running:
		case <-time.After(wait):
			t.Fatal("fewer than three run")
		}
	}
	select {
	case <-running:
		t.Error("more than three run")
	case <-time.After(50 * time.Millisecond):
	}
	close(finish)
	if err := s.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestWhatASubscriptionCannotBeIsSaid(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	work := func(context.Context, *Delivery) error { return nil }
	_, noHandler := b.Subscribe(t.Context(), "a", "g", SubscribeOptions{}, nil)
	_, noWork := b.Consume(t.Context(), "a", "g", SubscribeOptions{}, nil)
	_, workers := b.Subscribe(t.Context(), "a", "g", SubscribeOptions{Workers: 2}, ignore)
	_, tooMany := b.Consume(t.Context(), "a", "g", SubscribeOptions{Workers: 10_001}, work)
	for _, err := range []error{noHandler, noWork, workers, tooMany} {
		if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeBadOptions {
			t.Errorf("got %v", err)
		}
	}
	if names, err := b.conn.JS.Stream(t.Context(), "a"); err == nil {
		t.Errorf("a refused subscription made %v", names)
	}
}

// The bus may be closed while a consumer is being made.
func TestCloseWhileConsumersAreMade(t *testing.T) {
	t.Parallel()
	for range 20 {
		b := open(t, Config{})
		publishAll(t, b, "closing", numbers(3)...)
		var made []error
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				_, err := b.Consume(context.Background(), "closing", "g", SubscribeOptions{}, func(context.Context, *Delivery) error { return nil })
				made = append(made, err)
				if err != nil {
					return
				}
			}
		}()
		<-time.After(5 * time.Millisecond) // the moment under test
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		<-done
		if !slices.ContainsFunc(made, func(err error) bool { return err != nil }) {
			t.Error("a closed bus takes consumers")
		}
	}
}

// A delay beyond the bound is the bound: the server, and the hub's note for a restart, agree on it.
func TestTheDelayOfANackIsBounded(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "late", "1")
	k := take(t, b, "late", "g", SubscribeOptions{From: FromEarliest})
	d := k.next()
	if err := d.Nack("later", 1_000*time.Hour); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the delay is noted", func() bool {
		m, err := b.conn.LastBySubject(t.Context(), "KV_"+delaysBucket, "$KV."+delaysBucket+"."+d.eventKey())
		if err != nil {
			return false
		}
		until, err := strconv.ParseInt(string(m.Data), 10, 64)
		if left := time.Until(time.UnixMilli(until)); err != nil || left > maxAckTimeout || left < maxAckTimeout-wait {
			t.Errorf("it waits for %v, %v", left, err)
		}
		return true
	})
}
