package projections

import (
	"context"
	"errors"

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
		var next *jetstream.Event
		err := insist(ctx, a.p.Logger, "look for earlier events of a key", func(ctx context.Context) (err error) {
			next, err = a.bus.History(a.p.Topic).NextOfKey(ctx, key, after)
			if errors.Is(err, jetstream.ErrNotFound) {
				next, err = nil, nil
			}
			return err
		})
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
