package facade_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/facade/hubtest"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

const testToken = "s3cret"

// freshTopic is a topic that no other test uses.
func freshTopic() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return "t" + hex.EncodeToString(b[:])
}

// openBus opens a bus on an embedded server of its own, unless a change names another.
func openBus(tb testing.TB, change ...func(*jetstream.Config)) *jetstream.Bus {
	tb.Helper()
	cfg := jetstream.Config{AckWait: 2 * waitLimit} // no event comes again for the end of its lease
	for _, f := range change {
		f(&cfg)
	}
	if cfg.URL == "" && cfg.Server == nil {
		cfg.Server = natstest.Embed(tb, tb.TempDir())
	}
	bus, err := jetstream.Open(tb.Context(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := bus.Close(); err != nil {
			tb.Error(err)
		}
	})
	return bus
}

// testHub is a hub on real sockets.
type testHub struct {
	t      testing.TB
	bus    *jetstream.Bus
	server *facade.Server
	url    string // of the WebSocket
	http   string // of the HTTP side
}

func startHub(tb testing.TB, bus *jetstream.Bus, change ...func(*facade.Config)) *testHub {
	tb.Helper()
	opts := []hubtest.Option{hubtest.Token(testToken), hubtest.On(bus)}
	for _, f := range change {
		opts = append(opts, hubtest.Facade(f))
	}
	h := hubtest.New(tb, opts...)
	return &testHub{t: tb, bus: bus, server: h.Server, url: h.WebSocket, http: h.HTTP}
}

// twoHubs are two hubs on one NATS server, as two processes would be.
func twoHubs(tb testing.TB) (a, b *testHub) {
	tb.Helper()
	nats := at(startNATS(tb))
	return startHub(tb, openBus(tb, nats), unthrottled), startHub(tb, openBus(tb, nats), unthrottled)
}

// unthrottled lets clients send as fast as they can.
func unthrottled(cfg *facade.Config) { cfg.Limits.FrameRate = facade.NoLimit }

// at makes a bus use the NATS server at url.
func at(url string) func(*jetstream.Config) {
	return func(cfg *jetstream.Config) { cfg.URL = url }
}

// startNATS starts a server as an operator would run it.
func startNATS(tb testing.TB) (url string) {
	tb.Helper()
	return natstest.Run(tb).ClientURL()
}

// dial connects a client, which is closed when the test ends.
func (h *testHub) dial() *wire.Conn {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), waitLimit)
	defer cancel()
	c, err := wire.Dial(ctx, h.url, wire.Options{Token: testToken})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = c.Close() })
	return c
}

// inbox takes the events of one subscription.
type inbox struct {
	t      testing.TB
	sub    *wire.Subscription
	events chan wire.Event
}

func (h *testHub) subscribe(c *wire.Conn, topic, group string, opts wire.SubscribeOptions) *inbox {
	h.t.Helper()
	in := &inbox{t: h.t, events: make(chan wire.Event, 20_000)}
	ctx, cancel := context.WithTimeout(h.t.Context(), waitLimit)
	defer cancel()
	sub, err := c.Subscribe(ctx, topic, group, opts, func(e wire.Event) { in.events <- e })
	if err != nil {
		h.t.Fatal(err)
	}
	in.sub = sub
	return in
}

// next is the next event; it fails the test when none comes.
func (in *inbox) next() wire.Event {
	in.t.Helper()
	return in.within(waitLimit)
}

// within is next with a limit that is part of what is tested.
func (in *inbox) within(limit time.Duration) wire.Event {
	in.t.Helper()
	select {
	case e := <-in.events:
		return e
	case <-time.After(limit):
		in.t.Fatalf("no event within %v", limit)
	}
	return wire.Event{}
}

// take is the next n events.
func (in *inbox) take(n int) []wire.Event {
	in.t.Helper()
	var got []wire.Event
	for range n {
		got = append(got, in.next())
	}
	return got
}

// quiet fails when an event comes within d.
func (in *inbox) quiet(d time.Duration) {
	in.t.Helper()
	select {
	case e := <-in.events:
		in.t.Fatalf("event %s (%s, attempt %d) should not have come", e.ID, e.Payload, e.Attempt)
	case <-time.After(d):
	}
}

// empty fails when an event is there already. It closes a window that a later event has ended.
func (in *inbox) empty() {
	in.t.Helper()
	select {
	case e := <-in.events:
		in.t.Fatalf("event %s (%s, attempt %d) should not have come", e.ID, e.Payload, e.Attempt)
	default:
	}
}

// ack settles an event, confirmed.
func (in *inbox) ack(events ...wire.Event) {
	in.t.Helper()
	for i := range events {
		if err := events[i].AckWait(in.t.Context()); err != nil {
			in.t.Fatal(err)
		}
	}
}

func (h *testHub) publish(c *wire.Conn, topic, payload string, opts ...wire.PublishOptions) (id string) {
	h.t.Helper()
	var o wire.PublishOptions
	if len(opts) > 0 {
		o = opts[0]
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), waitLimit)
	defer cancel()
	id, err := c.Publish(ctx, topic, []byte(payload), o)
	if err != nil {
		h.t.Fatal(err)
	}
	return id
}

func payloads(events []wire.Event) string {
	var b strings.Builder
	for _, e := range events {
		b.Write(e.Payload)
		b.WriteByte(' ')
	}
	return strings.TrimSpace(b.String())
}
