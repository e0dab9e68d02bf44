package jetstream_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topics"
)

// openExample opens a bus with an embedded server of its own, and with rules for topics.
func openExample(rules ...topics.Rule) (bus *jetstream.Bus, end func()) {
	server, err := embedded.Start(context.Background(), embedded.Config{}) // in memory
	if err != nil {
		panic(err)
	}
	bus, err = jetstream.Open(context.Background(), jetstream.Config{Server: server, Topics: rules, AckWait: 2 * time.Second})
	if err != nil {
		panic(err)
	}
	return bus, func() { _ = bus.Close() }
}

// Publish, and consume with four workers. An event whose handler fails comes again. Drain shuts the
// subscription down cleanly.
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
		err := pub.PublishAsync(ctx, "log", fmt.Append(nil, "line ", i), jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				panic(err)
			}
		})
		if err != nil {
			panic(err)
		}
	}
	if err := pub.Flush(ctx); err != nil { // all are confirmed
		panic(err)
	}
	err := bus.History("log").Scan(ctx, jetstream.ScanOptions{}, func(e *jetstream.Event) error {
		fmt.Println(e.Sequence, string(e.Payload))
		return nil
	})
	if err != nil {
		panic(err)
	}
	// Output:
	// 1 line 0
	// 2 line 1
	// 3 line 2
}

// The newest event of each key of a compacted topic.
func ExampleBus_Keys() {
	bus, end := openExample(topics.Rule{Pattern: "sensor.state", Compaction: true})
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
	fmt.Println("cellar is unknown:", errors.Is(err, jetstream.ErrNotFound))
	// Output:
	// kitchen 21
	// cellar is unknown: true
}

