package ordered_test

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// ownedBy has a hub own the group without taking an event: it has a member that is paused.
func ownedBy(tb testing.TB, b *jetstream.Bus, topic string) {
	tb.Helper()
	opts := jetstream.SubscribeOptions{OrderByKey: true, From: jetstream.FromEarliest, Paused: true}
	s, err := b.Subscribe(tb.Context(), topic, "g", opts, func(*jetstream.Held) {})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = s.Stop(context.Background()) })
	pulls := func() bool {
		info, err := b.Group(topic, "g").Info(tb.Context())
		return err == nil && info.InFlight > 0
	}
	for deadline := time.Now().Add(wait); !pulls(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			tb.Fatal("no hub owns the group")
		}
	}
}

// TestAcknowledgedAtAHandOver closes the hub that owns a group, while the members of another hub
// acknowledge events as fast as they can. An event whose acknowledgement was taken does not come
// again, although many are on their way to the owner.
func TestAcknowledgedAtAHandOver(t *testing.T) {
	t.Parallel()
	url := natstest.Run(t).ClientURL()
	stays := startHubWith(t, url, wait/3)
	for round := range 3 {
		topic := fmt.Sprint("acked", round)
		const keys, each = 200, 20
		publishTo(t, stays, topic, keys, each)
		owner := startHubWith(t, url, wait/3)
		ownedBy(t, owner, topic)
		var mu sync.Mutex
		acked, twice := make(map[uint64]bool), 0
		some, done := make(chan struct{}), make(chan struct{})
		opts := jetstream.SubscribeOptions{OrderByKey: true, From: jetstream.FromEarliest, MaxInFlight: keys}
		s, err := stays.Subscribe(t.Context(), topic, "g", opts, func(h *jetstream.Held) {
			d, ok := h.Begin()
			if !ok {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if acked[d.Event.Sequence] {
				twice++
			}
			if d.Ack() != nil || acked[d.Event.Sequence] {
				return
			}
			acked[d.Event.Sequence] = true
			switch len(acked) {
			case keys * each / 4:
				close(some)
			case keys * each:
				close(done)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []chan struct{}{some, done} {
			select {
			case <-c:
			case <-time.After(wait):
				t.Fatal("not all events came")
			}
			_ = owner.Close()
		}
		_ = s.Stop(context.Background())
		mu.Lock()
		if twice > 0 {
			t.Errorf("%d events came again that had been acknowledged", twice)
		}
		mu.Unlock()
	}
}

// TestDelayAtAHandOver refuses an event with a delay, and closes the hub that owns the group. The
// event comes to the member of another hub when the delay is over, and those of its key after it.
func TestDelayAtAHandOver(t *testing.T) {
	t.Parallel()
	for _, delay := range []time.Duration{500 * time.Millisecond, 3 * time.Second} {
		t.Run(delay.String(), func(t *testing.T) {
			t.Parallel()
			delayAtAHandOver(t, delay)
		})
	}
}

func delayAtAHandOver(t *testing.T, delay time.Duration) {
	t.Helper()
	url := natstest.Run(t).ClientURL()
	owner, stays := startHubWith(t, url, wait/3), startHubWith(t, url, wait/3)
	publishKeys(t, owner, 1, 3)
	refused := make(chan time.Time, 1)
	member := func(b *jetstream.Bus, f func(*jetstream.Delivery)) {
		opts := jetstream.SubscribeOptions{OrderByKey: true, From: jetstream.FromEarliest}
		s, err := b.Subscribe(t.Context(), topic, "g", opts, func(h *jetstream.Held) {
			if d, ok := h.Begin(); ok {
				f(d)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Stop(context.Background()) })
	}
	member(owner, func(d *jetstream.Delivery) {
		if err := d.Nack("later", delay); err != nil {
			t.Error(err)
		}
		refused <- time.Now()
	})
	var at time.Time
	select {
	case at = <-refused:
	case <-time.After(wait):
		t.Fatal("no event came")
	}
	got := make(chan *jetstream.Delivery, 10)
	member(stays, func(d *jetstream.Delivery) { got <- d })
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 3; n++ {
		select {
		case d := <-got:
			attempt := 1
			if n == 1 {
				attempt = 2
			}
			if string(d.Event.Payload) != strconv.Itoa(n) || d.Attempt != attempt || time.Since(at) < delay-10*time.Millisecond {
				t.Fatalf("event %s, attempt %d, came %v after the refusal", d.Event.Payload, d.Attempt, time.Since(at))
			}
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		case <-time.After(wait):
			t.Fatalf("event %d did not come", n)
		}
	}
}

// TestOneConsumerAGroup has members of many ordered groups on two hubs: each group is one consumer.
func TestOneConsumerAGroup(t *testing.T) {
	t.Parallel()
	const groups = 20
	srv := natstest.Run(t)
	a, b := startHub(t, srv.ClientURL()), startHub(t, srv.ClientURL())
	publishKeys(t, a, 4, 1)
	got := make(chan struct{}, 4*groups)
	for i := range groups {
		for _, hub := range []*jetstream.Bus{a, b} {
			opts := jetstream.SubscribeOptions{OrderByKey: true, From: jetstream.FromEarliest}
			s, err := hub.Subscribe(t.Context(), topic, "g"+strconv.Itoa(i), opts, func(h *jetstream.Held) {
				if d, ok := h.Begin(); ok && d.Ack() == nil {
					got <- struct{}{}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = s.Stop(context.Background()) })
		}
	}
	for n := range cap(got) {
		select {
		case <-got:
		case <-time.After(wait):
			t.Fatalf("%d of %d events came", n, cap(got))
		}
	}
	nc, err := nats.Connect(srv.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	if n := stream.CachedInfo().State.Consumers; n != groups {
		t.Errorf("%d groups have %d consumers", groups, n)
	}
}
