package wire_test

import (
	"slices"
	"testing"
	"time"

	"eventhub/facade/hubtest"
	"eventhub/sdk/go/wire"
)

// A member of an ordered group is told its slots before the first event, on each of its topics.
func TestOrderedGroup(t *testing.T) {
	hub := hubtest.New(t)
	c, err := wire.Dial(t.Context(), hub.WebSocket, wire.Options{Token: hub.Token})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	assigned, events := make(chan wire.Assignment, 10), make(chan wire.Event, 10)
	opts := wire.SubscribeOptions{Ordered: "key", Slots: 4, Topics: []string{"more"}, OnAssign: func(a wire.Assignment) { assigned <- a }}
	if _, err := c.Subscribe(t.Context(), "orders", "g", opts, func(e wire.Event) { events <- e }); err != nil {
		t.Fatal(err)
	}
	slots := make(map[string][]int)
	for len(slots["orders"]) < 4 || len(slots["more"]) < 4 {
		select {
		case a := <-assigned:
			if a.Group != "g" || a.Epoch == 0 {
				t.Fatalf("%+v", a)
			}
			slots[a.Topic] = a.Slots
		case <-time.After(20 * time.Second):
			t.Fatalf("the slots are %v", slots)
		}
	}
	for _, key := range []string{"a", ""} {
		if _, err := c.Publish(t.Context(), "more", []byte("1"), wire.PublishOptions{Key: key}); err != nil {
			t.Fatal(err)
		}
		select {
		case e := <-events:
			if has := slices.Contains(slots["more"], e.Partition); has != (key != "") || key == "" && e.Partition != -1 {
				t.Errorf("key %q has the partition %d", key, e.Partition)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("no event came")
		}
	}
}
