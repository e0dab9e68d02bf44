package native_test

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"eventhub/jetstream"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, natstest.Leaks()...) }

// patience is how long a test waits for what must happen.
const patience = time.Minute

// rig is a bus, as a hub has one, and a native client of the same server.
type rig struct {
	t      *testing.T
	bus    *jetstream.Bus
	js     natsjs.JetStream
	client *native.Client
}

func newRig(t *testing.T, change ...func(*jetstream.Config)) *rig {
	t.Helper()
	return newRigOn(t, natstest.Run(t).ClientURL(), change...)
}

func newRigOn(t *testing.T, url string, change ...func(*jetstream.Config)) *rig {
	t.Helper()
	cfg := jetstream.Config{URL: url}
	for _, f := range change {
		f(&cfg)
	}
	bus, err := jetstream.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t, bus, js, native.New(js)}
}

// create makes topics as `eventhub topics create` does.
func (r *rig) create(topics ...string) {
	r.t.Helper()
	for _, topic := range topics {
		if err := r.bus.Admin().Topic(topic).Create(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *rig) publish(topic, payload string, fields native.Fields) *natsjs.PubAck {
	r.t.Helper()
	ack, err := r.client.Publish(r.t.Context(), topic, []byte(payload), fields)
	if err != nil {
		r.t.Fatal(err)
	}
	return ack
}

func (r *rig) group(topic, group string, opts native.GroupOptions) *native.Group {
	r.t.Helper()
	g, err := r.client.Group(r.t.Context(), topic, group, opts)
	if err != nil {
		r.t.Fatal(err)
	}
	return g
}

// next pulls one message, and takes it as a member of the group.
func (r *rig) next(g *native.Group) *native.Delivery {
	r.t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		batch, err := g.Consumer().Fetch(1, natsjs.FetchMaxWait(time.Second))
		if err != nil {
			r.t.Fatal(err)
		}
		for msg := range batch.Messages() {
			d, err := g.Receive(r.t.Context(), msg)
			if err != nil {
				r.t.Fatal(err)
			}
			if d != nil {
				return d
			}
		}
	}
	r.t.Fatal("no event came")
	return nil
}

// member is a member of a group through a bus, as a WebSocket client is one.
type member struct {
	t   *testing.T
	sub *jetstream.Subscription
	got chan *jetstream.Held
}

func (r *rig) member(topic, group string, opts jetstream.SubscribeOptions) *member {
	r.t.Helper()
	m := &member{t: r.t, got: make(chan *jetstream.Held, 1_000)}
	sub, err := r.bus.Subscribe(r.t.Context(), topic, group, opts, func(h *jetstream.Held) { m.got <- h })
	if err != nil {
		r.t.Fatal(err)
	}
	m.sub = sub
	return m
}

func (m *member) next() *jetstream.Delivery {
	m.t.Helper()
	for deadline := time.After(patience); ; {
		select {
		case h := <-m.got:
			if d, ok := h.Begin(); ok {
				return d
			}
		case <-deadline:
			m.t.Fatal("no event came")
		}
	}
}

func pause(m *member) {
	m.t.Helper()
	if err := m.sub.Pause(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
}

// eventually waits until f returns true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come to pass", what)
		}
	}
}

// consume runs Consume until the test ends.
func consume(t *testing.T, g *native.Group, handle func(context.Context, *native.Delivery) error) (end func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Consume(ctx, handle) }()
	ended := false
	end = func() error {
		ended = true
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return context.DeadlineExceeded
		}
	}
	t.Cleanup(func() {
		if !ended {
			_ = end()
		}
	})
	return end
}
