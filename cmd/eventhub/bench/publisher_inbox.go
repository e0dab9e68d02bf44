package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/nats-io/nats.go"
)

// inboxPublisher publishes natively with a single reply inbox, the fastest way with nats.go.
// Confirmations need no correlation, because the server confirms in order.
type inboxPublisher struct {
	conn    *nats.Conn
	sub     *nats.Subscription
	subject string
	inbox   string
	slots   chan int64 // due times of the unconfirmed events, in order
	sent    int64
	acked   atomic.Int64
	first   atomic.Pointer[error]
	times   *hdrhistogram.Histogram // nil if not timed
}

var (
	errNotStored = errors.New("server did not store an event")
	duplicate    = []byte(`"duplicate"`)
	acknowledged = []byte(`{"stream":`)
)

func (s *system) newInboxPublisher(via string, p publishing, times *hdrhistogram.Histogram) (*inboxPublisher, error) {
	nc, err := s.connect(via)
	if err != nil {
		return nil, err
	}
	i := &inboxPublisher{conn: nc, subject: eventSubject(p.topic), inbox: nc.NewInbox(), slots: make(chan int64, p.inFlight)}
	if p.timed {
		i.times = times
	}
	if i.sub, err = nc.Subscribe(i.inbox, i.confirm); err == nil {
		err = i.sub.SetPendingLimits(-1, -1)
	}
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("subscribe to the reply inbox: %w", err)
	}
	return i, nil
}

func (i *inboxPublisher) confirm(m *nats.Msg) {
	if !bytes.HasPrefix(m.Data, acknowledged) || bytes.Contains(m.Data, duplicate) {
		err := fmt.Errorf("%w: %.200s %v", errNotStored, m.Data, m.Header)
		i.first.CompareAndSwap(nil, &err)
	}
	due := <-i.slots
	if i.times != nil {
		record(i.times, now()-due)
	}
	i.acked.Add(1)
}

func (i *inboxPublisher) send(payload []byte, id string, due int64) error {
	if err := i.first.Load(); err != nil {
		return *err
	}
	select {
	case i.slots <- due:
	default:
		timer := time.NewTimer(stallAfter)
		defer timer.Stop()
		select {
		case i.slots <- due:
		case <-timer.C:
			return fmt.Errorf("no event confirmed within %v", stallAfter)
		}
	}
	i.sent++
	if id == "" {
		return i.conn.PublishRequest(i.subject, i.inbox, payload)
	}
	return i.conn.PublishMsg(&nats.Msg{
		Subject: i.subject, Reply: i.inbox, Data: payload, Header: nats.Header{nats.MsgIdHdr: []string{id}},
	})
}

func (i *inboxPublisher) drain(ctx context.Context) error {
	ticker := time.NewTicker(100 * time.Microsecond)
	defer ticker.Stop()
	timeout := time.NewTimer(stallAfter)
	defer timeout.Stop()
	for i.acked.Load() < i.sent {
		select {
		case <-ticker.C:
		case <-timeout.C:
			return fmt.Errorf("%d events not confirmed within %v", i.sent-i.acked.Load(), stallAfter)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := i.first.Load(); err != nil {
		return *err
	}
	return nil
}

func (i *inboxPublisher) close() error {
	i.conn.Close()
	return nil
}
