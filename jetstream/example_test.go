package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
)

// openExample opens a bus with an embedded server of its own, and with rules for topics.
func openExample(rules ...jetstream.TopicRule) (bus *jetstream.Bus, end func()) {
	server, err := embedded.Start(context.Background(), embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err = jetstream.Open(context.Background(), jetstream.Config{Server: server, Topics: rules})
	if err != nil {
		panic(err)
	}
	return bus, func() { _ = bus.Close() }
}

// A program that publishes, consumes with four workers, has a failed event come again, and shuts
// down in order.
func Example() {
	bus, end := openExample() // jetstream.Open(ctx, jetstream.Config{URL: "nats://127.0.0.1:4222"})
	defer end()
	ctx := context.Background()

	var open sync.WaitGroup
	sub, err := bus.Consume(ctx, "orders", "mailer", jetstream.SubscribeOptions{Workers: 4}, func(_ context.Context, d *jetstream.Delivery) error {
		if string(d.Event.Payload) == "2" && d.Attempt == 1 {
			return errors.New("the mail server is busy") // the event comes again after a back-off
		}
		fmt.Printf("order %s, attempt %d\n", d.Event.Payload, d.Attempt)
		open.Done()
		return nil // the event is acknowledged
	})
	if err != nil {
		panic(err)
	}
	for i := range 4 {
		open.Add(1)
		if _, err := bus.Publish(ctx, "orders", fmt.Append(nil, i), jetstream.PublishOptions{}); err != nil {
			panic(err)
		}
	}
	open.Wait()
	if err := sub.Drain(ctx); err != nil { // the handlers that run finish
		panic(err)
	}
	// Unordered output:
	// order 0, attempt 1
	// order 1, attempt 1
	// order 3, attempt 1
	// order 2, attempt 2
}

// A Publisher keeps the order of its publishes without waiting for each.
func ExamplePublisher() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	pub := bus.NewPublisher()
	for i := range 3 {
		err := pub.PublishAsync(ctx, "log", fmt.Append(nil, i), jetstream.PublishOptions{}, func(r jetstream.Receipt, err error) {
			if err != nil {
				panic(err)
			}
			fmt.Println("stored as", r.Sequence)
		})
		if err != nil {
			panic(err)
		}
	}
	if err := pub.Flush(ctx); err != nil { // all are confirmed
		panic(err)
	}
	// Unordered output:
	// stored as 1
	// stored as 2
	// stored as 3
}

// The newest event of each key of a compacted topic.
func ExampleBus_Keys() {
	bus, end := openExample(jetstream.TopicRule{Pattern: "sensor.state", Compaction: true})
	defer end()
	ctx := context.Background()

	for _, degrees := range []string{"20", "21"} {
		if _, err := bus.Publish(ctx, "sensor.state", []byte(degrees), jetstream.PublishOptions{Key: "kitchen"}); err != nil {
			panic(err)
		}
	}
	e, err := bus.Keys("sensor.state").Get(ctx, "kitchen")
	if err != nil {
		panic(err)
	}
	fmt.Println(e.Key, string(e.Payload))
	_, err = bus.Keys("sensor.state").Get(ctx, "cellar")
	fmt.Println(errors.Is(err, jetstream.ErrNotFound))
	// Output:
	// kitchen 21
	// true
}

// State of one's own, replaced only by those who know what they replace.
func ExampleCollection() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	leaders, err := bus.Collections().Open(ctx, "leaders")
	if err != nil {
		panic(err)
	}
	// 0: nobody was there before
	if _, err := leaders.Put(ctx, "shard:1", []byte("me"), nil, 0); err != nil {
		panic(err)
	}
	_, err = leaders.Put(ctx, "shard:1", []byte("another"), nil, 0)
	fmt.Println(errors.Is(err, jetstream.ErrKeyChanged))
	// Output: true
}

// Settle by hand: take the lease, ask for more time, acknowledge.
func ExampleBus_Subscribe() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	deliveries := make(chan *jetstream.Held, 10)
	sub, err := bus.Subscribe(ctx, "jobs", "workers", jetstream.SubscribeOptions{MaxInFlight: 10, AckTimeout: 5 * time.Second},
		func(h *jetstream.Held) { deliveries <- h })
	if err != nil {
		panic(err)
	}
	if _, err := bus.Publish(ctx, "jobs", []byte(`"resize"`), jetstream.PublishOptions{}); err != nil {
		panic(err)
	}
	h := <-deliveries
	if d, ok := h.Begin(); ok {
		fmt.Println(string(d.Event.Payload), d.Extend(time.Minute), d.Ack(), errors.Is(d.Ack(), jetstream.ErrNotLeased))
	}
	if err := sub.Drain(ctx); err != nil {
		panic(err)
	}
	// Output: "resize" <nil> <nil> true
}

// An event that fails too often goes to the topic's dead letters.
func ExampleSubscribeOptions_deadLetter() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	letters := make(chan string, 1)
	_, err := bus.Consume(ctx, "dlq.jobs", "undertaker", jetstream.SubscribeOptions{}, func(_ context.Context, d *jetstream.Delivery) error {
		letters <- d.Event.Topic
		return nil
	})
	if err != nil {
		panic(err)
	}
	_, err = bus.Consume(ctx, "jobs", "workers", jetstream.SubscribeOptions{MaxAttempts: 2}, func(_ context.Context, d *jetstream.Delivery) error {
		fmt.Println("attempt", d.Attempt)
		return errors.New("no disk")
	})
	if err != nil {
		panic(err)
	}
	if _, err := bus.Publish(ctx, "jobs", []byte(`"resize"`), jetstream.PublishOptions{}); err != nil {
		panic(err)
	}
	fmt.Println(<-letters)
	// Output:
	// attempt 1
	// attempt 2
	// dlq.jobs
}

// Move a group back to the beginning, and read what is stored without a group.
func ExampleGroup_Seek() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	for i := range 3 {
		if _, err := bus.Publish(ctx, "log", fmt.Append(nil, i), jetstream.PublishOptions{}); err != nil {
			panic(err)
		}
	}
	if err := bus.Group("log", "reader").Seek(ctx, jetstream.FromEarliest); err != nil {
		panic(err)
	}
	err := bus.History("log").Scan(ctx, jetstream.ScanOptions{Limit: 2}, func(e *jetstream.Event) error {
		fmt.Println(string(e.Payload))
		return nil
	})
	if err != nil {
		panic(err)
	}
	// Output:
	// 0
	// 1
}

// List the newest events of all keys, a page at a time. A client may carry Next from one page to
// the next, through any hub.
func ExampleKeys_List() {
	bus, end := openExample(jetstream.TopicRule{Pattern: "settings", Compaction: true})
	defer end()
	ctx := context.Background()

	for _, key := range []string{"theme", "size", "font"} {
		if _, err := bus.Publish(ctx, "settings", []byte(`"some"`), jetstream.PublishOptions{Key: key}); err != nil {
			panic(err)
		}
	}
	keys := make(map[string]bool)
	for len(keys) < 3 { // what is listed may lag behind by milliseconds
		for next := ""; ; {
			page, err := bus.Keys("settings").List(ctx, jetstream.ListOptions{Next: next, Limit: 2})
			if err != nil {
				panic(err)
			}
			for _, e := range page.Events {
				keys[e.Key] = true
			}
			if next = page.Next; next == "" {
				break
			}
		}
	}
	fmt.Println(len(keys), "keys")
	// Output:
	// 3 keys
}
