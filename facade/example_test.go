package facade_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"

	"eventhub/facade"
	"eventhub/facade/client"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
)

// A program that has a hub inside, beside what else it serves, on a mux of its own. In a program of
// its own http.ListenAndServe takes the place of httptest.
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
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, "the shop") })
	web := httptest.NewServer(mux)
	defer web.Close()

	c, err := client.Dial(ctx, "ws"+strings.TrimPrefix(web.URL, "http")+"/events", client.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Publish(ctx, "orders", []byte(`{"order":7}`), client.PublishOptions{}); err != nil {
		panic(err)
	}
	res, err := http.Get(web.URL) // the rest of the program is beside the hub
	if err != nil {
		panic(err)
	}
	fmt.Println(res.Status, res.Body.Close())
	// Output: 200 OK <nil>
}
