package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

// maxBatchSize is the maximum BatchSize of a subscription.
const maxBatchSize = 1000

// subscriber is a connection that is a member of a group.
type subscriber interface {
	// settle waits until the acknowledgements of all handled events have been accepted.
	settle(ctx context.Context) error
	close() error
}

// subscribing configures a subscriber.
type subscribing struct {
	topic, group string
	from         string // "latest" or "earliest"
	inFlight     int
	ackBatch     int // ids per ACK frame, over WebSocket; 0 means a frame per event
	ttl          time.Duration
	version      wire.SchemaVersion // of the schema, over WebSocket
	// handle receives each event and returns its number. The event is then acknowledged and
	// counted.
	handle  func(payload []byte, stored int64) (seq int, err error)
	counted func(seq int)
	// failed receives an error that prevents complete counting. It must not block.
	failed func(error)
}

// newSubscriber connects and subscribes.
func (s *system) newSubscriber(ctx context.Context, via string, o subscribing) (subscriber, error) {
	if isNative(via) {
		nc, err := s.connect(via)
		if err != nil {
			return nil, err
		}
		sub, err := consume(ctx, nc, o)
		if err != nil {
			nc.Close()
			return nil, err
		}
		sub.owns = true
		return sub, nil
	}
	return s.newWSSubscriber(ctx, o)
}

// wsSubscriber subscribes over a WebSocket of the hub.
type wsSubscriber struct {
	subscribing

	client *wire.Conn
	sub    *wire.Subscription
	acks   chan ack // acknowledgements to send in batches
	over   chan struct{}
	wg     sync.WaitGroup
	once   sync.Once
}

// ack is a pending acknowledgement.
type ack struct {
	id  string
	seq int
}

func (s *system) newWSSubscriber(ctx context.Context, o subscribing) (*wsSubscriber, error) {
	c, err := s.dial(ctx, 1)
	if err != nil {
		return nil, err
	}
	w := &wsSubscriber{subscribing: o, client: c, acks: make(chan ack, o.inFlight), over: make(chan struct{})}
	w.sub, err = c.Subscribe(ctx, o.topic, o.group, wire.SubscribeOptions{
		From: o.from, MaxInFlight: o.inFlight, BatchSize: min(o.inFlight, maxBatchSize), GroupTTLMS: o.ttl.Milliseconds(), SchemaVersion: o.version,
	}, w.event)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to %s: %w", o.topic, err), c.Close())
	}
	if o.ackBatch > 0 {
		w.wg.Go(w.ackMany)
	}
	return w, nil
}

func (w *wsSubscriber) event(ev wire.Event) {
	seq, err := w.handle(ev.Payload, ev.TS)
	if err != nil {
		w.failed(err)
		return
	}
	if w.ackBatch > 0 {
		select {
		case w.acks <- ack{ev.ID, seq}:
		case <-w.over:
		}
		return
	}
	if err := ev.Ack(); err != nil {
		w.failed(fmt.Errorf("acknowledge: %w", err))
		return
	}
	w.counted(seq)
}

// ackMany acknowledges events in batches of up to ackBatch per frame. A batch takes what is pending
// and never waits for more.
func (w *wsSubscriber) ackMany() {
	names, batch := make([]string, 0, w.ackBatch), make([]ack, 0, w.ackBatch)
	for {
		select {
		case a := <-w.acks:
			batch = append(batch[:0], a)
		case <-w.over:
			return
		}
		runtime.Gosched() // lets the handler run, so that the batch grows
		for more := true; more && len(batch) < w.ackBatch; {
			select {
			case a := <-w.acks:
				batch = append(batch, a)
			default:
				more = false
			}
		}
		names = names[:0]
		for _, a := range batch {
			names = append(names, a.id)
		}
		if err := w.sub.AckMany(names); err != nil {
			w.failed(fmt.Errorf("acknowledge: %w", err))
			return
		}
		for _, a := range batch {
			w.counted(a.seq)
		}
	}
}

// settle leaves the group. The hub answers after it has accepted all earlier acknowledgements.
func (w *wsSubscriber) settle(ctx context.Context) error {
	return w.sub.Unsubscribe(ctx)
}

func (w *wsSubscriber) close() error {
	w.once.Do(func() { close(w.over) })
	err := w.client.Close()
	w.wg.Wait()
	return err
}

// nativeSubscriber consumes with nats.go and acknowledges each message.
type nativeSubscriber struct {
	conn *nats.Conn
	owns bool // close the connection together with the subscriber
	run  natsjs.ConsumeContext
}

// consume joins the group of a topic over a connection and creates the group if it does not exist.
func consume(ctx context.Context, nc *nats.Conn, o subscribing) (*nativeSubscriber, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, fmt.Errorf("create JetStream context: %w", err)
	}
	stream := objectName(o.topic)
	consumer, err := js.Consumer(ctx, stream, objectName(o.group))
	if errors.Is(err, natsjs.ErrConsumerNotFound) {
		consumer, err = js.CreateOrUpdateConsumer(ctx, stream, consumerConfig(o.group, o.ttl))
	}
	if err != nil {
		return nil, fmt.Errorf("open group %s of %s: %w", o.group, o.topic, err)
	}
	run, err := consumer.Consume(func(m natsjs.Msg) {
		seq, err := o.handle(m.Data(), 0)
		if err == nil {
			err = m.Ack()
		}
		if err != nil {
			o.failed(err)
			return
		}
		o.counted(seq)
	}, natsjs.PullMaxMessages(o.inFlight))
	if err != nil {
		return nil, fmt.Errorf("consume %s: %w", o.topic, err)
	}
	return &nativeSubscriber{conn: nc, run: run}, nil
}

func (n *nativeSubscriber) settle(ctx context.Context) error {
	if err := n.conn.FlushWithContext(ctx); err != nil {
		return fmt.Errorf("flush NATS connection: %w", err)
	}
	return nil
}

func (n *nativeSubscriber) close() error {
	n.run.Stop()
	<-n.run.Closed()
	if n.owns {
		n.conn.Close()
	}
	return nil
}
