package eventhub_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topics"
	eventhub "eventhub/sdk/go"
)

// Order is the payload of the examples.
type Order struct {
	Number int    `json:"order"`
	Item   string `json:"item,omitempty"`
}

// Publish an event, and handle it in a durable group.
func Example() {
	ctx := context.Background()
	url, _, end := exampleHub(ctx)
	defer end()

	hub, err := eventhub.Connect(ctx, url, eventhub.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	done := make(chan struct{})
	_, err = hub.Subscribe(ctx, "orders.placed", "mailer", eventhub.SubscribeOptions{}, func(_ context.Context, d *eventhub.Delivery) error {
		defer close(done)
		var order Order
		if err := d.Decode(&order); err != nil {
			return err // refuses the event
		}
		fmt.Println("mail for order", order.Number, "of", d.Key)
		return nil // acknowledges the event
	})
	if err != nil {
		panic(err)
	}
	if _, err := hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{Key: "customer:1"}); err != nil {
		panic(err)
	}
	<-done
	fmt.Println(hub.Close())
	// Output:
	// mail for order 7 of customer:1
	// <nil>
}

// Publish many events, and read them in a loop. To ask for the next event acknowledges the one
// before.
func ExampleClient_Events() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	_, err := hub.PublishMany(ctx, "numbers", func(yield func(eventhub.Outgoing) bool) {
		for n := 1; n <= 1000; n++ {
			if !yield(eventhub.Outgoing{Payload: n}) {
				return
			}
		}
	})
	if err != nil {
		panic(err)
	}
	sum := 0
	for d, err := range hub.Events(ctx, "numbers", "adder", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
		if err != nil {
			panic(err)
		}
		var n int
		if err := d.Decode(&n); err != nil {
			panic(err)
		}
		if sum += n; n == 1000 {
			d.Ack()
			break // leaves the group; without the Ack, the event would be given back
		}
	}
	fmt.Println(sum)
	// Output: 500500
}

// Publish without waiting for each answer. PublishAsync waits only while the buffer is full.
func ExampleClient_PublishAsync() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	const n = 3
	answers := make(chan error, n)
	for i := range n {
		err := hub.PublishAsync(ctx, "numbers", i, eventhub.PublishOptions{}, func(_ string, err error) { answers <- err })
		if err != nil {
			panic(err)
		}
	}
	for range n {
		fmt.Println(<-answers)
	}
	// Output:
	// <nil>
	// <nil>
	// <nil>
}

// Decide by the code of an error, and by whether the same call may succeed later.
func ExampleError() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	_, err := hub.Publish(ctx, "orders..placed", Order{Number: 7}, eventhub.PublishOptions{})
	if failure, ok := errors.AsType[*eventhub.Error](err); ok {
		fmt.Println(failure.Code, failure.Retryable)
	}
	// Output: bad_topic false
}

// Topics with types: payloads are encoded and decoded, and those that do not fit are refused.
func ExampleTopicOf() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	orders := eventhub.TopicOf[Order](hub, "orders.placed")
	if _, err := orders.Publish(ctx, Order{Number: 7, Item: "lamp"}, eventhub.PublishOptions{}); err != nil {
		panic(err)
	}
	for m, err := range orders.Events(ctx, "packer", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
		if err != nil {
			panic(err)
		}
		fmt.Println("pack", m.Value.Item, "attempt", m.Attempt)
		m.Ack()
		break
	}
	// Output: pack lamp attempt 1
}

// Settle events by hand, and prolong the lease of one that takes long.
func ExampleDelivery_Nack() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	open := make(chan *eventhub.Delivery, 10)
	_, err := hub.Subscribe(ctx, "orders.placed", "checker", eventhub.SubscribeOptions{Manual: true}, func(_ context.Context, d *eventhub.Delivery) error {
		open <- d
		return nil // leaves the event open
	})
	if err != nil {
		panic(err)
	}
	if _, err := hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{}); err != nil {
		panic(err)
	}
	first := <-open
	fmt.Println(first.Attempt, first.Extend(time.Minute), first.Nack("the shop is closed", 0))
	second := <-open
	fmt.Println(second.Attempt, second.Ack())
	// Output:
	// 1 true true
	// 2 true
}

// Stop and start deliveries, finish what has begun, and leave.
func ExampleSubscription_Drain() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	sub, err := hub.Subscribe(ctx, "orders.placed", "mailer", eventhub.SubscribeOptions{Concurrency: 8}, func(context.Context, *eventhub.Delivery) error { return nil })
	if err != nil {
		panic(err)
	}
	fmt.Println(sub.Pause(ctx), sub.Resume(ctx), sub.Drain(ctx))
	// Output: <nil> <nil> <nil>
}

