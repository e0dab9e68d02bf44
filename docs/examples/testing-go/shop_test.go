package shop_test

import (
	"testing"
	"time"

	shop "eventhub/docs/examples/testing-go"
	"eventhub/facade/client"
	"eventhub/facade/hubtest"
)

func TestAnOrderIsAnEvent(t *testing.T) {
	t.Parallel() // each test has a hub of its own
	hub := hubtest.New(t)
	c := hub.Dial(hub.Token)
	events := make(chan client.Event, 10)
	if _, err := c.Subscribe(t.Context(), "orders.placed", "test", client.SubscribeOptions{From: "earliest"}, func(e client.Event) { events <- e }); err != nil {
		t.Fatal(err)
	}
	if err := shop.New(c).Place(t.Context(), 7, "ann"); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-events:
		if e.Key != "ann" || string(e.Payload) != `{"order":7}` {
			t.Errorf("got %s of %s", e.Payload, e.Key)
		}
	case <-time.After(10 * time.Second):
		t.Error("no event came")
	}
}

func TestAShopThatMayNotPublish(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Policy("visitor", "visitor-token", `{"rules":[{"effect":"allow","action":"subscribe","topics":["**"]}]}`))
	if err := shop.New(hub.Dial("visitor-token")).Place(t.Context(), 7, "ann"); err == nil {
		t.Error("a visitor places an order")
	}
}
