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
	// fillTries is the number of times that a delivered event is searched for in its stream, over
	// 3 seconds in all.
	fillTries = 6
	// scanOverlap is how far before the last applied event a scan of the stream starts, in case the
	// clock of the stream's server was set back.
	scanOverlap = time.Second
)

// errFar ends a scan of the stream that has reached its goal.
var errFar = errors.New("far enough")

// ordered applies a whole topic in stream order, for projections whose keys are not the events'
// own. It uses a single lane. A delivery only signals that there is work; events between the last
// applied event and the delivery are read from the stream. So every instance sees every event, and
// skips events that another instance has applied, which the states show.
type ordered struct {
	a *applier

	// mu is held while events are applied, so an instance has a single writer.
	mu sync.Mutex
	// Every event up to at has been applied, by any instance. If at has no stream, only its time is
	// valid.
	at      Checkpoint
	floor   uint64 // sequence of the first event that belongs to the group
	span    uint64
	keyless Position // position of the last delivered event for which Key failed
}

// run applies events until ctx ends.
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

// deliver applies every event up to and including a delivered event.
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

// tail applies every event that is stored at the time of the call.
func (o *ordered) tail(ctx context.Context) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fill(ctx, nil, func() {})
}

// fillTo applies the stored events after the last applied one until the delivered event e is
// covered. It retries, because a lagging replica may not show e at once. If e does not appear, it
// was removed from the stream, and so was everything before it.
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

// fill applies the stored events after the last applied one, up to e, or to the end if e is nil.
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

// advance applies e, the event after the last applied one. It skips an event without a key; the
// delivery of that event sends it to the dead letters.
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
