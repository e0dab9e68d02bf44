package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"eventhub/jetstream"
)

// Replace is an Apply function for a Projection that copies a topic. The state of a key is the
// payload of its newest event; a tombstone removes the key.
func Replace(_ context.Context, _ []byte, e *jetstream.Event) ([]byte, error) {
	switch {
	case e.Tombstone:
		return nil, nil
	case e.Payload == nil:
		return []byte{}, nil
	default:
		return e.Payload, nil
	}
}

// Checkpoint is the progress of a Table: every event up to Position has been applied to it.
type Checkpoint struct {
	Position
	// StoredAt is when the event at Position was stored, in epoch nanoseconds.
	StoredAt int64
}

func checkpointOf(e *jetstream.Event) Checkpoint { return Checkpoint{positionOf(e), e.StoredAt} }

// covers reports whether e is at or before the checkpoint. An event with a lower sequence that was
// stored later is not covered: its stream was deleted and created again.
func (p Checkpoint) covers(e *jetstream.Event) bool {
	return e.Stream == p.Stream && e.Sequence <= p.Sequence && e.StoredAt <= p.StoredAt
}

// Change is the new row of a key.
type Change struct {
	Key string
	// Event is the newest event of the key. A tombstone removes the row.
	Event *jetstream.Event
}

// Table stores rows by key together with a checkpoint, so that both change in one transaction.
// SQLTable implements it. An instance calls its Table from one goroutine at a time; several
// instances may share the underlying table. A panic counts as an error.
type Table interface {
	// Checkpoint returns the progress of the table, or the zero Checkpoint if nothing was written.
	Checkpoint(ctx context.Context) (Checkpoint, error)
	// Commit writes changes, at most one per key, and moves the checkpoint, in one transaction. If
	// the table's checkpoint is not from, Commit changes nothing and returns ErrConflict.
	Commit(ctx context.Context, from, to Checkpoint, changes []Change) error
}

// Changelog keeps a Table up to date with a topic. The newest event of each key becomes its row,
// and a tombstone removes the row. Rows and checkpoint are committed in one transaction, so the
// table always reflects exactly the events up to its checkpoint, even after a crash. Any number of
// instances may run concurrently; one of them writes at a time.
//
// To fill a KV bucket instead of a table, run a Projection with Replace.
type Changelog struct {
	// Bus is the source of the events. Required.
	Bus Bus
	// Topic is the topic to copy. Group is the group that consumes it. Required.
	Topic, Group string
	// From is the position at which a new group starts. Defaults to jetstream.FromLatest, the end
	// of the topic.
	From jetstream.Position
	// Into is the table to fill. Required.
	Into Table
	// Batch is the maximum number of events per transaction, at most 10,000. Defaults to 500.
	Batch int
	// Attempts is the number of attempts for a single event whose transaction fails while other
	// transactions succeed. The event then goes to the dead letters, and the table continues with
	// the next event. Defaults to 5.
	Attempts int
	// Observer receives metrics. Optional.
	Observer Observer
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
}

// Run keeps the table up to date until ctx ends, then returns its leases and returns nil. Failures
// of the bus and of the table are logged and retried. Run returns an error only if the
// configuration is invalid or the bus is closed.
func (c Changelog) Run(ctx context.Context) error {
	p := Projection{
		Topic: c.Topic, Group: c.Group, From: c.From, Attempts: c.Attempts, InFlight: c.Batch, Observer: c.Observer, Logger: c.Logger,
		Apply: Replace, Name: "changelog",
	}
	if p.InFlight == 0 {
		p.InFlight = 500
	}
	if err := p.validate(); err != nil {
		return err
	}
	p.Name = c.Group
	l := &changelog{p: &p, bus: c.Bus, table: guardedTable{c.Into, p.Logger}, floor: 1}
	err := l.run(ctx)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx is a normal stop
	}
	return fmt.Errorf("changelog of %s: %w", c.Topic, err)
}

// changelog is a running Changelog. Only one goroutine uses it at a time.
type changelog struct {
	p     *Projection
	bus   Bus
	table Table

	at      Checkpoint // last known checkpoint of the table
	known   bool
	floor   uint64 // sequence of the first event that belongs to the group
	reached uint64 // the last span in which the table was current; see feed
	batch   []*jetstream.Event
}

func (c *changelog) run(ctx context.Context) error {
	var f *feed
	f = newFeed(c.p.Logger, func(*jetstream.Event) string { return "" }, c.p.InFlight, func(ctx context.Context, l *lane, jobs []job) error {
		return c.take(ctx, jobs, func() { f.fails(l) })
	})
	return f.run(ctx, c.bus, c.p.Topic, c.p.Group, c.p.From, c.p.InFlight)
}

// take applies the jobs to the table.
func (c *changelog) take(ctx context.Context, jobs []job, fails failing) error {
	if !c.known {
		if err := c.locate(ctx); err != nil {
			return err
		}
	}
	c.batch = c.batch[:0]
	for i := range jobs {
		j := &jobs[i]
		e := &j.Event
		c.floor = j.GroupStart()
		switch {
		case c.ahead().covers(e):
			c.p.Observer.Projected(c.p.Name, Known)
		case j.follows(c.reached):
			c.batch = append(c.batch, e)
		default:
			if err := c.flush(ctx, fails); err != nil {
				return err
			}
			if err := c.fillTo(ctx, e, fails); err != nil {
				return err
			}
		}
		c.reached = max(c.reached, j.reached())
	}
	return c.flush(ctx, fails)
}

