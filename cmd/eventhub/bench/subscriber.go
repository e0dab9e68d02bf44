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

	"eventhub/facade/client"
)

// maxBatchSize is the most events that a subscription asks of the hub at a time.
const maxBatchSize = 1000

// subscriber is one connection that is a member of a group.
type subscriber interface {
	// settle returns when the acks of all that the handler was called with have been taken.
	settle(ctx context.Context) error
	close() error
}

// subscribing says how to subscribe.
type subscribing struct {
	topic, group string
	from         string // latest or earliest
	inFlight     int
	ackBatch     int // ids a frame, over WebSocket; 0: a frame for each ack
	ttl          time.Duration
	// handle gets each event, and returns its number. Then it is acknowledged, and then counted.
	handle  func(payload []byte, stored int64) (seq int, err error)
	counted func(seq int)
	// failed is told why not everything can be counted. It must not block.
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

	client *client.Client
	sub    *client.Subscription
	acks   chan ack // for frames that acknowledge many
	over   chan struct{}
	wg     sync.WaitGroup
	once   sync.Once
}

// ack is one that waits for others.
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
	w.sub, err = c.Subscribe(ctx, o.topic, o.group, client.SubscribeOptions{
		From: o.from, MaxInFlight: o.inFlight, BatchSize: min(o.inFlight, maxBatchSize), GroupTTLMS: o.ttl.Milliseconds(),
	}, w.event)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe to %s: %w", o.topic, err), c.Close())
	}
	if o.ackBatch > 0 {
		w.wg.Go(w.ackMany)
	}
	return w, nil
}

func (w *wsSubscriber) event(ev client.Event) {
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

// ackMany acknowledges what has come together, at most ackBatch events with a frame. No ack waits for an event to come.
func (w *wsSubscriber) ackMany() {
	names, batch := make([]string, 0, w.ackBatch), make([]ack, 0, w.ackBatch)
	for {
		select {
		case a := <-w.acks:
			batch = append(batch[:0], a)
		case <-w.over:
			return
		}
		runtime.Gosched() // let the handler go on, so that there is more to send
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

// settle leaves the group: the hub answers when it has taken the acks before it.
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
	owns bool // the connection is its own
	run  natsjs.ConsumeContext
}

// consume joins the group of a topic over a connection. The group is made when it is new.
func consume(ctx context.Context, nc *nats.Conn, o subscribing) (*nativeSubscriber, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, fmt.Errorf("nats: %w", err)
	}
	stream := objectName(o.topic)
	consumer, err := js.Consumer(ctx, stream, objectName(o.group))
	if errors.Is(err, natsjs.ErrConsumerNotFound) {
		consumer, err = js.CreateOrUpdateConsumer(ctx, stream, consumerConfig(o.group, o.ttl))
	}
	if err != nil {
		return nil, fmt.Errorf("group %s of %s: %w", o.group, o.topic, err)
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
		return fmt.Errorf("nats: %w", err)
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
