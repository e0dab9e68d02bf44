package eventhub_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"

	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

// slotsOf are the slots of a member, as it was told.
type slotsOf struct {
	mu     sync.Mutex
	all    map[string][]int // by topic
	epochs map[string]uint64
	told   int
	stale  []string
}

// assign is for OnAssign.
func (s *slotsOf) assign(a eventhub.Assignment) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all, s.epochs = make(map[string][]int), make(map[string]uint64)
	}
	if a.Epoch <= s.epochs[a.Topic] {
		s.stale = append(s.stale, fmt.Sprintf("%s: epoch %d after %d", a.Topic, a.Epoch, s.epochs[a.Topic]))
	}
	s.all[a.Topic], s.epochs[a.Topic] = a.Slots, a.Epoch
	s.told++
}

func (s *slotsOf) of(topic string) []int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all[topic])
}

func (s *slotsOf) times() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told
}

// check reports epochs that did not rise.
func (s *slotsOf) check(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, what := range s.stale {
		t.Error(what)
	}
}

// publishOrdered publishes the numbers 1 to each of each key, in turn.
func publishOrdered(ctx context.Context, c *eventhub.Client, topic string, keys, each int) error {
	_, err := c.PublishMany(ctx, topic, func(yield func(eventhub.Outgoing) bool) {
		for n := range each {
			for key := range keys {
				if !yield(eventhub.Outgoing{Payload: n + 1, Options: eventhub.PublishOptions{Key: fmt.Sprint("key-", key)}}) {
					return
				}
			}
		}
	})
	return err
}

// Two members share the slots of an ordered group. Each key has one event at a time, in order and
// at the member that has its slot, also while one of them leaves.
func TestMembersOfAnOrderedGroup(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	topic := newTopic()
	const keys, each = 40, 20
	var mu sync.Mutex
	last, busy, wrong, done := make(map[string]int), make(map[string]bool), []string(nil), 0
	join := func() (*eventhub.Subscription, *slotsOf) {
		own := new(slotsOf)
		opts := eventhub.SubscribeOptions{Ordered: true, Slots: 32, OnAssign: own.assign, Concurrency: 16, From: eventhub.FromEarliest}
		s := subscribe(t, connect(t, hub.WebSocket, fast(hub.Token)), topic, "g", opts, func(_ context.Context, d *eventhub.Delivery) error {
			var n int
			if err := json.Unmarshal(d.Payload, &n); err != nil {
				return err
			}
			mu.Lock()
			if busy[d.Key] {
				wrong = append(wrong, fmt.Sprintf("two events of %s at a time", d.Key))
			}
			if !slices.Contains(own.of(topic), d.Partition) {
				wrong = append(wrong, fmt.Sprintf("%s of slot %d, which is not the member's", d.Key, d.Partition))
			}
			if n != last[d.Key]+1 {
				wrong = append(wrong, fmt.Sprintf("%s: %d after %d", d.Key, n, last[d.Key]))
			}
			busy[d.Key] = true
			mu.Unlock()
			mu.Lock()
			defer mu.Unlock()
			busy[d.Key] = false
			last[d.Key] = n
			done++
			return nil
		})
		return s, own
	}
	handled := func(n int) func() bool {
		return func() bool {
			mu.Lock()
			defer mu.Unlock()
			return done >= n
		}
	}
	first, ofFirst := join()
	_, ofSecond := join()
	eventually(t, "each member has slots, and all are with one", func() bool {
		a, b := ofFirst.of(topic), ofSecond.of(topic)
		all := slices.Sorted(slices.Values(append(a, b...)))
		return len(a) > 0 && len(b) > 0 && len(all) == 32 && len(slices.Compact(all)) == 32
	})
	publisher := connect(t, hub.WebSocket, fast(hub.Token))
	published := make(chan error, 1)
	go func() { published <- publishOrdered(t.Context(), publisher, topic, keys, each) }()
	eventually(t, "some events", handled(keys*2))
	if err := first.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other member has all slots", func() bool { return len(ofSecond.of(topic)) == 32 })
	if err := receive(t, "the answers", published); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all events", handled(keys*each))
	settled(t, hub, topic)
	mu.Lock()
	defer mu.Unlock()
	for _, what := range wrong {
		t.Error(what)
	}
	if done != keys*each {
		t.Errorf("%d events were handled, want %d", done, keys*each)
	}
	ofFirst.check(t)
	ofSecond.check(t)
}

// A member whose connection breaks is told its slots again. No event of a key is passed over: what
// comes is the event after the last one that was handled, or one that was handled before.
func TestAMemberOfAnOrderedGroupReconnects(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	c := connect(t, p.url, opts)
	topic := newTopic()
	const keys, each = 20, 50
	own := new(slotsOf)
	var mu sync.Mutex
	last, wrong := make(map[string]int), []string(nil)
	join := eventhub.SubscribeOptions{Ordered: true, Slots: 8, OnAssign: own.assign, Concurrency: 8, From: eventhub.FromEarliest, MaxAttempts: new(int)}
	subscribe(t, c, topic, "g", join, func(_ context.Context, d *eventhub.Delivery) error {
		var n int
		if err := json.Unmarshal(d.Payload, &n); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if n > last[d.Key]+1 {
			wrong = append(wrong, fmt.Sprintf("%s: %d after %d", d.Key, n, last[d.Key]))
		}
		last[d.Key] = max(last[d.Key], n)
		return nil
	})
	eventually(t, "the slots", func() bool { return len(own.of(topic)) == 8 })
	published := make(chan error, 1)
	publisher := connect(t, hub.WebSocket, fast(hub.Token))
	go func() { published <- publishOrdered(t.Context(), publisher, topic, keys, each) }()
	for range 3 {
		before := own.times()
		cutOnce(t, p, c, states)
		eventually(t, "the slots, again", func() bool { return own.times() > before && len(own.of(topic)) == 8 })
	}
	if err := receive(t, "the answers", published); err != nil {
		t.Fatal(err)
	}
	settled(t, hub, topic)
	mu.Lock()
	defer mu.Unlock()
	for _, what := range wrong {
		t.Error(what)
	}
	for key := range keys {
		if n := last[fmt.Sprint("key-", key)]; n != each {
			t.Errorf("the last event of key %d is %d, want %d", key, n, each)
		}
	}
	own.check(t)
}

// Whether a group is ordered is fixed when it is made. A member that says otherwise is refused at
// once, although other refusals of the same code are tried again.
func TestAnOrderedGroupStaysOne(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	topic := newTopic()
	handler := func(context.Context, *eventhub.Delivery) error { return nil }
	c := connect(t, hub.WebSocket, fast(hub.Token))
	subscribe(t, c, topic, "ordered", eventhub.SubscribeOptions{Ordered: true}, handler)
	subscribe(t, c, topic, "plain", eventhub.SubscribeOptions{}, handler)
	other := connect(t, hub.WebSocket, fast(hub.Token))
	_, err := other.Subscribe(t.Context(), topic, "ordered", eventhub.SubscribeOptions{}, handler)
	failsWith(t, err, "subscribe_failed", false)
	_, err = other.Subscribe(t.Context(), topic, "plain", eventhub.SubscribeOptions{Ordered: true}, handler)
	failsWith(t, err, "subscribe_failed", false)
}
