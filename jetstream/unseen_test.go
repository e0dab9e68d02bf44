package jetstream

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// The long form:
//
//	go test ./jetstream -run TestWanderingUnseenCostsNoAttemptInACluster -wander.rounds 20
var wanderRounds = flag.Int("wander.rounds", 2, "rounds of TestWanderingUnseenCostsNoAttemptInACluster")

// Events wander unseen between inboxes that linger, a member that ends, and another hub of a
// cluster. Whoever has them first has attempt 1.
func TestWanderingUnseenCostsNoAttemptInACluster(t *testing.T) {
	t.Parallel()
	servers := natstest.StartCluster(t, 3)
	natstest.Look(t, natstest.URLs(servers)...).Replicating(3)
	a, b := open(t, Config{URL: servers[0].URL(), Replicas: 3}), open(t, Config{URL: servers[1].URL(), Replicas: 3})
	for round := range *wanderRounds {
		topic := fmt.Sprintf("wander-%d", round)
		publishAll(t, b, topic, "first")
		join := func() *Subscription {
			s, err := a.Subscribe(t.Context(), topic, "g", SubscribeOptions{}, ignore)
			if err != nil {
				t.Fatal(err)
			}
			return s
		}
		gone := join()                      // its pulls wait for 10 s
		<-time.After(20 * time.Millisecond) // its pulls are out
		if err := gone.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		last := join()
		<-time.After(20 * time.Millisecond) // its pulls are out
		const n = 20
		for i := range n {
			err := b.NewPublisher().PublishAsync(t.Context(), topic, fmt.Appendf(nil, "%d", i), PublishOptions{}, func(_ event.Receipt, err error) {
				if err != nil {
					t.Errorf("round %d: event %d: %v", round, i, err)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(rand.N(1500 * time.Microsecond)) // the moment under test
		if err := last.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		k := take(t, b, topic, "g", SubscribeOptions{})
		for range n {
			if d := k.next(); d.Attempt != 1 {
				t.Errorf("round %d: event %s is attempt %d; delivered %d times, %d spared", round, d.Event.Payload, d.Attempt, d.delivered, d.spared)
			}
		}
		_ = k.sub.Stop(t.Context())
	}
}

// An event that ends before it is known which attempt it is holds nothing back that arrived behind
// it.
func TestWhatEndsUnresolvedHoldsNothingBack(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "behind", "again")
	k := take(t, b, "behind", "g", SubscribeOptions{From: FromEarliest})
	k.next()
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.groups.resting.mu.Lock()
	clear(b.groups.resting.byKey) // as if another hub had had the event
	b.groups.resting.mu.Unlock()
	publishAll(t, b, "behind", "fresh", "fresh too")
	s, err := b.Subscribe(t.Context(), "behind", "g", SubscribeOptions{Paused: true}, func(h *Held) { k.ch <- h })
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Stop(t.Context()) }()
	release := blockReplies(t, s.link)
	s.Resume()
	eventually(t, "all have arrived", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.out) == 3
	})
	s.mu.Lock()
	head := s.parked[0]
	if head.resolved {
		t.Error("the event that comes again is resolved")
	}
	s.remove(head, event.Dropped)
	s.mu.Unlock()
	s.spare(head, false)
	release()
	for range 2 {
		k.next()
	}
}

// A consumer's leader may deliver an event before the stream's leader, another server, has applied
// it. Then it cannot be read yet, and its dead letter had no payload. One that was removed is not
// waited for.
func TestAnEventThatIsNotAppliedYetIsWaitedFor(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "early", "1", "2")
	topic, _, err := b.streams.FreshExisting(t.Context(), "early")
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		e, err := b.reads.BySequence(t.Context(), topic, 3)
		if err == nil && string(e.Payload) != "3" {
			err = fmt.Errorf("event 3 is %s", e.Payload)
		}
		read <- err
	}()
	<-time.After(50 * time.Millisecond) // the time under test
	publishAll(t, b, "early", "3")
	if err := <-read; err != nil {
		t.Error(err)
	}
	s, err := b.conn.JS.Stream(t.Context(), "early")
	if err == nil {
		err = s.DeleteMsg(t.Context(), 2)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.reads.BySequence(t.Context(), topic, 2); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("an event that was removed: %v", err)
	}
}