// ahead returns the checkpoint that the table will have after the batch.
func (c *changelog) ahead() Checkpoint {
	if n := len(c.batch); n > 0 {
		return checkpointOf(c.batch[n-1])
	}
	return c.at
}

// locate reads the checkpoint of the table.
func (c *changelog) locate(ctx context.Context) error {
	err := insist(ctx, c.p.Logger, "read the checkpoint of a table", func(ctx context.Context) (err error) {
		c.at, err = c.table.Checkpoint(ctx)
		return err
	})
	c.known = err == nil
	return err
}

// fillTo writes the stored events after the table's checkpoint until e is covered; see
// ordered.fillTo.
func (c *changelog) fillTo(ctx context.Context, e *jetstream.Event, fails failing) error {
	wait := retryFirst
	for range fillTries {
		err := insist(ctx, c.p.Logger, "read the topic", func(ctx context.Context) error { return c.fill(ctx, e, fails) })
		if err != nil {
			return err
		}
		if c.at.covers(e) {
			return nil
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
	c.batch = append(c.batch, e) // e was removed from the stream, and so was everything before it
	return nil
}

func (c *changelog) fill(ctx context.Context, e *jetstream.Event, fails failing) error {
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt}
	if c.at.StoredAt > 0 {
		opts.From = jetstream.FromTime(time.Unix(0, c.at.StoredAt).Add(-scanOverlap))
	}
	c.batch = c.batch[:0]
	err := c.bus.History(c.p.Topic).Scan(ctx, opts, func(next *jetstream.Event) error {
		if next.Sequence < c.floor || c.at.covers(next) {
			return nil
		}
		c.batch = append(c.batch, next)
		last := next.Stream == e.Stream && next.Sequence >= e.Sequence
		if len(c.batch) < c.p.InFlight && !last {
			return nil
		}
		if err := c.flush(ctx, fails); err != nil {
			return err
		}
		if last {
			return errFar
		}
		return nil
	})
	if err != nil && !errors.Is(err, errFar) {
		return fmt.Errorf("read %s: %w", c.p.Topic, err)
	}
	return c.flush(ctx, fails)
}

// flush commits the batch.
func (c *changelog) flush(ctx context.Context, fails failing) error {
	events := c.batch
	c.batch = c.batch[:0]
	for wait := retryFirst; len(events) > 0; {
		err := c.commit(ctx, events)
		switch {
		case err == nil:
			for range events {
				c.p.Observer.Projected(c.p.Name, Applied)
			}
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrConflict):
			// Another instance wrote first. Only the events after its checkpoint remain.
			for len(events) > 0 && c.at.covers(events[0]) {
				c.p.Observer.Projected(c.p.Name, Known)
				events = events[1:]
			}
			continue
		}
		c.p.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to write rows", slog.String("group", c.p.Group), slog.Int("events", len(events)), slog.Any("error", err))
		fails()
		if c.sound(ctx) {
			return c.oneByOne(ctx, events)
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
		wait = min(2*wait, retryMax)
	}
	return nil
}

// commit writes events in one transaction. The events must be in stream order.
func (c *changelog) commit(ctx context.Context, events []*jetstream.Event) error {
	at := make(map[string]int, len(events))
	changes := make([]Change, 0, len(events))
	for _, e := range events {
		if e.Key == "" {
			continue
		}
		if i, ok := at[e.Key]; ok {
			changes[i].Event = e
			continue
		}
		at[e.Key] = len(changes)
		changes = append(changes, Change{e.Key, e})
	}
	last := events[len(events)-1]
	return c.move(ctx, checkpointOf(last), changes)
}

// move commits changes. It updates c.at whether the commit succeeds or fails.
func (c *changelog) move(ctx context.Context, to Checkpoint, changes []Change) error {
	if err := c.table.Commit(ctx, c.at, to, changes); err != nil {
		if lerr := c.locate(ctx); lerr != nil {
			return lerr
		}
		if c.at == to {
			return nil
		}
		return err
	}
	c.at = to
	return nil
}

// sound reports whether the table accepts a transaction without rows. If so, a failure is due to
// the rows.
func (c *changelog) sound(ctx context.Context) bool {
	if c.at == (Checkpoint{}) { // a new table has no checkpoint to move
		_, err := c.table.Checkpoint(ctx)
		return err == nil
	}
	return c.table.Commit(ctx, c.at, c.at, nil) == nil
}

// oneByOne commits each event in its own transaction. An event that the table keeps rejecting goes
// to the dead letters.
func (c *changelog) oneByOne(ctx context.Context, events []*jetstream.Event) error {
	for _, e := range events {
		tries := 0
		for wait := retryFirst; !c.at.covers(e); wait = min(2*wait, retryMax) {
			err := c.commit(ctx, []*jetstream.Event{e})
			switch {
			case err == nil:
				c.p.Observer.Projected(c.p.Name, Applied)
				continue
			case ctx.Err() != nil:
				return ctx.Err()
			case errors.Is(err, ErrConflict):
				continue
			case c.sound(ctx):
				tries++
			}
			if tries < c.p.Attempts {
				if err := pause(ctx, wait); err != nil {
					return err
				}
				continue
			}
			derr := insist(ctx, c.p.Logger, "store a dead letter", func(ctx context.Context) error {
				return c.bus.Group(c.p.Topic, c.p.Group).DeadLetter(ctx, e, err.Error(), tries)
			})
			if derr != nil {
				return derr
			}
			if err := c.move(ctx, checkpointOf(e), nil); err == nil {
				c.p.Observer.Projected(c.p.Name, Poisoned)
			}
		}
	}
	return nil
}
