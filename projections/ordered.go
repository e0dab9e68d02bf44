package projections

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"eventhub/jetstream"
)

const (
	// fillTries is how often a delivered event is looked for in its stream, over 3 s in all.
	fillTries = 6
	// scanOverlap is how far a read of the stream goes back before the last event that was applied, in case the clock of
	// the stream's server was set back in between.
	scanOverlap = time.Second
)

// errFar ends a read of the stream that has come far enough.
var errFar = errors.New("far enough")

// ordered goes through a topic in the order of its stream, for projections whose keys lie anywhere in it: one lane for all.
// A delivery says that there is something to do; where it leaves a hole to what was done last, the stream is read in
// between. Every instance sees every event so, and those that another one has applied already are known by their states.
type ordered struct {
	a *applier

	// mu is held by whoever applies: there is one writer in an instance.
	mu sync.Mutex
	// All events up to at are applied, by whichever instance. Without a stream, it is only a
	// moment.
	at      Checkpoint
	floor   uint64 // the first event that is the group's business
	span    uint64
	keyless Position // where the last event lies that was delivered and has no key because Key failed
}

// run runs it until ctx ends.
func (o *ordered) run(ctx context.Context, group string, from jetstream.Position) error {
	err := insist(ctx, o.a.p.Logger, "read the group's cursor", func(ctx context.Context) error {
		cursor, err := o.a.bus.Group(o.a.p.Topic, group).Cursor(ctx)
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
			return err
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		o.at.StoredAt = max(o.at.StoredAt, cursor.LastTS*int64(time.Millisecond))
		return nil
	})
	if err != nil {
		return err
	}
	var f *feed
	work := func(ctx context.Context, l *lane, jobs []job) error {
		return o.deliver(ctx, jobs[0], func() { f.fails(l) })
	}
	f = newFeed(o.a.p.Logger, func(*jetstream.Event) string { return "" }, 1, work)
	return f.run(ctx, o.a.bus, o.a.p.Topic, group, from, o.a.p.InFlight)
}

// deliver applies everything up to a delivered event.
func (o *ordered) deliver(ctx context.Context, j job, fails failing) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	e := &j.Event
	o.floor = j.GroupStart()
	if _, tries, err := o.a.key(ctx, e, fails); ctx.Err() != nil {
		return ctx.Err()
	} else if err != nil {
		if err := o.a.passOver(ctx, e, err, tries); err != nil {
			return err
		}
		o.keyless = positionOf(e)
	}
	if !j.follows(o.span) && !o.at.covers(e) {
		if err := o.fillTo(ctx, e, fails); err != nil {
			return err
		}
	}
	if !o.at.covers(e) {
		if err := o.advance(ctx, e, fails); err != nil {
			return err
		}
	}
	o.span = max(o.span, j.reached())
	return nil
}

// tail applies all events that are stored at this moment.
func (o *ordered) tail(ctx context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fill(ctx, nil, func() {})
}

// fillTo applies the stored events after the last one that was applied until e, which was
// delivered, is among them. A replica that lags may not show it at once. When it stays away, it was
// removed from the stream, and all before it as well.
func (o *ordered) fillTo(ctx context.Context, e *jetstream.Event, fails failing) error {
	wait := retryFirst
	for range fillTries {
		err := insist(ctx, o.a.p.Logger, "read the topic", func(ctx context.Context) error { return o.fill(ctx, e, fails) })
		if err != nil {
			return err
		}
		if o.at.covers(e) {
			return nil
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
	return nil
}

// fill applies the stored events after the last one that was applied, up to e; nil: to the end.
func (o *ordered) fill(ctx context.Context, e *jetstream.Event, fails failing) error {
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt}
	if o.at.StoredAt > 0 {
		opts.From = jetstream.FromTime(time.Unix(0, o.at.StoredAt).Add(-scanOverlap))
	}
	err := o.a.bus.History(o.a.p.Topic).Scan(ctx, opts, func(next *jetstream.Event) error {
		if next.Sequence < o.floor || o.at.covers(next) {
			return nil
		}
		if err := o.advance(ctx, next, fails); err != nil {
			return err
		}
		if e != nil && o.at.covers(e) {
			return errFar
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFar) {
		return fmt.Errorf("read %s: %w", o.a.p.Topic, err)
	}
	return nil
}

// advance applies e, which follows what was applied before. What has no key is passed over: its own
// delivery leads it to the dead letters.
func (o *ordered) advance(ctx context.Context, e *jetstream.Event, fails failing) error {
	if positionOf(e) != o.keyless {
		key, _, err := o.a.key(ctx, e, fails)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil && key != "" {
			if err := o.a.apply(ctx, key, e, 0, fails); err != nil {
				return err
			}
		}
	}
	o.at = checkpointOf(e)
	return nil
}