// Watch the newest events of a compacted topic: first all keys as they are, then each change.
func ExampleKeys_Watch() {
	bus, end := openExample(topics.Rule{Pattern: "sensor.state", Compaction: true})
	defer end()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	publish := func(key, degrees string) {
		if _, err := bus.Publish(ctx, "sensor.state", []byte(degrees), jetstream.PublishOptions{Key: key}); err != nil {
			panic(err)
		}
	}

	publish("kitchen", "20")
	err := bus.Keys("sensor.state").Watch(ctx, nil, func(e *jetstream.Event) error {
		if e == nil { // what follows are changes
			publish("cellar", "9")
			return nil
		}
		fmt.Printf("%s: %s degrees\n", e.Key, e.Payload)
		if e.Key == "cellar" {
			stop()
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// kitchen: 20 degrees
	// cellar: 9 degrees
	// context canceled
}

// Store your own state. A write succeeds only if its writer knows the current revision.
func ExampleCollection() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	leaders, err := bus.Collections().Open(ctx, "leaders")
	if err != nil {
		panic(err)
	}
	// revision 0: the entry must not exist yet
	revision, err := leaders.Put(ctx, "shard:1", []byte("ann"), nil, 0)
	if err != nil {
		panic(err)
	}
	_, err = leaders.Put(ctx, "shard:1", []byte("bob"), nil, 0)
	fmt.Println("bob is refused:", errors.Is(err, jetstream.ErrKeyChanged))
	if _, err := leaders.Put(ctx, "shard:1", []byte("carl"), nil, revision); err != nil {
		panic(err)
	}
	entry, err := leaders.Get(ctx, "shard:1")
	if err != nil {
		panic(err)
	}
	fmt.Println("the leader is", string(entry.Value))
	// Output:
	// bob is refused: true
	// the leader is carl
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
	held := <-deliveries
	d, ok := held.Begin() // false if the hub has taken the event back
	if !ok {
		panic("the delivery has ended")
	}
	fmt.Println("job", string(d.Event.Payload))
	if err := d.Extend(time.Minute); err != nil {
		panic(err)
	}
	if err := d.Ack(); err != nil {
		panic(err)
	}
	fmt.Println("settled already:", errors.Is(d.Ack(), jetstream.ErrNotLeased))
	if err := sub.Drain(ctx); err != nil {
		panic(err)
	}
	// Output:
	// job "resize"
	// settled already: true
}

// The members of an ordered group handle the events of a key one after the other, and those of many
// keys at once. One that fails blocks its key alone.
func ExampleSubscribeOptions_ordered() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	for n := range 3 {
		for _, key := range []string{"alice", "bob"} {
			if _, err := bus.Publish(ctx, "accounts", fmt.Append(nil, n), jetstream.PublishOptions{Key: key}); err != nil {
				panic(err)
			}
		}
	}
	var mu sync.Mutex
	balance := make(map[string]string)
	var open sync.WaitGroup
	open.Add(6)
	opts := jetstream.SubscribeOptions{
		OrderByKey: true, Slots: 16, Workers: 8, From: jetstream.FromEarliest,
		OnAssign: func(a jetstream.Assignment) { fmt.Println(len(a.Slots), "slots") },
	}
	sub, err := bus.Consume(ctx, "accounts", "ledger", opts, func(_ context.Context, d *jetstream.Delivery) error {
		if d.Attempt == 1 && d.Event.Key == "bob" && string(d.Event.Payload) == "1" {
			return errors.New("the ledger is busy") // the next event of bob waits for this one
		}
		mu.Lock()
		defer mu.Unlock()
		balance[d.Event.Key] += string(d.Event.Payload)
		open.Done()
		return nil
	})
	if err != nil {
		panic(err)
	}
	open.Wait()
	if err := sub.Drain(ctx); err != nil {
		panic(err)
	}
	fmt.Println(balance)
	// Output:
	// 16 slots
	// map[alice:012 bob:012]
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

// Learn how many events were removed before the group was given them. With OnFullReject in place of
// the default, the last publish would get topic_full instead.
func ExampleSubscribeOptions_lost() {
	bus, end := openExample(topics.Rule{Pattern: "ticks", MaxMsgs: 10})
	defer end()
	ctx := context.Background()

	if err := bus.Group("ticks", "slow").Seek(ctx, jetstream.FromEarliest); err != nil {
		panic(err)
	}
	for i := range 100 {
		if _, err := bus.Publish(ctx, "ticks", fmt.Append(nil, i), jetstream.PublishOptions{}); err != nil {
			panic(err)
		}
	}
	first := make(chan string, 10)
	_, err := bus.Consume(ctx, "ticks", "slow", jetstream.SubscribeOptions{
		OnLost: func(l jetstream.Loss) { fmt.Println("lost", l.Events, "events of", l.Topic) },
	}, func(_ context.Context, d *jetstream.Delivery) error {
		first <- string(d.Event.Payload)
		return nil
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("next:", <-first)
	// Output:
	// lost 90 events of ticks
	// next: 90
}

// Move a group back to the beginning, and read stored events without a group.
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

// Keep the position of a group before a risky change, and go back to it.
func ExampleGroup_Move() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	for i := range 3 {
		if _, err := bus.Publish(ctx, "orders", fmt.Append(nil, i), jetstream.PublishOptions{}); err != nil {
			panic(err)
		}
	}
	billing := bus.Group("orders", "billing")
	if err := billing.Seek(ctx, jetstream.FromEarliest); err != nil {
		panic(err)
	}
	if _, err := billing.Bookmarks().Put(ctx, "before the upgrade"); err != nil {
		panic(err)
	}
	if _, err := billing.Move(ctx, jetstream.FromLatest); err != nil {
		panic(err)
	}
	would, err := billing.Preview(ctx, jetstream.AtBookmark("before the upgrade"))
	if err != nil {
		panic(err)
	}
	fmt.Println("events again:", would.Redelivered)
	if _, err := billing.Move(ctx, jetstream.AtBookmark("before the upgrade")); err != nil {
		panic(err)
	}
	info, err := billing.Info(ctx)
	if err != nil {
		panic(err)
	}
	fmt.Println("pending:", info.Pending)
	// Output:
	// events again: 3
	// pending: 3
}

// List the newest events of all keys, page by page. A client may pass Next on to any hub.
func ExampleKeys_List() {
	bus, end := openExample(topics.Rule{Pattern: "settings", Compaction: true})
	defer end()
	ctx := context.Background()

	for _, key := range []string{"theme", "size", "font"} {
		if _, err := bus.Publish(ctx, "settings", []byte(`"some"`), jetstream.PublishOptions{Key: key}); err != nil {
			panic(err)
		}
	}
	keys := make(map[string]bool)
	for len(keys) < 3 { // a listing may lag behind by milliseconds
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

// Read what a topic holds, in order and without a group.
func ExampleHistory_Read() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()
	for i := range 4 {
		opts := jetstream.PublishOptions{ID: fmt.Sprint("order-", i), Key: fmt.Sprint("customer-", i%2)}
		if _, err := bus.Publish(ctx, "orders", fmt.Append(nil, i), opts); err != nil {
			panic(err)
		}
	}
	for e, err := range bus.History("orders").Read(ctx, jetstream.ReadOptions{From: jetstream.FromAfterID("order-0"), Key: "customer-1"}) {
		if err != nil {
			panic(err)
		}
		fmt.Printf("%s %s\n", e.ID, e.Payload)
	}
	// Output:
	// order-1 1
	// order-3 3
}

// List the dead letters of a topic, and put their events back to the group that failed.
func ExampleDeadLetters_Redrive() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()

	var mended atomic.Bool
	failed, done := make(chan struct{}), make(chan struct{})
	_, err := bus.Consume(ctx, "jobs", "workers", jetstream.SubscribeOptions{MaxAttempts: 1}, func(_ context.Context, d *jetstream.Delivery) error {
		if !mended.Load() {
			close(failed)
			return errors.New("no disk")
		}
		fmt.Printf("%s, attempt %d\n", d.Event.Payload, d.Attempt)
		close(done)
		return nil
	})
	if err != nil {
		panic(err)
	}
	if _, err := bus.Publish(ctx, "jobs", []byte(`"resize"`), jetstream.PublishOptions{}); err != nil {
		panic(err)
	}
	<-failed
	letters, jobs := bus.Admin().DeadLetters(), jetstream.LetterFilter{Topic: "jobs"}
	var page jetstream.LetterPage
	for len(page.Letters) == 0 { // it is stored a moment later
		if page, err = letters.List(ctx, jobs, "", 10, nil); err != nil {
			panic(err)
		}
	}
	fmt.Println(page.Letters[0].Group, "failed:", page.Letters[0].Reason)

	mended.Store(true) // the disk is replaced
	result, err := letters.Redrive(ctx, jobs, jetstream.RedriveOptions{})
	if err != nil {
		panic(err)
	}
	<-done
	fmt.Println("put back:", result.Done)
	// Output:
	// workers failed: no disk
	// "resize", attempt 1
	// put back: 1
}

// Remind customers of an order after a while, unless it is paid by then.
func ExamplePublisher_Cancel() {
	bus, end := openExample()
	defer end()
	ctx := context.Background()
	p := bus.NewPublisher()
	for i := range 2 {
		opts := jetstream.PublishOptions{ID: fmt.Sprint("remind-", i), Delay: 500 * time.Millisecond}
		if _, err := p.Publish(ctx, "orders.reminders", fmt.Append(nil, i), opts); err != nil {
			panic(err)
		}
	}
	// order 0 is paid
	if err := p.Cancel(ctx, "orders.reminders", "remind-0"); err != nil {
		panic(err)
	}
	reminders := make(chan string)
	sub, err := bus.Consume(ctx, "orders.reminders", "mailer", jetstream.SubscribeOptions{From: jetstream.FromEarliest}, func(_ context.Context, d *jetstream.Delivery) error {
		reminders <- d.Event.ID
		return nil
	})
	if err != nil {
		panic(err)
	}
	defer func() { _ = sub.Stop(ctx) }()
	fmt.Println(<-reminders)
	fmt.Println(p.Cancel(ctx, "orders.reminders", "remind-1"))
	// Output:
	// remind-1
	// jetstream: not found
}
