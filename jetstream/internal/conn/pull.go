package conn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// puller reads what a consumer without acks has, batch by batch. It costs a third less than the
// consumers of nats.go.
type puller struct {
	link    *Link
	subject string // of requests
	inbox   string
	sub     *nats.Subscription
	batches chan *nats.Msg
}

// MaxPull is the most messages of one pull.
const MaxPull = 1_000

// NewPuller makes a puller of a consumer, which may be made later. The caller closes it. It asks
// over the connection over which the consumer is made: the servers behind others may learn of the
// consumer later.
func (p *Pool) NewPuller(stream, consumer string) (*puller, error) {
	r := &puller{link: p.Links[0], subject: p.API + "CONSUMER.MSG.NEXT." + stream + "." + consumer, inbox: nats.NewInbox()}
	// all that may come, so that nothing is ever dropped
	r.batches = make(chan *nats.Msg, MaxPull+2)
	var err error
	r.sub, err = r.link.NC.ChanSubscribe(r.inbox, r.batches)
	return r, err
}

func (p *puller) Close() { _ = p.sub.Unsubscribe() } // it fails where the connection is closed

// ErrPullEnded is returned for a consumer that is gone.
var ErrPullEnded = errors.New("the consumer ended")

// Pull calls f for up to n messages that the consumer has by now, at most MaxPull, and returns how
// many there were. It does not wait for more.
func (p *puller) Pull(ctx context.Context, n int, f func(m *nats.Msg, meta DeliveryMeta, pending uint64) error) (got int, err error) {
	n = min(n, MaxPull)
	req, err := json.Marshal(map[string]any{"batch": n, "no_wait": true})
	if err != nil {
		return 0, err
	}
	if err := p.link.NC.PublishMsg(&nats.Msg{Subject: p.subject, Reply: p.inbox, Data: req}); err != nil {
		return 0, err
	}
	alive := time.NewTicker(250 * time.Millisecond)
	defer alive.Stop()
	for silent := time.Now(); got < n; {
		var m *nats.Msg
		select { // most are there already
		case m = <-p.batches:
		default:
		}
		if m == nil {
			select {
			case m = <-p.batches:
			case <-ctx.Done():
				return got, ctx.Err()
			case <-alive.C:
				if !p.link.Up.Load() {
					return got, ErrCut
				}
				if time.Since(silent) > PublishWait {
					return got, ErrNoReply
				}
				continue
			}
		}
		if got == 0 {
			silent = time.Now()
		}
		meta, ok := ParseAckSubject(m.Reply)
		if !ok {
			switch status := m.Header.Get("Status"); status {
			case "404", "408":
				return got, nil // there are no more
			case "409", "503":
				return got, fmt.Errorf("%w: %s", ErrPullEnded, m.Header.Get("Description"))
			default:
				return got, fmt.Errorf("status %q: %s", status, m.Header.Get("Description"))
			}
		}
		got++
		if err := f(m, meta, ackPending(m.Reply[meta.Prefix:])); err != nil {
			return got, err
		}
	}
	return got, nil
}