// Handle each event once, although it may be delivered again.
func ExampleDedupe() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	handled := make(chan string, 10)
	handler := eventhub.Dedupe(func(_ context.Context, d *eventhub.Delivery) error {
		handled <- "charged " + d.ID
		return nil
	}, &eventhub.MemoryStore{}, eventhub.DefaultRemember)
	if _, err := hub.Subscribe(ctx, "orders.placed", "billing", eventhub.SubscribeOptions{}, handler); err != nil {
		panic(err)
	}
	for range 2 { // the second is a repetition, and is not stored
		if _, err := hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{ID: "order-7"}); err != nil {
			panic(err)
		}
	}
	fmt.Println(<-handled)
	// Output: charged order-7
}

// A token that expires is renewed by a function. News of the connection and of groups go to
// functions, too.
func ExampleOptions() {
	ctx := context.Background()
	url, _, end := exampleHub(ctx)
	defer end()

	hub, err := eventhub.Connect(ctx, url, eventhub.Options{
		// asks a service
		TokenProvider: func(context.Context) (string, error) { return "s3cret", nil },
		OnState:       func(s eventhub.State, _ error) { fmt.Println(s) },
		OnNotice:      func(n eventhub.Notice) { fmt.Println(n.Code, n.Topic, n.Group) },
		OnError:       func(err error) { fmt.Println(err) },
	})
	if err != nil {
		panic(err)
	}
	_ = hub.Close()
	// Output:
	// token
	// opening
	// authenticating
	// ready
	// closed
}

// A handler that takes long: eight run at a time, and leases are prolonged for up to an hour.
func ExampleSubscribeOptions() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	done := make(chan int, 1)
	opts := eventhub.SubscribeOptions{Concurrency: 8, MaxLease: time.Hour}
	_, err := hub.Subscribe(ctx, "films.uploaded", "encoder", opts, func(ctx context.Context, d *eventhub.Delivery) error {
		if ctx.Err() != nil {
			return ctx.Err() // the lease is lost: another member handles the event
		}
		done <- d.Attempt
		return nil
	})
	if err != nil {
		panic(err)
	}
	if _, err := hub.Publish(ctx, "films.uploaded", "a film", eventhub.PublishOptions{}); err != nil {
		panic(err)
	}
	fmt.Println("encoded at attempt", <-done)
	// Output: encoded at attempt 1
}

// A context ends a subscription or a loop, and takes back a publish that was not sent.
func ExampleClient_Subscribe() {
	hub, end := exampleClient(context.Background())
	defer end()

	ctx, cancel := context.WithCancel(context.Background())
	sub, err := hub.Subscribe(ctx, "orders.placed", "mailer", eventhub.SubscribeOptions{}, func(context.Context, *eventhub.Delivery) error { return nil })
	if err != nil {
		panic(err)
	}
	cancel()
	<-sub.Done()
	_, err = hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{})
	fmt.Println(sub.Err(), errors.Is(err, context.Canceled))
	// Output: <nil> true
}

// New does not wait for a connection: what is published before waits in a bounded buffer, also
// after a break.
func ExampleNew() {
	ctx := context.Background()
	url, _, end := exampleHub(ctx)
	defer end()

	hub, err := eventhub.New(url, eventhub.Options{Token: "s3cret", BufferEvents: 100})
	if err != nil {
		panic(err)
	}
	_, err = hub.Publish(ctx, "orders.placed", Order{Number: 7}, eventhub.PublishOptions{})
	fmt.Println(err, hub.State(), hub.Close())
	// Output: <nil> ready <nil>
}

// Store an event later.
func ExampleClient_Publish() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	id, err := hub.Publish(ctx, "reminders", "drink water", eventhub.PublishOptions{ID: "r1", DelayMS: 10})
	if err != nil {
		panic(err)
	}
	for d, err := range hub.Events(ctx, "reminders", "me", eventhub.SubscribeOptions{From: eventhub.FromEarliest}) {
		if err != nil {
			panic(err)
		}
		fmt.Println(d.ID == id, string(d.Payload))
		d.Ack()
		break
	}
	// Output: true "drink water"
}

// Age is a payload that is checked.
type Age int

// Validate refuses what is no age.
func (a Age) Validate() error {
	if a < 0 {
		return errors.New("an age is not negative")
	}
	return nil
}

// Check payloads before they are sent and before they are handled, by a method of their type.
func ExampleTopic_Publish() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	_, err := eventhub.TopicOf[Age](hub, "ages").Publish(ctx, -1, eventhub.PublishOptions{})
	fmt.Println(err)
	// Output: invalid: invalid payload: an age is not negative
}

