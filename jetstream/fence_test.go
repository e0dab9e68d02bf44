package jetstream

import (
	"testing"
	"time"
)

// A hub that does not hear of a seek gives no lease of the time before it, once the seek was
// answered.
func TestNoLeaseOfBeforeASeek(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := openRemote(t, Config{URL: url}), openRemote(t, Config{URL: url})
	k := &taker{t: t, group: two.Group("deaf", "g"), ch: make(chan *Held, 10)}
	var err error
	// all that may be held is, so that no pull waits, which would tell of the seek
	k.sub, err = two.Subscribe(t.Context(), "deaf", "g", SubscribeOptions{MaxInFlight: 4, BatchSize: 4}, func(h *Held) { k.ch <- h })
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, one, "deaf", numbers(4)...)
	held := []*Held{<-k.ch, <-k.ch, <-k.ch, <-k.ch}
	two.subscriptions.mu.Lock() // who watches the generations cannot tell the subscriptions
	err = one.Group("deaf", "g").Seek(t.Context(), FromLatest)
	for _, h := range held {
		if _, ok := h.Begin(); ok {
			t.Errorf("event %d was leased after the seek", h.Event.Sequence)
		}
	}
	two.subscriptions.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, one, "deaf", "5")
	if got := k.payloads(1); got[0] != "5" {
		t.Errorf("got %q", got)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

// An event that is not taken for long can be begun all the same, as long as its consumer answers.
func TestAnEventThatWaitedIsBegun(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "patient", "1")
	k := take(t, b, "patient", "g", SubscribeOptions{From: FromEarliest})
	h := <-k.ch
	<-time.After(freshLimit + time.Second)
	d, ok := h.Begin()
	if !ok {
		t.Fatal("the event was lost")
	}
	if d.Attempt != 1 || d.Ack() != nil {
		t.Errorf("attempt %d", d.Attempt)
	}
}
