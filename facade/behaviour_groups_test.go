package facade_test

import (
	"context"
	"encoding/json"
	"flag"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

const splitEvents = 3_000

// dyingStep is smaller for the long form.
var dyingStep = flag.Int("dying.step", 300, "by how many bytes more of what a hub sends it dies each time, while it makes a group")

func TestMembersOnTwoConnectionsSplitTheEvents(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t), unthrottled)
	splitBetween(t, hub, hub)
}

func TestMembersOnTwoHubsSplitTheEvents(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	splitBetween(t, a, b)
}

// splitBetween gives a group one member on each hub, and each event to exactly one of them.
func splitBetween(t *testing.T, a, b *testHub) {
	t.Helper()
	topic := freshTopic()
	var (
		mu    sync.Mutex
		seen  [2][splitEvents]int
		total int
		done  = make(chan struct{})
	)
	member := func(i int) func(wire.Event) {
		return func(e wire.Event) {
			n, err := strconv.Atoi(string(e.Payload))
			if err != nil || e.Attempt != 1 {
				t.Errorf("event %s, attempt %d: %v", e.Payload, e.Attempt, err)
				return
			}
			mu.Lock()
			seen[i][n]++
			if total++; total == splitEvents {
				close(done)
			}
			mu.Unlock()
			if err := e.Ack(); err != nil {
				t.Error(err)
			}
		}
	}
	var subs []*wire.Subscription
	for i, hub := range []*testHub{a, b} {
		c := hub.dial()
		sub, err := c.Subscribe(t.Context(), topic, "g", wire.SubscribeOptions{}, member(i))
		if err != nil {
			t.Fatal(err)
		}
		subs = append(subs, sub)
	}
	publishMany(t, a, topic, splitEvents)
	select {
	case <-done:
	case <-time.After(2 * waitLimit):
		t.Fatalf("%d of %d events came", total, splitEvents)
	}
	// An UNSUBSCRIBE that was answered ends the counting: nothing is delivered behind it.
	for _, sub := range subs {
		if err := sub.Unsubscribe(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	var share [2]int
	for n := range splitEvents {
		if times := seen[0][n] + seen[1][n]; times != 1 {
			t.Errorf("event %d came %d times", n, times)
		}
		share[0] += seen[0][n]
		share[1] += seen[1][n]
	}
	if share[0] == 0 || share[1] == 0 {
		t.Errorf("the members got %v: no split", share)
	}
}

// publishMany publishes the numbers from 0, pipelined, and returns when all are stored.
func publishMany(t *testing.T, hub *testHub, topic string, n int) {
	t.Helper()
	c := hub.dial()
	var wg sync.WaitGroup
	for i := range n {
		wg.Add(1)
		err := c.PublishAsync(topic, strconv.AppendInt(nil, int64(i), 10), wire.PublishOptions{}, func(_ string, err error) {
			if err != nil {
				t.Error(err)
			}
			wg.Done()
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

// A connection that is lost gives its leases to the other member at once, not after a timeout.
func TestDisconnectGivesLeasesToTheOtherMember(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, test := range []struct {
		name  string
		other *testHub
	}{{"on the same hub", a}, {"on another hub", b}} {
		t.Run(test.name, func(t *testing.T) {
			topic := freshTopic()
			lost := a.dial()
			first := a.subscribe(lost, topic, "g", wire.SubscribeOptions{})
			publishMany(t, a, topic, 100)
			first.take(100)
			second := test.other.subscribe(test.other.dial(), topic, "g", wire.SubscribeOptions{})
			second.empty()

			start := time.Now()
			lost.Abort()
			got := second.take(100)
			// Half a lease; a back-off is 50 ms.
			if took := time.Since(start); took > 15*time.Second {
				t.Errorf("it took %v", took)
			}
			seen := map[string]bool{}
			for _, e := range got {
				if seen[string(e.Payload)] || e.Attempt != 2 {
					t.Errorf("event %s, attempt %d", e.Payload, e.Attempt)
				}
				seen[string(e.Payload)] = true
			}
			second.ack(got...)
			a.publish(a.dial(), topic, `"marker"`)
			if e := second.next(); string(e.Payload) != `"marker"` {
				t.Errorf("instead of the marker came %s", e.Payload)
			}
		})
	}
}

// deadLetter is the payload of an event on dlq.<topic>.
type deadLetter struct {
	Topic    string `json:"topic"`
	Group    string `json:"group"`
	Original struct {
		ID      string          `json:"id"`
		Payload json.RawMessage `json:"payload"`
	} `json:"original"`
	Err      string `json:"err"`
	TS       int64  `json:"ts"`
	Attempts int    `json:"attempts"`
}

// Every way in which a delivery fails counts; at maxAttempts the event is dead-lettered once, and
// the group moves on.
func TestMaxAttempts(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	for _, test := range []struct {
		name, reason string
		fail         func(t *testing.T, in *inbox, e wire.Event) (next *inbox)
	}{
		{"NACK", "no good", func(t *testing.T, in *inbox, e wire.Event) *inbox {
			t.Helper()
			if err := e.NackWait(t.Context(), "no good", wire.DefaultBackoff); err != nil {
				t.Fatal(err)
			}
			return in
		}},
		{"expiry", "lease expired", func(_ *testing.T, in *inbox, _ wire.Event) *inbox { return in }},
		{"lost connection", "connection lost", nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			topic := freshTopic()
			three := 3
			opts := wire.SubscribeOptions{MaxAttempts: &three, AckTimeoutMS: 1000}
			if test.name != "expiry" {
				opts.AckTimeoutMS = 30_000
			}
			conn := hub.dial()
			in := hub.subscribe(conn, topic, "g", opts)
			watch := hub.dial()
			dead := hub.subscribe(watch, "dlq."+topic, "d", wire.SubscribeOptions{From: "earliest"})
			other := hub.subscribe(watch, topic, "other", wire.SubscribeOptions{})

			id := hub.publish(watch, topic, `{"bad":1}`)
			for attempt := 1; attempt <= 3; attempt++ {
				e := in.next()
				if e.ID != id || e.Attempt != attempt {
					t.Fatalf("delivery %d is %s, attempt %d", attempt, e.ID, e.Attempt)
				}
				if test.fail != nil {
					in = test.fail(t, in, e)
					continue
				}
				conn.Abort()
				conn = hub.dial()
				in = hub.subscribe(conn, topic, "g", opts)
			}
			e := dead.next()
			var letter deadLetter
			if err := json.Unmarshal(e.Payload, &letter); err != nil {
				t.Fatal(err)
			}
			if letter.Topic != topic || letter.Group != "g" || letter.Original.ID != id || letter.Err != test.reason ||
				letter.Attempts != 3 || string(letter.Original.Payload) != `{"bad":1}` || e.Topic != "dlq."+topic {
				t.Errorf("dead letter %s", e.Record)
			}

			// The group moves on, the other group was not touched, and there is no second dead
			// letter.
			hub.publish(watch, topic, `"marker"`)
			if e := in.next(); string(e.Payload) != `"marker"` || e.Attempt != 1 {
				t.Errorf("the group got %s, attempt %d", e.Payload, e.Attempt)
			}
			in.empty()
			if got := payloads(other.take(2)); got != `{"bad":1} "marker"` {
				t.Errorf("the other group got %s", got)
			}
			dead.ack(e)
			hub.publish(watch, "dlq."+topic, `"marker"`)
			if e := dead.next(); string(e.Payload) != `"marker"` {
				t.Errorf("a second dead letter: %s", e.Payload)
			}
		})
	}
}

// UNSUBSCRIBE and a drained hub give events back: even with maxAttempts 1 nothing is dead-lettered.
func TestGivingBackIsNoFailure(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	topic := freshTopic()
	one := 1
	opts := wire.SubscribeOptions{MaxAttempts: &one}
	watch := b.dial()
	dead := b.subscribe(watch, "dlq."+topic, "d", wire.SubscribeOptions{From: "earliest"})

	first := a.dial()
	in := a.subscribe(first, topic, "g", opts)
	publishMany(t, b, topic, 20)
	in.take(20)
	if err := in.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	in = a.subscribe(first, topic, "g", opts)
	for _, e := range in.take(20) {
		if e.Attempt != 2 {
			t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
	if err := a.server.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-first.Done()
	if closed, ok := first.Err().(*wire.CloseError); !ok || !closed.Reconnect() || closed.Reason != "draining" { //nolint:errorlint // this exact error
		t.Errorf("the drained hub ended the connection with %v", first.Err())
	}
	in = b.subscribe(watch, topic, "g", opts)
	got := in.take(20)
	for _, e := range got {
		if e.Attempt != 3 {
			t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
	in.ack(got...)
	b.publish(watch, topic, `"marker"`)
	if e := in.next(); string(e.Payload) != `"marker"` {
		t.Errorf("instead of the marker came %s", e.Payload)
	}
	b.publish(watch, "dlq."+topic, `"marker"`)
	if e := dead.next(); string(e.Payload) != `"marker"` {
		t.Errorf("a dead letter: %s", e.Payload)
	}
}

// A group with a TTL disappears when it had no member for that long, and not before.
func TestGroupTTL(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	opts := wire.SubscribeOptions{From: "earliest", GroupTTLMS: 1000}
	hub.publish(c, topic, "1")
	in := hub.subscribe(c, topic, "tab", opts)
	in.ack(in.next())
	in.quiet(2 * time.Second) // twice the TTL, with a member: the group must stay
	if err := in.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	in = hub.subscribe(c, topic, "tab", opts)
	hub.publish(c, topic, "2")
	if e := in.next(); string(e.Payload) != "2" {
		t.Fatalf("the group was gone while it had a member: it got %s", e.Payload)
	} else {
		in.ack(e) // the server keeps a group that has un-acked events for its AckWait longer
	}
	if err := in.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone := func() bool {
		_, err := hub.bus.Group(topic, "tab").Cursor(t.Context())
		return err != nil
	}
	waitUntil(t, "the group is gone", gone)
	in = hub.subscribe(c, topic, "tab", opts)
	if got := payloads(in.take(2)); got != "1 2" {
		t.Errorf("the new group got %s", got)
	}
}

// waitUntil polls for a state that nothing tells of.
func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(waitLimit)
	for !done() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("within %v this did not come: %s", waitLimit, what)
		}
	}
}

// Two hubs make one new group at the same instant, from different starts: the group has one start,
// and all members share it.
func TestTwoHubsMakeOneGroup(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	ca, cb := a.dial(), b.dial()
	for round := range 6 {
		topic := freshTopic()
		for i := range 5 {
			a.publish(ca, topic, strconv.Itoa(i))
		}
		var wg sync.WaitGroup
		inboxes := [2]*inbox{}
		wg.Go(func() { inboxes[0] = a.subscribe(ca, topic, "g", wire.SubscribeOptions{From: "earliest"}) })
		wg.Go(func() { inboxes[1] = b.subscribe(cb, topic, "g", wire.SubscribeOptions{From: "latest"}) })
		wg.Wait()
		if inboxes[0] == nil || inboxes[1] == nil {
			t.Fatal("a member could not join")
		}
		for i := range 5 {
			a.publish(ca, topic, strconv.Itoa(100+i))
		}
		seen := map[string]int{}
		for !all(seen, 100, 105) {
			select {
			case e := <-inboxes[0].events:
				seen[string(e.Payload)] += e.Attempt
			case e := <-inboxes[1].events:
				seen[string(e.Payload)] += e.Attempt
			case <-time.After(waitLimit):
				t.Fatalf("round %d: only %v came", round, seen)
			}
		}
		// Old events come before new ones, so by now the group has shown where it started.
		if len(seen) != 5 && len(seen) != 10 {
			waitUntil(t, "all of the old events, once one came", func() bool {
				select {
				case e := <-inboxes[0].events:
					seen[string(e.Payload)] += e.Attempt
				case e := <-inboxes[1].events:
					seen[string(e.Payload)] += e.Attempt
				default:
				}
				return len(seen) == 10
			})
		}
		for payload, times := range seen {
			if times != 1 {
				t.Errorf("round %d: event %s came %d times", round, payload, times)
			}
		}
	}
}

func all(seen map[string]int, from, to int) bool {
	for i := from; i < to; i++ {
		if seen[strconv.Itoa(i)] == 0 {
			return false
		}
	}
	return true
}

// A hub that dies while it makes a group leaves a group that works, or none.
func TestHubDiesWhileItMakesAGroup(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	alive := startHub(t, openBus(t, at(url)))
	c := alive.dial()
	proxy := newTCPProxy(t, url)
	starts := map[int]int{} // how many events each group got
	for bytes := 0; bytes <= 2400; bytes += *dyingStep {
		topic := freshTopic()
		for i := range 5 {
			alive.publish(c, topic, strconv.Itoa(i))
		}
		dying, err := jetstream.Open(t.Context(), jetstream.Config{URL: proxy.url()})
		if err != nil {
			t.Fatal(err)
		}
		proxy.freezeAfter(bytes)
		joining := make(chan error, 1)
		ctx, die := context.WithCancel(t.Context())
		go func() {
			_, err := dying.Subscribe(ctx, topic, "g", jetstream.SubscribeOptions{From: jetstream.FromEarliest, Paused: true}, func(*jetstream.Held) {})
			joining <- err
		}()
		if bytes/(*dyingStep)%2 == 0 { // otherwise both at the same time
			waitUntil(t, "the dying hub is through or stuck", func() bool { return proxy.spent() || len(joining) > 0 })
		}
		in := alive.subscribe(c, topic, "g", wire.SubscribeOptions{From: "latest"})
		alive.publish(c, topic, `"marker"`)
		var got []string
		for len(got) == 0 || got[len(got)-1] != `"marker"` {
			e := in.next()
			got = append(got, string(e.Payload))
			in.ack(e)
		}
		if len(got) != 1 && len(got) != 6 {
			t.Errorf("cut after %d bytes: the group got %v", bytes, got)
		}
		starts[len(got)]++
		proxy.cut()
		die()
		<-joining
		proxy.heal()
		waitUntil(t, "the connection is back", func() bool { return ready(t, dying) })
		if err := dying.Close(); err != nil {
			t.Error(err)
		}
	}
	if starts[1] == 0 || starts[6] == 0 {
		t.Errorf("the group always started at the same place: %v", starts)
	}
}

// ready asks a bus without patience: a request that is lost with its connection is never answered.
func ready(t *testing.T, bus *jetstream.Bus) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	return bus.Ready(ctx) == nil
}
