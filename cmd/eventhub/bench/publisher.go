package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

// publisher is a connection that publishes to one topic. Only one goroutine may call send.
type publisher interface {
	// send publishes an event, with the given id unless id is empty. It blocks while the maximum
	// number of events is unconfirmed. The caller may reuse payload afterwards. due is the time at
	// which the event should have been sent.
	send(payload []byte, id string, due int64) error
	// drain waits until all events are confirmed, and returns an error if one failed.
	drain(ctx context.Context) error
	close() error
}

// publishing configures a publisher.
type publishing struct {
	topic    string
	inFlight int
	batch    int    // events per request, over HTTP
	native   string // "async" or "inbox"
	// timed enables measuring the time until confirmation.
	timed bool
}

// newPublisher connects. If p.timed is set, times receives the confirmation times; it must not be
// read before drain.
func (s *system) newPublisher(ctx context.Context, via string, p publishing, times *hdrhistogram.Histogram) (publisher, error) {
	switch via {
	case viaWS:
		return s.newWSPublisher(ctx, p, times)
	case viaHTTP:
		return s.newHTTPPublisher(p, times), nil
	default:
		if p.native == "inbox" {
			return s.newInboxPublisher(via, p, times)
		}
		return s.newAsyncPublisher(via, p, times)
	}
}

// confirmations counts the unconfirmed events and keeps the first error.
type confirmations struct {
	wg     sync.WaitGroup
	failed atomic.Int64
	first  atomic.Pointer[error]
	mu     sync.Mutex
	times  *hdrhistogram.Histogram // nil if not timed
}

func (c *confirmations) done(err error) {
	if err != nil {
		c.failed.Add(1)
		c.first.CompareAndSwap(nil, &err)
	}
	c.wg.Done()
}

func (c *confirmations) timed(due int64, err error) {
	took := now() - due
	c.mu.Lock()
	record(c.times, took)
	c.mu.Unlock()
	c.done(err)
}

// drain waits for all confirmations. Each kind of publisher limits the wait itself.
func (c *confirmations) drain(ctx context.Context) error {
	all := make(chan struct{})
	go func() { // ends with the last confirmation, at the latest after close
		c.wg.Wait()
		close(all)
	}()
	select {
	case <-all:
	case <-ctx.Done():
		return ctx.Err()
	}
	if first := c.first.Load(); first != nil {
		return fmt.Errorf("%d events were not confirmed: %w", c.failed.Load(), *first)
	}
	return nil
}

// wsPublisher publishes over a WebSocket of the hub.
type wsPublisher struct {
	confirmations

	client *wire.Conn
	topic  string
	each   func(string, error)
}

func (s *system) newWSPublisher(ctx context.Context, p publishing, times *hdrhistogram.Histogram) (*wsPublisher, error) {
	c, err := s.dial(ctx, p.inFlight)
	if err != nil {
		return nil, err
	}
	w := &wsPublisher{client: c, topic: p.topic}
	w.each = func(_ string, err error) { w.done(err) }
	if p.timed {
		w.times = times
	}
	return w, nil
}

// dial connects to the hub's WebSocket, or to one of several hubs in turn.
func (s *system) dial(ctx context.Context, inFlight int) (*wire.Conn, error) {
	at := s.wsURL
	if n := len(s.serving); n > 0 {
		at = s.serving[int(s.dialled.Add(1)-1)%n]
	}
	c, err := wire.Dial(ctx, at, wire.Options{Token: s.bearer, PublishInFlight: inFlight})
	if err != nil {
		return nil, fmt.Errorf("connect to hub at %s: %w", at, err)
	}
	return c, nil
}

func (w *wsPublisher) send(payload []byte, id string, due int64) error {
	done := w.each
	if w.times != nil {
		done = func(_ string, err error) { w.timed(due, err) }
	}
	w.wg.Add(1)
	err := w.client.PublishAsync(w.topic, payload, wire.PublishOptions{ID: id}, done)
	if err != nil {
		w.wg.Done()
	}
	return err
}

func (w *wsPublisher) close() error { return w.client.Close() }

// asyncPublisher publishes with PublishAsync of nats.go.
type asyncPublisher struct {
	confirmations

	conn    *nats.Conn
	js      natsjs.JetStream
	subject string
	// due holds the timed futures in order of publishing. It is nil if confirmations are not timed.
	due   chan timedFuture
	ended chan struct{}
}

type timedFuture struct {
	future natsjs.PubAckFuture
	due    int64
}

func (s *system) newAsyncPublisher(via string, p publishing, times *hdrhistogram.Histogram) (*asyncPublisher, error) {
	nc, err := s.connect(via)
	if err != nil {
		return nil, err
	}
	a := &asyncPublisher{conn: nc, subject: eventSubject(p.topic)}
	a.js, err = natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(p.inFlight),
		natsjs.WithPublishAsyncErrHandler(func(_ natsjs.JetStream, _ *nats.Msg, err error) {
			a.failed.Add(1)
			a.first.CompareAndSwap(nil, &err)
		}))
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("create JetStream context: %w", err)
	}
	if p.timed {
		a.times, a.due, a.ended = times, make(chan timedFuture, p.inFlight), make(chan struct{})
		go a.timeAll() // owned by drain, which waits for ended
	}
	return a, nil
}

// timeAll records confirmation times. Confirmations arrive in the order of the publishes.
func (a *asyncPublisher) timeAll() {
	defer close(a.ended)
	for f := range a.due {
		select {
		case <-f.future.Ok():
			record(a.times, now()-f.due)
		case <-f.future.Err():
		}
	}
}

func (a *asyncPublisher) send(payload []byte, id string, due int64) error {
	var opts []natsjs.PublishOpt
	if id != "" {
		opts = []natsjs.PublishOpt{natsjs.WithMsgID(id)}
	}
	future, err := a.js.PublishAsync(a.subject, payload, opts...)
	for errors.Is(err, natsjs.ErrTooManyStalledMsgs) && a.first.Load() == nil && !a.conn.IsClosed() {
		// the server is slow: PublishAsync waited 200 ms
		future, err = a.js.PublishAsync(a.subject, payload, opts...)
	}
	if err == nil && a.due != nil {
		a.due <- timedFuture{future, due}
	}
	return err
}

func (a *asyncPublisher) drain(ctx context.Context) error {
	if a.due != nil {
		close(a.due)
		a.due = nil
		defer func() { <-a.ended }()
	}
	select {
	case <-a.js.PublishAsyncComplete():
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(stallAfter):
		return fmt.Errorf("%d events were not confirmed after %v", a.js.PublishAsyncPending(), stallAfter)
	}
	return a.confirmations.drain(ctx)
}

func (a *asyncPublisher) close() error {
	a.conn.Close()
	return nil
}

// ids generates the given ids of a connection's events.
type ids struct{ prefix string }

func (i ids) of(seq int) string {
	if i.prefix == "" {
		return ""
	}
	return i.prefix + strconv.Itoa(seq)
}
