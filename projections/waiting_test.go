package projections

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"eventhub/jetstream"
)

// A member of the group holds an event of a key that it never hands out, while the projection gets
// an older event of the key that another member gave back, and then a newer one. The projection
// finds the event in between.
func TestEventThatWaitsAtAnotherMember(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	bus, other := openBus(t, jetstream.Config{URL: url}), openBus(t, jetstream.Config{URL: url})
	put(t, bus, topicCounts, "k", "1")
	put(t, bus, topicCounts, "k", "2")
	hold := func() *jetstream.Subscription {
		t.Helper()
		held := make(chan struct{})
		s, err := other.Subscribe(t.Context(), topicCounts, "counter", jetstream.SubscribeOptions{
			From: jetstream.FromEarliest, MaxInFlight: 1, BatchSize: 1,
		}, func(*jetstream.Held) { close(held) })
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-held:
		case <-time.After(patience):
			t.Fatal("the member gets no event")
		}
		return s
	}
	first, second := hold(), hold()
	run(t, JetStream(bus), Projection{From: jetstream.FromEarliest})
	state := func(want ...string) {
		t.Helper()
		poll(t, fmt.Sprintf("the state is one of %q", want), func() bool { return slices.Contains(want, viewed(t, JetStream(bus), "counter")["k"]) })
	}
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A hub that stood still, as it does on a slow machine, no longer holds what it had: then the
	// projection gets the event after AckWait.
	state("1 ", "1 2 ")
	put(t, bus, topicCounts, "k", "3")
	state("1 2 3 ")
	if err := second.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	workedOff(t, JetStream(bus), "counter")
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 2 3 "})
}
