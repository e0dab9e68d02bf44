package shop_test

import (
	"context"
	"testing"
	"time"

	shop "eventhub/docs/examples/testing-go"
	"eventhub/facade/hubtest"
	eventhub "eventhub/sdk/go"
)

func TestAnOrderIsAnEvent(t *testing.T) {
	t.Parallel() // each test has a hub of its own
	hub := hubtest.New(t)
	c := hub.Connect(hub.Token)
	if err := shop.New(c).Place(t.Context(), 7, "ann"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	came := false
	for d, err := range c.Events(ctx, "orders.placed", "test", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
		if err != nil {
			t.Fatal(err)
		}
		if d.Key != "ann" || string(d.Payload) != `{"order":7}` {
			t.Errorf("got %s of %s", d.Payload, d.Key)
		}
		came = true
		break
	}
	if !came {
		t.Error("no event came")
	}
}

func TestAShopThatMayNotPublish(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Policy("visitor", "visitor-token", `{"rules":[{"effect":"allow","action":"subscribe","topics":["**"]}]}`))
	if err := shop.New(hub.Connect("visitor-token")).Place(t.Context(), 7, "ann"); err == nil {
		t.Error("a visitor places an order")
	}
}
