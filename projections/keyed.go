package projections

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// runKeyed runs a projection that uses the events' own keys. Each key is a lane, and missed events
// are found by key.
func runKeyed(ctx context.Context, a *applier, group string, from jetstream.Position) error {
	var f *feed
	work := func(ctx context.Context, l *lane, jobs []job) error {
		j := jobs[0]
		if j.Event.Key == "" {
			return nil
		}
		fails := func() { f.fails(l) }
		if err := a.missed(ctx, j, fails); err != nil {
			return err
		}
		return a.apply(j.Context(ctx), j.Event.Key, &j.Event, j.reached(), fails)
	}
	f = newFeed(a.p.Logger, func(e *jetstream.Event) string { return e.Key }, 1, work)
	return f.run(ctx, a.bus, a.p.Topic, group, from, a.p.InFlight)
}

// missed applies the events of the delivery's key that lie between the key's state and the
// delivery.
func (a *applier) missed(ctx context.Context, j job, fails failing) error {
	key, e := j.Event.Key, &j.Event
	c, err := a.load(ctx, key)
	if panics.Is(err) {
		return nil // applying the delivery itself reports the panic
	}
	if err != nil {
		return err
	}
	if j.follows(c.span) || c.state.Covers(e) {
		return nil
	}
	after := max(c.state.after(e), j.GroupStart()-1)
	for after+1 < e.Sequence {
		next, err := a.nextOfKey(ctx, after, e)
		if err != nil {
			return err
		}
		if next == nil || next.Sequence >= e.Sequence {
			return nil // events in between were removed by the topic's retention
		}
		if err := a.apply(ctx, key, next, 0, fails); err != nil {
			return err
		}
		after = next.Sequence
	}
	return nil
}

// errBehind says that a stream's leader answered before it had all that the stream has.
var errBehind = errors.New("the leader of the stream has not caught up")

// behindWait is how long a leader may take to catch up. A stream that was deleted and made again
// never does: its sequences are other ones.
const behindWait = 10 * time.Second

// nextOfKey returns the first event of the key of e after a sequence. It returns nil if the
// topic's retention has removed all of them up to e. A new leader of a stream may answer before it
// has applied the newest events, so an answer that lacks e counts only when the stream's leader
// has come as far as e.
func (a *applier) nextOfKey(ctx context.Context, after uint64, e *jetstream.Event) (next *jetstream.Event, err error) {
	history, began := a.bus.History(a.p.Topic), time.Now()
	err = insist(ctx, a.p.Logger, "look for earlier events of a key", func(ctx context.Context) (err error) {
		for caughtUp := false; ; {
			next, err = history.NextOfKey(ctx, e.Key, after)
			if !errors.Is(err, jetstream.ErrNotFound) || caughtUp {
				break
			}
			_, last, err := history.Bounds(ctx)
			if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
				return err
			}
			if last < e.Sequence && time.Since(began) < behindWait {
				return errBehind
			}
			caughtUp = true
		}
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil
		}
		return err
	})
	return next, err
}
