package hubtest_test

import (
	"testing"

	"eventhub/facade/client"
	"eventhub/facade/hubtest"
)

// A test of a program that publishes to a hub: it gets a hub of its own, and looks at what came.
func ExampleNew() {
	placeOrder := func(url, token string) error { return nil } // the program that is tested

	_ = func(t *testing.T) { // func TestPlaceOrder(t *testing.T)
		hub := hubtest.New(t)
		events := make(chan client.Event, 10)
		_, err := hub.Dial(hub.Token).Subscribe(t.Context(), "orders.placed", "test", client.SubscribeOptions{From: "earliest"},
			func(e client.Event) { events <- e })
		if err != nil {
			t.Fatal(err)
		}
		if err := placeOrder(hub.WebSocket, hub.Token); err != nil {
			t.Fatal(err)
		}
		if e := <-events; e.Key != "customer:1" {
			t.Errorf("got an order of %s", e.Key)
		}
	}
}
