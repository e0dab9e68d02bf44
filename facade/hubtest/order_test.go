package hubtest_test

import (
	"context"
	"errors"
	"testing"

	"eventhub/facade/hubtest"
	"eventhub/sdk/go/wire"
)

// placeOrder stands for the program that is tested.
func placeOrder(ctx context.Context, url, token string) error {
	c, err := wire.Dial(ctx, url, wire.Options{Token: token})
	if err != nil {
		return err
	}
	_, err = c.Publish(ctx, "orders.placed", []byte("7"), wire.PublishOptions{Key: "ann"})
	return errors.Join(err, c.Close())
}

// A test of a program that publishes to a hub: the test has a hub of its own, and looks at what
// came.
func TestPlaceOrder(t *testing.T) {
	hub := hubtest.New(t)
	events := make(chan wire.Event, 10)
	_, err := hub.Dial(hub.Token).Subscribe(t.Context(), "orders.placed", "test", wire.SubscribeOptions{From: "earliest"},
		func(e wire.Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	if err := placeOrder(t.Context(), hub.WebSocket, hub.Token); err != nil {
		t.Fatal(err)
	}
	if e := <-events; e.Key != "ann" {
		t.Errorf("got an order of %s", e.Key)
	}
}
