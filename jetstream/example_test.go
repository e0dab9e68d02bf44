package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"eventhub/jetstream"
)

// openExample opens a bus with an embedded server in a directory of its own.
func openExample() (bus *jetstream.Bus, end func()) {
	dir, err := os.MkdirTemp("", "eventhub-example")
	if err != nil {
		panic(err)
	}
	bus, err = jetstream.Open(context.Background(), jetstream.Config{DataDir: dir})
	if err != nil {
		panic(err)
	}
	return bus, func() {
		_ = bus.Close()
		_ = os.RemoveAll(dir)
	}
}

// Publish an event, and work on it in a durable group: what the handler returns settles the event.
func ExampleBus_Consume() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	if _, err := bus.Publish(ctx, "orders.placed", []byte(`{"order":7}`), jetstream.PublishOptions{Key: "customer:1"}); err != nil {
		panic(err)
	}
	done := make(chan struct{})
	sub, err := bus.Consume(ctx, "orders.placed", "mailer", jetstream.SubscribeOptions{From: jetstream.FromEarliest, Workers: 4},
		func(_ context.Context, d *jetstream.Delivery) error {
			defer close(done)
			fmt.Printf("%s %s, attempt %d\n", d.Event.Key, d.Event.Payload, d.Attempt)
			return nil
		})
	if err != nil {
		panic(err)
	}
	<-done
	if err := sub.Stop(ctx); err != nil {
		panic(err)
	}
	// Output: customer:1 {"order":7}, attempt 1
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
