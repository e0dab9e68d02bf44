package native_test

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

// exampleHub stands for a hub: a bus with a NATS server that native clients reach.
func exampleHub() (url string, end func()) {
	ctx := context.Background()
	server, err := embedded.Start(ctx, embedded.Config{Listen: "127.0.0.1:0", Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: server, Topics: []topics.Rule{{Pattern: "orders.placed"}}})
	if err != nil {
		panic(err)
	}
	if _, err := bus.Admin().ApplyTopics(ctx, false); err != nil { // as a hub does when it starts
		panic(err)
	}
	return server.ClientURL(), func() { _ = bus.Close() }
}

// Publish natively, and consume as a member of a group that clients of the hub may share.
func Example() {
	url, end := exampleHub()
	defer end()
	nc, err := nats.Connect(url, nats.Token("s3cret"))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		panic(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	client := native.New(js)
	group, err := client.Group(ctx, "orders.placed", "mailer", native.GroupOptions{Workers: 4})
	if err != nil {
		panic(err)
	}
	if _, err := client.Publish(ctx, "orders.placed", []byte(`{"order":7}`), native.Fields{ID: "order-7", Key: "customer:1"}); err != nil {
		panic(err)
	}
	err = group.Consume(ctx, func(_ context.Context, d *native.Delivery) error {
		fmt.Println(d.Event.ID, d.Event.Key, string(d.Event.Payload), d.Attempt)
		stop()
		return nil // the event is acknowledged
	})
	fmt.Println(err)
	// Output:
	// order-7 customer:1 {"order":7} 1
	// <nil>
}

// The subject of a topic and a key, and back.
func ExampleSubject() {
	subject := native.Subject("orders.placed", "local:7")
	topic, key, _ := native.ParseSubject(subject)
	fmt.Println(subject, topic, key)
	fmt.Println(native.ObjectName("orders.placed"), native.BucketName("orders.placed"), native.KeyToken("local:7"))
	// Output:
	// keyed.local=3A7.orders.placed orders.placed local:7
	// orders=2Eplaced latest_orders_placed local=3A7
}
