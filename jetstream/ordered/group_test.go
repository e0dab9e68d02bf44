package ordered_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/ordered"
)

func TestMain(m *testing.M) {
	natstest.RunChild(map[string]natstest.Role{memberRole: natstest.Told(func(ctx context.Context, m members) error { return m.run(ctx) })})
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// topic is the topic of all ordered groups here.
const topic = "orders"

// wait bounds what a test waits for.
const wait = 30 * time.Second

// startHub opens a bus with times that suit tests.
func startHub(tb testing.TB, url string) *jetstream.Bus {
	tb.Helper()
	return startHubWith(tb, url, 3*time.Second)
}

func startHubWith(tb testing.TB, url string, ackWait time.Duration, change ...func(*jetstream.Config)) *jetstream.Bus {
	tb.Helper()
	cfg := jetstream.Config{
		URL: url, AckWait: ackWait, OwnerLease: 2 * time.Second,
		Logger: slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, f := range change {
		f(&cfg)
	}
	b, err := jetstream.Open(context.Background(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

// hubs opens n buses on one server.
func hubs(tb testing.TB, n int) []*jetstream.Bus {
	tb.Helper()
	url := natstest.Run(tb).ClientURL()
	all := make([]*jetstream.Bus, n)
	for i := range all {
		all[i] = startHub(tb, url)
	}
	return all
}

// publishKeys publishes events 1 to each of every key, the keys in turn. Their payloads are their
// numbers.
func publishKeys(tb testing.TB, b *jetstream.Bus, keys, each int) {
	tb.Helper()
	publishTo(tb, b, topic, keys, each)
}

func publishTo(tb testing.TB, b *jetstream.Bus, topic string, keys, each int) {
	tb.Helper()
	p := b.NewPublisher()
	for n := 1; n <= each; n++ {
		for k := range keys {
			err := p.PublishAsync(tb.Context(), topic, []byte(strconv.Itoa(n)), jetstream.PublishOptions{Key: fmt.Sprintf("k%d", k)}, func(_ jetstream.Receipt, err error) {
				if err != nil {
					tb.Error(err)
				}
			})
			if err != nil {
				tb.Fatal(err)
			}
		}
	}
	if err := p.Flush(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

// orderBook checks what all members of an ordered group are given: no key is held by two, none is
// out of order, and nobody is given an event of a slot that it does not have.
type orderBook struct {
	tb    testing.TB
	total int
	done  chan struct{} // closed when all are settled

	mu       sync.Mutex
	holder   map[string]string // of each key
	last     map[string]int    // the newest event of each key that was settled
	settled  int
	again    int // deliveries of events that had been settled
	assigned map[string][]int
	epoch    uint64
}

func newOrderBook(tb testing.TB, total int) *orderBook {
	tb.Helper()
	return &orderBook{tb: tb, total: total, done: make(chan struct{}), holder: make(map[string]string), last: make(map[string]int), assigned: make(map[string][]int)}
}

// assign notes what a member is told.
func (o *orderBook) assign(member string) func(jetstream.Assignment) {
	return func(a jetstream.Assignment) {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.assigned[member] = slices.Clone(a.Slots)
		if a.Epoch == 0 {
			o.tb.Error("an assignment without an epoch")
		}
		o.epoch = max(o.epoch, a.Epoch)
	}
}

// begin notes that a member has begun an event.
func (o *orderBook) begin(member string, d *jetstream.Delivery) {
	n, _ := strconv.Atoi(string(d.Event.Payload))
	o.mu.Lock()
	defer o.mu.Unlock()
	key := d.Event.Key
	if other, held := o.holder[key]; held {
		o.tb.Errorf("%s is held by %s and by %s", key, other, member)
	}
	o.holder[key] = member
	switch last := o.last[key]; {
	case n <= last:
		o.again++
	case n > last+1:
		o.tb.Errorf("%s: event %d after %d", key, n, last)
	}
	if !d.Event.HasPartition || d.Event.Partition != ordered.Slot(key, ordered.DefaultSlots) {
		o.tb.Errorf("%s: partition %d", key, d.Event.Partition)
	}
	if !slices.Contains(o.assigned[member], d.Event.Partition) {
		o.tb.Errorf("%s was given an event of slot %d, and has %v", member, d.Event.Partition, o.assigned[member])
	}
}

// end notes that the member lets the event go, settled or not.
func (o *orderBook) end(d *jetstream.Delivery, settled bool) {
	n, _ := strconv.Atoi(string(d.Event.Payload))
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.holder, d.Event.Key)
	if settled && n == o.last[d.Event.Key]+1 {
		o.last[d.Event.Key] = n
		if o.settled++; o.settled == o.total {
			close(o.done)
		}
	}
}

// join has a member take part until it is stopped.
func (o *orderBook) join(b *jetstream.Bus, name string, refuse func(*jetstream.Delivery) bool) *jetstream.Subscription {
	o.tb.Helper()
	opts := jetstream.SubscribeOptions{OrderByKey: true, OnAssign: o.assign(name), Workers: 16, MaxInFlight: 50, From: jetstream.FromEarliest, MaxAttempts: jetstream.NeverGiveUp}
	s, err := b.Consume(o.tb.Context(), topic, "g", opts, func(_ context.Context, d *jetstream.Delivery) error {
		o.begin(name, d)
		if refuse != nil && refuse(d) {
			o.end(d, false)
			return d.Nack("again", 0)
		}
		o.end(d, true)
		return nil
	})
	if err != nil {
		o.tb.Fatal(err)
	}
	return s
}

func (o *orderBook) wait(d time.Duration) {
	o.tb.Helper()
	select {
	case <-o.done:
	case <-time.After(d):
		o.mu.Lock()
		defer o.mu.Unlock()
		o.tb.Fatalf("%d of %d events were settled", o.settled, o.total)
	}
}

// until waits until so many events are settled.
func (o *orderBook) until(settled int) {
	o.tb.Helper()
	deadline := time.Now().Add(wait)
	for {
		o.mu.Lock()
		now := o.settled
		o.mu.Unlock()
		if now >= settled {
			return
		}
		if time.Now().After(deadline) {
			o.tb.Fatalf("%d of %d events were settled", now, settled)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// sometimes refuses some first attempts.
func sometimes(d *jetstream.Delivery) bool { return d.Attempt == 1 && d.Event.Sequence%17 == 0 }

// settledAll waits until the server has nothing of the group left.
func settledAll(tb testing.TB, b *jetstream.Bus) {
	tb.Helper()
	deadline := time.Now().Add(wait)
	for {
		info, err := b.Group(topic, "g").Info(tb.Context())
		if err == nil && info.Pending == 0 && info.InFlight == 0 {
			return
		}
		if time.Now().After(deadline) {
			tb.Fatalf("the group is %+v, %v", info, err)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// TestGroup has members on one hub, and on three, one of which owns the group.
func TestGroup(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprintf("%d hubs", n), func(t *testing.T) {
			t.Parallel()
			all := hubs(t, n)
			publishKeys(t, all[0], 50, 20)
			book := newOrderBook(t, 1000)
			for i := range 6 {
				s := book.join(all[i%n], fmt.Sprintf("m%d", i), sometimes)
				defer func() { _ = s.Stop(context.Background()) }()
			}
			book.wait(wait)
			settledAll(t, all[0])
			book.mu.Lock()
			defer book.mu.Unlock()
			if book.again > 0 {
				t.Errorf("%d events came again after they were settled", book.again)
			}
		})
	}
}

// TestGroupMismatch joins an ordered group as another, and the other way round.
func TestGroupMismatch(t *testing.T) {
	t.Parallel()
	b := hubs(t, 1)[0]
	join := func(group string, opts jetstream.SubscribeOptions) error {
		s, err := b.Subscribe(t.Context(), topic, group, opts, func(*jetstream.Held) {})
		if err == nil {
			t.Cleanup(func() { _ = s.Stop(context.Background()) })
		}
		return err
	}
	if err := join("ordered", jetstream.SubscribeOptions{OrderByKey: true, Slots: 8}); err != nil {
		t.Fatal(err)
	}
	if err := join("plain", jetstream.SubscribeOptions{}); err != nil {
		t.Fatal(err)
	}
	for group, opts := range map[string]jetstream.SubscribeOptions{"ordered": {}, "plain": {OrderByKey: true}} {
		refused, ok := errors.AsType[*jetstream.Error](join(group, opts))
		if !ok || refused.Code != jetstream.CodeSubscribeFailed || !strings.Contains(refused.Msg, "ordered") {
			t.Errorf("%s: %v", group, refused)
		}
	}
	// the group has 8
	if err := join("ordered", jetstream.SubscribeOptions{OrderByKey: true, Slots: 99}); err != nil {
		t.Error(err)
	}
	for _, opts := range []jetstream.SubscribeOptions{{Slots: 3}, {OrderByKey: true, Slots: 1025}, {OrderByKey: true, Slots: -1}} {
		if refused, ok := errors.AsType[*jetstream.Error](join("new", opts)); !ok || refused.Code != jetstream.CodeBadOptions {
			t.Errorf("%d slots: %v", opts.Slots, refused)
		}
	}
}
