package facade_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/sdk/go/wire"
)

// A program serves a hub beside its own pages, on its own mux. A real program uses
// http.ListenAndServe instead of httptest.
func Example() {
	ctx := context.Background()
	nats, err := embedded.Start(ctx, embedded.Config{}) // in memory; or use jetstream.Config.URL
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: nats})
	if err != nil {
		panic(err)
	}
	defer func() { _ = bus.Close() }()
	hub, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: facade.StaticToken("s3cret")})
	if err != nil {
		panic(err)
	}
	defer func() { _ = hub.Close() }()

	mux := http.NewServeMux()
	mux.Handle("/events", hub.WebSocket())
	mux.Handle("/api/", http.StripPrefix("/api", hub.HTTP()))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "Welcome to the shop.") })
	web := httptest.NewServer(mux)
	defer web.Close()

	c, err := wire.Dial(ctx, "ws"+strings.TrimPrefix(web.URL, "http")+"/events", wire.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	defer func() { _ = c.Close() }()
	received := make(chan string)
	_, err = c.Subscribe(ctx, "orders", "printer", wire.SubscribeOptions{}, func(e wire.Event) {
		_ = e.Ack()
		received <- string(e.Payload)
	})
	if err != nil {
		panic(err)
	}
	if _, err := c.Publish(ctx, "orders", []byte(`{"order":7}`), wire.PublishOptions{}); err != nil {
		panic(err)
	}
	fmt.Println("the hub:", <-received)

	res, err := http.Get(web.URL) // the program's own pages are beside the hub
	if err != nil {
		panic(err)
	}
	defer func() { _ = res.Body.Close() }()
	page, err := io.ReadAll(res.Body)
	if err != nil {
		panic(err)
	}
	fmt.Println("the program:", string(page))
	// Output:
	// the hub: {"order":7}
	// the program: Welcome to the shop.
}
