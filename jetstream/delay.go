package jetstream

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
)

// delaysBucket names the events that were refused with a delay, for the start of an embedded
// server: what it finds leased is given back at once, but not these. The server itself remembers
// until when they wait.
const (
	delaysBucket = "eventhub_delays"
	// delaysAge is longer than any delay.
	delaysAge   = maxAckTimeout + time.Hour
	delaysBytes = 1 << 28
	// minDelay is the shortest delay that is worth a note: a start takes about as long.
	minDelay = time.Second
)

// noteDelay stores that an event waits. It does not block.
func (c *core) noteDelay(d *Delivery, delay time.Duration) {
	if c.cfg.Server == nil || delay < minDelay {
		return
	}
	until := time.Now().Add(delay).UnixMilli()
	msg := &nats.Msg{Subject: "$KV." + delaysBucket + "." + d.eventKey(), Data: strconv.AppendInt(nil, until, 10)}
	// When it fails, the connection is down, and the refusal is lost as well.
	_ = d.m.sub.link.Ask(msg, c.clock.Now(), conn.AskerFunc(func(*nats.Msg, error) {}))
}

// readDelays returns the keys of the events that still wait.
func readDelays(ctx context.Context, js natsjs.JetStream) (map[string]bool, error) {
	kv, err := js.KeyValue(ctx, delaysBucket)
	if err != nil {
		return nil, err
	}
	all, err := kv.WatchAll(ctx, natsjs.IgnoreDeletes())
	if err != nil {
		return nil, err
	}
	defer func() { _ = all.Stop() }()
	now := time.Now().UnixMilli()
	waiting := make(map[string]bool)
	for {
		select {
		case e, open := <-all.Updates():
			switch {
			case !open:
				return nil, errors.New("the watch of the delays ended")
			case e == nil:
				return waiting, nil
			}
			if until, err := strconv.ParseInt(string(e.Value()), 10, 64); err == nil && until > now {
				waiting[e.Key()] = true
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
