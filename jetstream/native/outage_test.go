package native_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// cable is the network between a client and its server.
type cable struct {
	mu   sync.Mutex
	conn net.Conn
	cut  bool
}

// Dial is nats.CustomDialer.
func (c *cable) Dial(network, address string) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut {
		return nil, errors.New("the cable is cut")
	}
	conn, err := (&net.Dialer{}).DialContext(context.Background(), network, address)
	c.conn = conn
	return conn, err
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut = cut; cut {
		_ = c.conn.Close()
	}
}

// connect connects a client by the cable.
func (c *cable) connect(t *testing.T, r *rig) (*nats.Conn, natsjs.JetStream) {
	t.Helper()
	nc, err := nats.Connect(r.js.Conn().ConnectedUrl(), nats.SetCustomDialer(c), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

// TestARefusalWithoutAConnectionIsKept has a handler refuse an event while the connection is down,
// and return no error. The event is not acknowledged when the connection is back: it comes again.
func TestARefusalWithoutAConnectionIsKept(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	line := &cable{}
	nc, js := line.connect(t, r)
	own, err := native.New(js).Group(t.Context(), "orders", "g", native.GroupOptions{AckWait: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	again := make(chan int, 1)
	var consuming sync.WaitGroup
	consuming.Go(func() {
		err := own.Consume(ctx, func(ctx context.Context, d *native.Delivery) error {
			if d.Attempt > 1 {
				again <- d.Attempt
				return nil
			}
			line.set(true)
			for nc.IsConnected() {
				<-time.After(time.Millisecond)
			}
			if err := d.Nack(ctx, "later", 0); !errors.Is(err, native.ErrNotConnected) {
				t.Errorf("Nack without a connection: %v", err)
			}
			line.set(false)
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	r.publish("orders", "1", native.Fields{})
	select {
	case attempt := <-again:
		if attempt != 2 {
			t.Errorf("the event came again with attempt %d", attempt)
		}
	case <-time.After(patience):
		t.Error("the event did not come again")
	}
	cancel()
	consuming.Wait()
}

// TestNothingIsSettledWithoutAConnection has a member settle events while its connection is down.
// nats.go would keep that, and send it when another member has the event.
func TestNothingIsSettledWithoutAConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.create("orders", "dlq.orders")
	line := &cable{}
	nc, js := line.connect(t, r)
	const ackWait = 10 * time.Minute // slow machines must not lose the events
	own, err := native.New(js).Group(t.Context(), "orders", "g", native.GroupOptions{AckWait: ackWait})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		r.publish("orders", "1", native.Fields{})
	}
	acked, refused := r.next(own), r.next(own)
	line.set(true)
	eventually(t, "the end of the connection", func() bool { return !nc.IsConnected() })
	for how, settle := range map[string]func() error{
		"Ack": acked.Ack, "Nack": func() error { return refused.Nack(t.Context(), "", 0) },
	} {
		if err := settle(); !errors.Is(err, native.ErrNotConnected) {
			t.Errorf("%s without a connection: %v", how, err)
		}
	}
	line.set(false)
	eventually(t, "the connection", nc.IsConnected)
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
	info, err := own.Consumer().Info(t.Context())
	if err != nil || info.AckFloor.Stream != 0 || info.NumRedelivered != 0 {
		t.Errorf("what was said without a connection was sent: %+v, %v", info, err)
	}
	if err := acked.Ack(); err != nil {
		t.Errorf("Ack with the connection: %v", err)
	}
}

// TestNothingIsSettledAtAnotherServer settles an event after the server was restarted. The server
// may have forgotten the delivery, and given the event to another member.
func TestNothingIsSettledAtAnotherServer(t *testing.T) {
	t.Parallel()
	server := natstest.Run(t)
	r := newRigOn(t, server.ClientURL())
	r.create("orders", "dlq.orders")
	nc, js := new(cable).connect(t, r)
	own, err := native.New(js).Group(t.Context(), "orders", "g", native.GroupOptions{AckWait: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	r.publish("orders", "1", native.Fields{})
	d := r.next(own)
	server.Shutdown()
	server.WaitForShutdown()
	eventually(t, "the end of the connection", func() bool { return !nc.IsConnected() })
	natstest.Run(t, natstest.Again(server))
	eventually(t, "the connection", nc.IsConnected)
	if err := d.Ack(); !errors.Is(err, native.ErrNotHeld) {
		t.Errorf("Ack after a restart: %v", err)
	}
}

// TestGroupsThatCannotBeJoined joins groups that there cannot be: nothing comes with the error.
func TestGroupsThatCannotBeJoined(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if g, err := r.client.Group(t.Context(), "nothing", "g", native.GroupOptions{}); g != nil || !errors.Is(err, native.ErrNoTopic) {
		t.Errorf("a group without a topic: %v, %v", g, err)
	}
}
