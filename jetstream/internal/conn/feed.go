package conn

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Bounds of a feed.
const (
	// what has come and was not read yet; the server stops sending at half of it
	feedBytes     = 64 << 20
	feedReady     = 512 // messages of those that are ready to be read
	FeedHeartbeat = time.Second
	feedSilence   = 3 // heartbeats without a sign of life, after which it counts as cut off
)

// feed reads a stream's messages in order. The server pushes them through an ephemeral consumer
// without acks, as far as flow control lets it, and forgets the consumer by itself when the hub
// dies. What is lost on the way ends the feed: who reads it begins a new one behind the last
// message.
type feed struct {
	pool   *Pool
	stream string
	link   *Link
	sub    *nats.Subscription
	name   string // of the consumer

	ready     chan *nats.Msg
	done      chan struct{}
	heartbeat *time.Ticker
	quiet     int    // heartbeats without a sign of life
	seen      uint64 // messages
}

var (
	// ErrIdle is returned where no message came for a while.
	ErrIdle = fmt.Errorf("jetstream: no message came: %w", context.DeadlineExceeded)
	// ErrFeedCut is returned where messages were lost, or none can come any more.
	ErrFeedCut = errors.New("jetstream: the messages of a stream were cut off")
)

// OpenFeed makes the consumer. pending is how many messages there are at first.
func (p *Pool) OpenFeed(ctx context.Context, stream string, cfg natsjs.ConsumerConfig) (f *feed, pending uint64, err error) {
	f = &feed{pool: p, stream: stream, link: p.Link(), ready: make(chan *nats.Msg, feedReady), done: make(chan struct{})}
	cfg.DeliverSubject = nats.NewInbox()
	if f.sub, err = f.link.NC.Subscribe(cfg.DeliverSubject, f.receive); err == nil {
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
	cfg.IdleHeartbeat = FeedHeartbeat
	f.name = rand.Text()
	cfg.Name = f.name
	f.heartbeat = time.NewTicker(FeedHeartbeat)
	consumer, err := p.JS.CreatePushConsumer(ctx, stream, cfg)
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

// Next waits for a message. It returns ErrIdle when none came for as long as wait, in whole
// heartbeats, if that is not 0.
func (f *feed) Next(ctx context.Context, wait time.Duration) (m *StoredMsg, pending uint64, err error) {
	for idle := time.Duration(0); ; {
		select {
		case msg := <-f.ready:
			f.quiet = 0
			p, ok := ParseAckSubject(msg.Reply)
			if !ok {
				if err := f.control(msg); err != nil {
					return nil, 0, err
				}
				continue
			}
			// without acks nothing is sent twice: a hole would stay one
			if f.seen++; p.Order != f.seen {
				return nil, 0, fmt.Errorf("%w: message %d is missing", ErrFeedCut, f.seen)
			}
			return &StoredMsg{Subject: msg.Subject, Seq: p.StreamSeq, Header: msg.Header, Data: msg.Data, Time: time.Unix(0, p.StoredAt)}, ackPending(msg.Reply[p.Prefix:]), nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		case <-f.heartbeat.C:
			if f.quiet++; f.quiet > feedSilence {
				return nil, 0, fmt.Errorf("%w: the server is silent", ErrFeedCut)
			}
			if idle += FeedHeartbeat; wait > 0 && idle >= wait {
				return nil, 0, ErrIdle
			}
		}
	}
}

// control answers flow control, and compares what a heartbeat says was sent with what came.
func (f *feed) control(m *nats.Msg) error {
	if m.Header.Get("Status") != "100" {
		return fmt.Errorf("%w: status %q", ErrFeedCut, m.Header.Get("Status"))
	}
	reply := m.Reply
	if reply == "" {
		if n, err := strconv.ParseUint(m.Header.Get("Nats-Last-Consumer"), 10, 64); err == nil && n > f.seen {
			return fmt.Errorf("%w: message %d is missing", ErrFeedCut, f.seen+1)
		}
		reply = m.Header.Get("Nats-Consumer-Stalled")
	}
	if reply == "" {
		return nil
	}
	return f.link.NC.Publish(reply, nil)
}

// Pending asks the server how many messages there are that were not read yet.
func (f *feed) Pending(ctx context.Context) (uint64, error) {
	c, err := f.pool.JS.PushConsumer(ctx, f.stream, f.name)
	if err != nil {
		return 0, err
	}
	info := c.CachedInfo()
	if info.Delivered.Consumer > f.seen {
		return info.NumPending + info.Delivered.Consumer - f.seen, nil
	}
	return info.NumPending, nil
}

// Close removes the consumer; what the server is not told it finds out in 30 s.
func (f *feed) Close(ctx context.Context) {
	f.heartbeat.Stop()
	f.unsubscribe()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = f.pool.JS.DeleteConsumer(ctx, f.stream, f.name)
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
		if err := f.pool.JS.DeleteConsumer(ctx, f.stream, f.name); !errors.Is(err, natsjs.ErrConsumerNotFound) || f.pool.Pause(ctx, 10*time.Millisecond) != nil {
			return
		}
	}
}

func (f *feed) unsubscribe() {
	close(f.done)
	_ = f.sub.Unsubscribe() // it fails where the connection is closed, which ends it too
}
