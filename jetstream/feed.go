package jetstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// Bounds of a feed.
const (
	// what has come and was not read yet; the server stops sending at half of it
	feedBytes     = 64 << 20
	feedReady     = 512 // messages of those that are ready to be read
	feedHeartbeat = time.Second
	feedSilence   = 3 // heartbeats without a sign of life, after which it counts as cut off
)

// feed reads a stream's messages in order. The server pushes them through an ephemeral consumer
// without acks, as far as flow control lets it, and forgets the consumer by itself when the hub
// dies. What is lost on the way ends the feed: who reads it begins a new one behind the last
// message.
type feed struct {
	core   *core
	stream string
	link   *link
	sub    *nats.Subscription
	name   string // of the consumer

	ready     chan *nats.Msg
	done      chan struct{}
	heartbeat *time.Ticker
	quiet     int    // heartbeats without a sign of life
	seen      uint64 // messages
}

var (
	// errIdle is returned where no message came for a while.
	errIdle = fmt.Errorf("jetstream: no message came: %w", context.DeadlineExceeded)
	// errFeedCut is returned where messages were lost, or none can come any more.
	errFeedCut = errors.New("jetstream: the messages of a stream were cut off")
)

// openFeed makes the consumer. pending is how many messages there are at first.
func (c *core) openFeed(ctx context.Context, stream string, cfg natsjs.ConsumerConfig) (f *feed, pending uint64, err error) {
	f = &feed{core: c, stream: stream, link: c.link(), ready: make(chan *nats.Msg, feedReady), done: make(chan struct{})}
	cfg.DeliverSubject = nats.NewInbox()
	if f.sub, err = f.link.nc.Subscribe(cfg.DeliverSubject, f.receive); err == nil {
		err = f.sub.SetPendingLimits(-1, feedBytes)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	cfg.AckPolicy = natsjs.AckNonePolicy
	cfg.MemoryStorage = true
	cfg.InactiveThreshold = 30 * time.Second
	cfg.Replicas = 1
	cfg.FlowControl = true
	cfg.IdleHeartbeat = feedHeartbeat
	f.name = rand.Text()
	cfg.Name = f.name
	f.heartbeat = time.NewTicker(feedHeartbeat)
	consumer, err := c.js.CreatePushConsumer(ctx, stream, cfg)
	if err != nil {
		f.abandon(ctx)
		return nil, 0, fmt.Errorf("jetstream: read of stream %s: %w", stream, err)
	}
	return f, consumer.CachedInfo().NumPending, nil
}

// receive holds up the subscription's own queue while the reader is slow: flow control then stops
// the server.
func (f *feed) receive(m *nats.Msg) {
	select {
	case f.ready <- m:
	case <-f.done:
	}
}

// next waits for a message. It returns errIdle when none came for as long as wait, in whole
// heartbeats, if that is not 0.
func (f *feed) next(ctx context.Context, wait time.Duration) (m *storedMsg, pending uint64, err error) {
	for idle := time.Duration(0); ; {
		select {
		case msg := <-f.ready:
			f.quiet = 0
			p, ok := parseAckSubject(msg.Reply)
			if !ok {
				if err := f.control(msg); err != nil {
					return nil, 0, err
				}
				continue
			}
			// without acks nothing is sent twice: a hole would stay one
			if f.seen++; p.order != f.seen {
				return nil, 0, fmt.Errorf("%w: message %d is missing", errFeedCut, f.seen)
			}
			return &storedMsg{subject: msg.Subject, seq: p.streamSeq, header: msg.Header, data: msg.Data, time: time.Unix(0, p.storedAt)}, ackPending(msg.Reply[p.prefix:]), nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		case <-f.heartbeat.C:
			if f.quiet++; f.quiet > feedSilence {
				return nil, 0, fmt.Errorf("%w: the server is silent", errFeedCut)
			}
			if idle += feedHeartbeat; wait > 0 && idle >= wait {
				return nil, 0, errIdle
			}
		}
	}
}

// ackPending reads the last number of <delivered>.<stream seq>.<consumer seq>.<time>.<pending>,
// which others may follow.
func ackPending(s string) uint64 {
	for range 4 {
		_, s, _ = strings.Cut(s, ".")
	}
	s, _, _ = strings.Cut(s, ".")
	n, _ := strconv.ParseUint(s, 10, 64)
	return n
}

// control answers flow control, and compares what a heartbeat says was sent with what came.
func (f *feed) control(m *nats.Msg) error {
	if m.Header.Get("Status") != "100" {
		return fmt.Errorf("%w: status %q", errFeedCut, m.Header.Get("Status"))
	}
	reply := m.Reply
	if reply == "" {
		if n, err := strconv.ParseUint(m.Header.Get("Nats-Last-Consumer"), 10, 64); err == nil && n > f.seen {
			return fmt.Errorf("%w: message %d is missing", errFeedCut, f.seen+1)
		}
		reply = m.Header.Get("Nats-Consumer-Stalled")
	}
	if reply == "" {
		return nil
	}
	return f.link.nc.Publish(reply, nil)
}

// pending asks the server how many messages there are that were not read yet.
func (f *feed) pending(ctx context.Context) (uint64, error) {
	c, err := f.core.js.PushConsumer(ctx, f.stream, f.name)
	if err != nil {
		return 0, err
	}
	info := c.CachedInfo()
	if info.Delivered.Consumer > f.seen {
		return info.NumPending + info.Delivered.Consumer - f.seen, nil
	}
	return info.NumPending, nil
}

// close removes the consumer; what the server is not told it finds out in 30 s.
func (f *feed) close(ctx context.Context) {
	f.heartbeat.Stop()
	f.unsubscribe()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = f.core.js.DeleteConsumer(ctx, f.stream, f.name)
}

// abandon is close for a consumer that may still come into being, because the caller gave up while
// the server was asked for it: the server may then remove it before it makes it.
func (f *feed) abandon(ctx context.Context) {
	gaveUp := ctx.Err() != nil
	f.heartbeat.Stop()
	f.unsubscribe()
	if !gaveUp {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for range 5 {
		if err := f.core.js.DeleteConsumer(ctx, f.stream, f.name); !errors.Is(err, natsjs.ErrConsumerNotFound) || f.core.pause(ctx, 10*time.Millisecond) != nil {
			return
		}
	}
}

func (f *feed) unsubscribe() {
	close(f.done)
	_ = f.sub.Unsubscribe() // it fails where the connection is closed, which ends it too
}

// readAgain bounds how often a read that does not come forward begins again.
const readAgain = 5

// readThrough calls f for all messages of a stream from a sequence on, up to its end at the moment
// of the call. What is cut off goes on where it was.
func (c *core) readThrough(ctx context.Context, stream string, from uint64, headersOnly bool, f func(*storedMsg) error) error {
	info, err := c.findStream(ctx, stream)
	if err != nil {
		return err
	}
	return c.readTo(ctx, stream, from, info.State.LastSeq, headersOnly, f)
}

// readTo is readThrough to a given end.
func (c *core) readTo(ctx context.Context, stream string, from, end uint64, headersOnly bool, f func(*storedMsg) error) error {
	for failed := 0; from <= end; {
		next, err := c.readOn(ctx, stream, from, end, headersOnly, f)
		if err == nil && next <= end {
			next, err = c.readRest(ctx, stream, next, end, f)
		}
		if err == nil && next <= end { // a replica has no more: what does the leader say?
			var left *storedMsg
			if left, err = c.leaderNext(ctx, stream, next, time.Time{}, nil); left != nil && left.seq <= end {
				err = errBehind
			}
		}
		switch own, stops := errors.AsType[*stopError](err); {
		case err == nil:
			return nil
		case stops:
			return own.err
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, natsjs.ErrStreamNotFound):
			return event.ErrNotFound
		}
		if failed++; next > from {
			failed = 0
		}
		if from = next; failed == readAgain {
			return err
		}
		if err := c.pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// readRest reads by direct gets from a sequence on, until a replica has no more or is beyond end.
// It returns the sequence to go on with. Unlike a consumer's count of what is pending, the end of a
// direct get is exact.
func (c *core) readRest(ctx context.Context, stream string, from, end uint64, f func(*storedMsg) error) (next uint64, err error) {
	for more := true; more && from <= end; {
		var got directEnd
		if from, got, err = c.readBatch(ctx, stream, directQuery{Seq: from}, end, f); err != nil {
			break
		}
		more = got.pending > 0
	}
	return from, err
}

// readBatch is one direct get. next is the sequence to go on with: of given subjects, one beyond
// all that the replica had, if it had any of them.
func (c *core) readBatch(ctx context.Context, stream string, q directQuery, end uint64, f func(*storedMsg) error) (next uint64, got directEnd, err error) {
	if next = q.Seq; q.MultiLast == nil && q.Batch == 0 {
		q.Batch = maxDirect
	}
	got, err = c.direct(ctx, stream, &q, func(m *storedMsg, _ uint64) error {
		if m.seq > end {
			return errStopWalk
		}
		if err := f(m); err != nil {
			return &stopError{err}
		}
		next = m.seq + 1
		return nil
	})
	switch {
	case errors.Is(err, errStopWalk):
		return end + 1, directEnd{}, nil
	case err == nil && got.pending == 0:
		next = max(next, got.upTo+1)
	}
	return max(next, got.last+1), got, err // last: that of a message that cannot be read
}

// stopError is an error of a reader's own function.
type stopError struct{ err error }

func (e *stopError) Error() string { return e.err.Error() }

// readOn reads through a consumer, from a sequence on, and returns the one to go on with: beyond
// end when nothing is left up to there. It is not when the server's count said that nothing is
// left: that takes off what is replaced at once, and adds what replaces it a little later, so it
// may be too low for a moment.
func (c *core) readOn(ctx context.Context, stream string, from, end uint64, headersOnly bool, f func(*storedMsg) error) (uint64, error) {
	r, pending, err := c.openFeed(ctx, stream, natsjs.ConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: max(from, 1), HeadersOnly: headersOnly,
	})
	if err != nil {
		return from, err
	}
	defer r.close(ctx)
	for pending > 0 && from <= end {
		m, left, err := r.next(ctx, feedHeartbeat)
		if errors.Is(err, errIdle) {
			if pending, err = r.pending(ctx); err != nil {
				return from, err
			}
			continue // what was counted may have been removed meanwhile
		}
		if err != nil {
			return from, err
		}
		if m.seq > end {
			return end + 1, nil
		}
		if err := f(m); err != nil {
			return from, &stopError{err}
		}
		from, pending = m.seq+1, left
	}
	return from, nil
}

// keepReading calls follow again and again, until ctx or the bus ends, or what it returns is no
// passing failure: a reader's own error, one that a client may be told, or one of final. reached
// says how far it came.
func (c *core) keepReading(ctx context.Context, topic string, follow func(context.Context) error, reached func() uint64, final ...error) error {
	if c.closing() {
		return event.ErrClosed
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)() //nolint:contextcheck // the end of the bus ends the reading too
	const first, longest = 50 * time.Millisecond, 2 * time.Second
	for wait := first; ; {
		came := reached()
		err := follow(ctx)
		own, stops := errors.AsType[*stopError](err)
		known, isKnown := errors.AsType[*event.Error](err)
		switch {
		case stops:
			return own.err
		case slices.ContainsFunc(final, func(end error) bool { return errors.Is(err, end) }):
			return err
		case c.ctx.Err() != nil:
			return event.ErrClosed
		case ctx.Err() != nil:
			return ctx.Err()
		case isKnown && known.Code != event.CodeInternal:
			return err
		}
		if wait = min(2*wait, longest); reached() > came {
			wait = first
		}
		c.often.Log(ctx, slog.LevelWarn, "a reader was cut off and goes on", topic, slog.String("topic", topic), slog.Any("error", err))
		_ = c.pause(ctx, wait) // why it ended is looked at above
	}
}

// pause waits, unless ctx or the bus ends.
func (c *core) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-c.ctx.Done():
		return event.ErrClosed
	}
}
