package jetstream

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// keeperOf waits for the owner of the group of a subscription, and returns it when it lends.
func keeperOf(t *testing.T, k *taker) *owner {
	t.Helper()
	o := k.sub.members[0].group.ordering
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		o.mu.Lock()
		w := o.own
		ready := w != nil && !w.gathering && len(w.places) > 0
		o.mu.Unlock()
		if ready {
			return w
		}
	}
	t.Fatal("no owner")
	return nil
}

// An event of an ordered group comes too late to be lent. It keeps its key until it comes again.
func TestALateDeliveryKeepsItsKey(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: 2 * time.Second, Connections: 1})
	k := take(t, b, "late", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true})
	w := keeperOf(t, k)
	g := w.group
	// The first delivery has waited on its way: a newer one came before the time in which it is
	// ours.
	g.mu.Lock()
	g.sent.marks = []sentMark{{order: 2, at: b.clock.Now() - int64(g.fence.usable)}}
	g.mu.Unlock()
	for _, payload := range []string{"1", "2"} {
		if _, err := b.Publish(t.Context(), "late", []byte(payload), PublishOptions{Key: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"1", "2"} {
		e := k.next()
		if string(e.Event.Payload) != want {
			t.Fatalf("event %s came, not %s", e.Event.Payload, want)
		}
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

// A request for a session that is repeated ends no session: its hub still holds events.
func TestARepeatedRequestEndsNoSession(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	a, b := open(t, Config{URL: url, Connections: 1}), open(t, Config{URL: url, Connections: 1})
	first := take(t, a, "asked", "g", SubscribeOptions{OrderByKey: true, Slots: 2})
	w := keeperOf(t, first)
	heard := make(chan *nats.Msg, 10)
	sub, err := a.conn.Links[0].NC.ChanSubscribe(hubInbox+a.handles.hub+hostSubject, heard)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := a.conn.Links[0].NC.Flush(); err != nil {
		t.Fatal(err)
	}
	_ = take(t, b, "asked", "g", SubscribeOptions{OrderByKey: true})
	var m *nats.Msg
	var was *guest
	for deadline := time.Now().Add(10 * time.Second); was == nil; <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no session")
		}
		select {
		case m = <-heard:
		default:
		}
		w.o.mu.Lock()
		was = w.guests[b.handles.hub]
		w.o.mu.Unlock()
	}
	for len(heard) > 0 {
		m = <-heard
	}
	if _, err := b.conn.Links[0].NC.Request(m.Subject, m.Data, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	if now := w.guests[b.handles.hub]; now != was || was.closed.Load() {
		t.Error("the session has ended")
	}
}

// An owner that begins anew, as after a lost connection, still keeps a refused event for its delay.
func TestADelayOutlivesACut(t *testing.T) {
	t.Parallel()
	const delay = 4 * time.Second
	b := open(t, Config{URL: natsServer(t), AckWait: 2 * time.Second, Connections: 1})
	k := take(t, b, "cut", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true})
	w := keeperOf(t, k)
	for _, payload := range []string{"1", "2"} {
		if _, err := b.Publish(t.Context(), "cut", []byte(payload), PublishOptions{Key: "a"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := k.next().Nack("later", delay); err != nil {
		t.Fatal(err)
	}
	at := time.Now()
	w.broke(brokenCut)
	for _, want := range []string{"1", "2"} {
		e := k.next()
		if string(e.Event.Payload) != want || time.Since(at) < delay-10*time.Millisecond {
			t.Fatalf("event %s came after %v, and not event %s", e.Event.Payload, time.Since(at), want)
		}
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

// A hub that shuts down while it waits for events that were on their way gives up its groups. The
// next owner waits as long as this one would have, and not until the lease of the hub has ended.
func TestAnOwnerThatWaitsGivesUp(t *testing.T) {
	t.Parallel()
	unlessStalled(t, func(log *slog.Logger) error { return giveUpWaiting(t, log) })
}

func giveUpWaiting(t *testing.T, log *slog.Logger) error {
	t.Helper()
	const ackWait = 3 * time.Second
	cfg := Config{URL: natsServer(t), AckWait: ackWait, Connections: 1, Logger: log}
	b, first := open(t, cfg), open(t, cfg)
	k := take(t, first, "quiet", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true})
	w := keeperOf(t, k)
	if _, err := b.Publish(t.Context(), "quiet", []byte("1"), PublishOptions{Key: "a"}); err != nil {
		t.Fatal(err)
	}
	_ = k.next()
	at := time.Now()
	w.broke(brokenCut)
	for waits := false; !waits; <-time.After(10 * time.Millisecond) {
		if time.Since(at) > ackWait/2 {
			return errors.New("the owner does not wait")
		}
		w.o.mu.Lock()
		waits = w.gathering
		w.o.mu.Unlock()
	}
	next := take(t, b, "quiet", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true})
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	next.next()
	if took := time.Since(at); took > ackWait+gatherMore {
		return fmt.Errorf("the event came again %v after its owner had begun to wait", took)
	}
	return nil
}
