package wire_test

import (
	"context"
	"fmt"
	"net/http/httptest"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/sdk/go/wire"
)

// Publish over the WebSocket, receive in a durable group, acknowledge.
func ExampleDial() {
	ctx := context.Background()
	url, end := hub(ctx, "s3cret")
	defer end()

	c, err := wire.Dial(ctx, url, wire.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	defer func() { _ = c.Close() }()

	done := make(chan struct{})
	_, err = c.Subscribe(ctx, "orders.placed", "mailer", wire.SubscribeOptions{}, func(e wire.Event) {
		fmt.Println(e.Key, string(e.Payload), e.Attempt, e.Ack())
		close(done)
	})
	if err != nil {
		panic(err)
	}
	if _, err := c.Publish(ctx, "orders.placed", []byte(`{"order":7}`), wire.PublishOptions{Key: "customer:1"}); err != nil {
		panic(err)
	}
	<-done
	// Output: customer:1 {"order":7} 1 <nil>
}

// hub runs a hub in this process, as cmd/eventhub does in its own.
func hub(ctx context.Context, token string) (url string, end func()) {
	nats, err := embedded.Start(ctx, embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: nats})
	if err != nil {
		panic(err)
	}
	server, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: facade.StaticToken(token)})
	if err != nil {
		panic(err)
	}
	listener := httptest.NewServer(server.WebSocket())
	return listener.URL, func() {
		_ = server.Close()
		listener.Close()
		_ = bus.Close()
	}
}