// Read the latest event of a key, those of all keys, and stored events, over HTTP and without a
// group.
func ExampleReader() {
	ctx := context.Background()
	url, http, end := exampleHub(ctx)
	defer end()
	hub, err := eventhub.Connect(ctx, url, eventhub.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	defer func() { _ = hub.Close() }()
	for _, state := range []string{"idle", "busy"} {
		if _, err := hub.Publish(ctx, "machine.state", state, eventhub.PublishOptions{Key: "m1"}); err != nil {
			panic(err)
		}
	}

	reader := eventhub.Reader{URL: http, Token: "s3cret"}
	latest, ok, err := reader.Latest(ctx, "machine.state", "m1")
	fmt.Println(string(latest.Payload), ok, err)
	for e, err := range reader.Replay(ctx, "machine.state", eventhub.ReplayOptions{Key: "m1"}) {
		fmt.Println(string(e.Payload), err)
	}
	// Output:
	// "busy" true <nil>
	// "idle" <nil>
	// "busy" <nil>
}

// Follow a topic live: each client that asks gets every event. Without History, only new events
// come. ConflateByKey and MinInterval suit a page that shows the newest values a few times a
// second.
func ExampleClient_Broadcast() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()
	for _, price := range []int{100, 101} {
		if _, err := hub.Publish(ctx, "prices", price, eventhub.PublishOptions{Key: "tea"}); err != nil {
			panic(err)
		}
	}

	done := make(chan struct{})
	_, err := hub.Broadcast(ctx, "prices", eventhub.BroadcastOptions{
		History: 2,
		OnGap:   func(g eventhub.Gap) { fmt.Println("missed", g.Missed) },
		OnReset: func(r eventhub.Reset) { fmt.Println("missed an unknown number:", r.Reason) },
	}, func(_ context.Context, e *eventhub.BroadcastEvent) {
		fmt.Println(e.Key, "costs", string(e.Payload))
		if string(e.Payload) == "102" {
			close(done)
		}
	})
	if err != nil {
		panic(err)
	}
	if _, err := hub.Publish(ctx, "prices", 102, eventhub.PublishOptions{Key: "tea"}); err != nil {
		panic(err)
	}
	<-done
	// Output:
	// tea costs 100
	// tea costs 101
	// tea costs 102
}

// Hold the present state of a compacted topic: its values, and then each change. After changes were
// missed, the values come again, and keys that are gone come as Deleted.
func ExampleClient_Watch() {
	ctx := context.Background()
	hub, end := exampleClient(ctx)
	defer end()

	current, done := make(chan struct{}, 1), make(chan struct{}, 1)
	state := map[string]string{}
	_, err := hub.Watch(ctx, "machine.state", eventhub.WatchOptions{
		OnCurrent: func() { current <- struct{}{} },
	}, func(_ context.Context, c *eventhub.Change) {
		if c.Deleted {
			delete(state, c.Key)
		} else {
			state[c.Key] = string(c.Payload)
		}
		fmt.Println(c.Key, "is", state[c.Key])
		done <- struct{}{}
	})
	if err != nil {
		panic(err)
	}
	<-current // state is what the topic has
	for _, opts := range []eventhub.PublishOptions{{Key: "m1"}, {Key: "m1", Tombstone: true}} {
		var payload any
		if !opts.Tombstone {
			payload = "busy"
		}
		if _, err := hub.Publish(ctx, "machine.state", payload, opts); err != nil {
			panic(err)
		}
		<-done // a slow handler gets the newest value of a key only
	}
	// Output:
	// m1 is "busy"
	// m1 is
}

// exampleClient is a client of a hub of its own.
func exampleClient(ctx context.Context) (c *eventhub.Client, end func()) {
	url, _, endHub := exampleHub(ctx)
	c, err := eventhub.Connect(ctx, url, eventhub.Options{Token: "s3cret"})
	if err != nil {
		panic(err)
	}
	return c, func() {
		_ = c.Close()
		endHub()
	}
}

// exampleHub runs a hub in this process, as cmd/eventhub does in its own. The token is s3cret.
func exampleHub(ctx context.Context) (url, http string, end func()) {
	nats, err := embedded.Start(ctx, embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err := jetstream.Open(ctx, jetstream.Config{Server: nats, Topics: []topics.Rule{{Pattern: "machine.state", Compaction: true}}})
	if err != nil {
		panic(err)
	}
	server, err := facade.New(facade.Config{Bus: facade.JetStream(bus), Auth: facade.StaticToken("s3cret")})
	if err != nil {
		panic(err)
	}
	ws, rest := httptest.NewServer(server.WebSocket()), httptest.NewServer(server.HTTP())
	return "ws" + ws.URL[len("http"):], rest.URL, func() {
		_ = server.Close()
		rest.CloseClientConnections()
		rest.Close()
		ws.Close()
		_ = bus.Close()
	}
}
