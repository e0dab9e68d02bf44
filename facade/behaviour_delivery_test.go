package facade_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
	"eventhub/sdk/go/wire"
)

// A handler that takes longer than a poll makes nothing come twice: there is no poll, there are
// leases.
func TestSlowHandlerGetsEachEventOnce(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	in := hub.subscribe(c, topic, "slow", wire.SubscribeOptions{})
	for i := range 5 {
		hub.publish(c, topic, strconv.Itoa(i))
	}
	got := in.take(5)
	in.quiet(500 * time.Millisecond) // ten polls of the notes' bus
	in.ack(got...)
	hub.publish(c, topic, `"marker"`)
	last := in.next()
	in.empty()
	if all := payloads(append(got, last)); all != `0 1 2 3 4 "marker"` {
		t.Errorf("delivered: %s", all)
	}
	for _, e := range append(got, last) {
		if e.Attempt != 1 {
			t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
}

// What is not acknowledged comes again, and nothing else, whatever the order of the acks was.
func TestAcksInAnyOrder(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	for _, test := range []struct {
		name string
		acks []int
		left string
	}{
		{"none", nil, "0 1 2 3 4 5 6 7 8 9"},
		{"every other one, backwards", []int{9, 7, 5, 3, 1}, "0 2 4 6 8"},
		{"the newest only", []int{9}, "0 1 2 3 4 5 6 7 8"},
		{"the newest, then older ones", []int{9, 8, 0, 4}, "1 2 3 5 6 7"},
		{"all, the oldest last", []int{9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			topic := freshTopic()
			in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{})
			for i := range 10 {
				hub.publish(c, topic, strconv.Itoa(i))
			}
			got := in.take(10)
			for _, i := range test.acks {
				in.ack(got[i])
			}
			if err := in.sub.Unsubscribe(t.Context()); err != nil {
				t.Fatal(err)
			}
			again := hub.subscribe(hub.dial(), topic, "g", wire.SubscribeOptions{})
			left := again.take(10 - len(test.acks))
			hub.publish(c, topic, `"marker"`)
			if e := again.next(); string(e.Payload) != `"marker"` || e.Attempt != 1 {
				t.Errorf("instead of the marker came %s, attempt %d", e.Payload, e.Attempt)
			}
			again.empty()
			var texts []string
			for _, e := range left {
				texts = append(texts, string(e.Payload))
				if e.Attempt != 2 {
					t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
				}
			}
			slices.Sort(texts)
			if s := strings.Join(texts, " "); s != test.left {
				t.Errorf("came again: %s, want %s", s, test.left)
			}
		})
	}
}

// maxInFlight bounds what is leased; what is beyond waits and is no attempt.
func TestMaxInFlight(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{MaxInFlight: 2})
	for i := range 6 {
		hub.publish(c, topic, strconv.Itoa(i))
	}
	leased := in.take(2)
	all := slices.Clone(leased)
	for range 4 {
		in.quiet(100 * time.Millisecond) // two are leased: a third must not come
		in.ack(leased[0])
		leased = append(leased[1:], in.next())
		all = append(all, leased[1])
	}
	in.ack(leased...)
	hub.publish(c, topic, `"marker"`)
	all = append(all, in.next())
	in.empty()
	if s := payloads(all); s != `0 1 2 3 4 5 "marker"` {
		t.Errorf("delivered: %s", s)
	}
	for _, e := range all {
		if e.Attempt != 1 {
			t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
}

// maxInFlight holds over all topics of a subscription, and over NACKs and leases that end.
func TestMaxInFlightOverTopicsAndFailures(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	never := 0
	in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{MaxInFlight: 3, Topics: []string{topic + ".b"}, MaxAttempts: &never})
	for i := range 20 {
		hub.publish(c, topic, strconv.Itoa(i))
		hub.publish(c, topic+".b", strconv.Itoa(100+i))
	}
	leased := map[string]wire.Event{}
	done := map[string]int{}
	for len(done) < 40 {
		for len(leased) < 3 && len(done)+len(leased) < 40 {
			e := in.next()
			if _, twice := leased[e.ID]; twice {
				t.Fatalf("event %s came while it was leased", e.Payload)
			}
			leased[e.ID] = e
		}
		in.empty() // not more than maxInFlight, by now
		// Every event fails once, then succeeds. Which of those leased goes first does not matter.
		for id, e := range leased {
			delete(leased, id)
			if e.Attempt == 1 {
				if err := e.NackWait(t.Context(), "once", 0); err != nil {
					t.Fatal(err)
				}
			} else {
				done[string(e.Payload)] = e.Attempt
				in.ack(e)
			}
			break
		}
	}
	hub.publish(c, topic, `"marker"`)
	if e := in.next(); string(e.Payload) != `"marker"` {
		t.Errorf("instead of the marker came %s", e.Payload)
	}
	for payload, attempt := range done {
		if attempt != 2 {
			t.Errorf("event %s was done at attempt %d", payload, attempt)
		}
	}
}

// The same id within the duplicate window is one event in the stream; in a family stream the topic
// is part of the id.
func TestSameIDIsOneEvent(t *testing.T) {
	t.Parallel()
	bus := openBus(t, func(cfg *jetstream.Config) {
		cfg.Topics = []topics.Rule{{Pattern: "user.*.events", Family: "users"}}
	})
	hub := startHub(t, bus)
	c := hub.dial()
	for _, test := range []struct{ one, other string }{
		{freshTopic(), freshTopic()},
		{"user.a.events", "user.b.events"},
		{"dlq." + freshTopic(), "dlq." + freshTopic()},
	} {
		for i, topic := range []string{test.one, test.one, test.other, test.other, test.one} {
			opts := wire.PublishOptions{ID: "same", Key: fmt.Sprint("k", i)}
			if id := hub.publish(c, topic, strconv.Itoa(i), opts); id != "same" {
				t.Errorf("publish %d to %s was answered %q", i, topic, id)
			}
		}
		if got := storedPayloads(t, bus, test.one); got != "0" {
			t.Errorf("%s has %s", test.one, got)
		}
		if got := storedPayloads(t, bus, test.other); got != "2" {
			t.Errorf("%s has %s", test.other, got)
		}
	}
}

// storedPayloads are those of a topic's events, in order.
func storedPayloads(t *testing.T, bus *jetstream.Bus, topic string) string {
	t.Helper()
	var texts []string
	err := bus.History(topic).Scan(t.Context(), jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: 100_000}, func(e *jetstream.Event) error {
		texts = append(texts, string(e.Payload))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(texts, " ")
}

// A key that means something in a subject is a key like any other: its latest event is found under
// it alone.
func TestKeysAreFoundAgain(t *testing.T) {
	t.Parallel()
	bus := openBus(t)
	hub := startHub(t, bus)
	c := hub.dial()
	topic := freshTopic()
	keys := []string{"a", "a.b", "*", ">", "a:b c", "Ünïcode ✓", "=2E", ".", "..", "$JS", "line\nbreak", "A", strings.Repeat("k", 512)}
	for round := range 2 {
		for i, key := range keys {
			hub.publish(c, topic, strconv.Itoa(100*round+i), wire.PublishOptions{Key: key})
		}
	}
	for i, key := range keys {
		e, err := bus.Keys(topic).Get(t.Context(), key)
		if err != nil {
			t.Errorf("key %q: %v", key, err)
			continue
		}
		if e.Key != key || string(e.Payload) != strconv.Itoa(100+i) {
			t.Errorf("key %q: found key %q with %s", key, e.Key, e.Payload)
		}
	}
	latest := 0
	err := bus.History(topic).Scan(t.Context(), jetstream.ScanOptions{LatestByKey: true}, func(*jetstream.Event) error {
		latest++
		return nil
	})
	if err != nil || latest != len(keys) {
		t.Errorf("%d keys of %d, %v", latest, len(keys), err)
	}
}

// What native NATS clients publish is delivered: with an id made from its place, and only when it
// is JSON.
func TestNativeEvents(t *testing.T) {
	t.Parallel()
	url := startNATS(t)
	bus := openBus(t, at(url))
	hub := startHub(t, bus)
	c := hub.dial()
	topic := freshTopic()
	in := hub.subscribe(c, topic, "g", wire.SubscribeOptions{})
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	native := func(subject, body string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		defer cancel()
		if _, err := nc.RequestWithContext(ctx, subject, []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	native("event."+topic, `{"from": "native"}`)
	native("keyed.local=3Astt=3A1234."+topic, `2`)
	one, two := in.next(), in.next()
	if one.ID != topic+"@1" || string(one.Payload) != `{"from": "native"}` || one.Key != "" {
		t.Errorf("record %s", one.Record)
	}
	if two.ID != topic+"@2" || two.Key != "local:stt:1234" {
		t.Errorf("record %s", two.Record)
	}
	in.ack(one, two)

	after := hub.subscribe(c, topic, "after", wire.SubscribeOptions{From: "afterId", AfterID: one.ID})
	if e := after.next(); e.ID != two.ID {
		t.Errorf("after %s came %s", one.ID, e.Record)
	}
}
