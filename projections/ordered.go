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
	// orderedBytes is how many bytes of payloads are applied together, and one event more.
	orderedBytes = 4 << 20
)

// errFar ends a scan of the stream that has reached its goal.
var errFar = errors.New("far enough")

// ordered applies a whole topic, for projections whose keys are not the events' own. It uses a
// single lane. A delivery only signals that there is work; events between the last applied event
// and the delivery are read from the stream. So every instance sees every event, and skips events
// that another instance has applied, which the states show.
//
// Events are applied in batches: those of a key one after another, in stream order, and different
// keys at the same time. The next batch begins when the whole batch has been applied.
type ordered struct {
	a *applier

	// mu is held while events are applied, so an instance applies one batch at a time.
	mu sync.Mutex
	// Every event up to at has been applied, by any instance. If at has no stream, only its time is
	// valid.
	at      Checkpoint
	batch   []keyedEvent // the events after at, in stream order; empty while mu is free
	bytes   int          // of the payloads of the batch
	floor   uint64       // sequence of the first event that belongs to the group
	span    uint64
	keyless Position // position of the last delivered event for which Key failed

	located chan struct{} // closed when at is where the group is
	tailing sync.Mutex    // so that the topic is read for one tail at a time
}

func newOrdered(a *applier) *ordered {
	return &ordered{a: a, floor: 1, located: make(chan struct{})}
}

// keyedEvent is an event and its key, which is "" for an event that is skipped.
type keyedEvent struct {
	key      string
	event    *jetstream.Event
	delivery *jetstream.Delivery // nil for an event that was read from the stream
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
	close(o.located)
	var f *feed
	work := func(ctx context.Context, l *lane, jobs []job) error {
		return o.deliver(ctx, jobs, func() { f.fails(l) })
	}
	f = newFeed(o.a.p.Logger, func(*jetstream.Event) string { return "" }, o.a.p.InFlight, work)
	return f.run(ctx, o.a.bus, o.a.p.Topic, group, from, o.a.p.InFlight)
}

// deliver applies every event up to and including the last of some deliveries.
func (o *ordered) deliver(ctx context.Context, jobs []job, fails failing) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	defer o.drop()
	span := o.span
	for _, j := range jobs {
		e := &j.Event
		o.floor = j.GroupStart()
		key, tries, err := o.a.key(ctx, e, fails)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			if err := o.a.passOver(ctx, e, err, tries); err != nil {
				return err
			}
			key, o.keyless = "", positionOf(e)
		}
		if ahead := o.ahead(); !j.follows(span) && !ahead.covers(e) {
			if err := o.flush(ctx, fails); err != nil {
				return err
			}
			if err := o.fillTo(ctx, e, fails); err != nil {
				return err
			}
		}
		if ahead := o.ahead(); !ahead.covers(e) {
			if err := o.take(ctx, keyedEvent{key, e, j.Delivery}, fails); err != nil {
				return err
			}
		}
		span = max(span, j.reached())
	}
	if err := o.flush(ctx, fails); err != nil {
		return err
	}
	o.span = span
	return nil
}

// tail applies every event that is stored at the time of the call. Deliveries are handled in
// between.
func (o *ordered) tail(ctx context.Context) error {
	select {
	case <-o.located:
	case <-ctx.Done():
		return ctx.Err()
	}
	o.tailing.Lock()
	defer o.tailing.Unlock()
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

// fill applies the stored events after the last applied one, up to e, or to the end if e is nil. In
// the latter case, fill gives up mu between batches. The batch is empty before and after.
func (o *ordered) fill(ctx context.Context, e *jetstream.Event, fails failing) error {
	defer o.drop()
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt}
	if o.at.StoredAt > 0 {
		opts.From = jetstream.FromTime(time.Unix(0, o.at.StoredAt).Add(-scanOverlap))
	}
	err := o.a.bus.History(o.a.p.Topic).Scan(ctx, opts, func(next *jetstream.Event) error {
		if ahead := o.ahead(); next.Sequence < o.floor || ahead.covers(next) {
			return nil
		}
		key := ""
		if positionOf(next) != o.keyless {
			k, _, err := o.a.key(ctx, next, fails)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err == nil { // otherwise the delivery of the event sends it to the dead letters
				key = k
			}
		}
		if err := o.take(ctx, keyedEvent{key: key, event: next}, fails); err != nil {
			return err
		}
		switch ahead := o.ahead(); {
		case e != nil && ahead.covers(e):
			return errFar
		case e == nil && len(o.batch) == 0: // it was applied
			o.mu.Unlock()
			o.mu.Lock()
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFar) {
		return fmt.Errorf("read %s: %w", o.a.p.Topic, err)
	}
	return o.flush(ctx, fails)
}

// ahead returns what at will be after the batch.
func (o *ordered) ahead() Checkpoint {
	if n := len(o.batch); n > 0 {
		return checkpointOf(o.batch[n-1].event)
	}
	return o.at
}

// take adds k, the event after the last one taken, to the batch, and applies a full batch.
func (o *ordered) take(ctx context.Context, k keyedEvent, fails failing) error {
	o.batch = append(o.batch, k)
	if o.bytes += len(k.event.Payload); len(o.batch) < o.a.p.InFlight && o.bytes < orderedBytes {
		return nil
	}
	return o.flush(ctx, fails)
}

// drop empties the batch.
func (o *ordered) drop() {
	clear(o.batch)
	o.batch, o.bytes = o.batch[:0], 0
}

// flush applies the batch.
func (o *ordered) flush(ctx context.Context, fails failing) error {
	if len(o.batch) == 0 {
		return nil
	}
	defer o.drop()
	byKey := make(map[string][]keyedEvent, len(o.batch))
	var keys []string
	for _, k := range o.batch {
		if k.key == "" {
			continue
		}
		if byKey[k.key] == nil {
			keys = append(keys, k.key)
		}
		byKey[k.key] = append(byKey[k.key], k)
	}
	err := o.a.each(ctx, keys, func(key string) error {
		for _, k := range byKey[key] {
			ctx := ctx
			if k.delivery != nil {
				ctx = k.delivery.Context(ctx)
			}
			if err := o.a.apply(ctx, key, k.event, 0, fails); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	o.at = o.ahead()
	return nil
}
