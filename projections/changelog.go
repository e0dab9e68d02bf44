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

// Replace is the Apply of a Projection that copies a topic: the newest payload of each key, and nothing for a key that a
// tombstone removed.
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

// Checkpoint is how far a Table is: all events up to Position are in it.
type Checkpoint struct {
	Position
	// StoredAt is when the event there was stored, in epoch nanoseconds.
	StoredAt int64
}

func checkpointOf(e *jetstream.Event) Checkpoint { return Checkpoint{positionOf(e), e.StoredAt} }

// covers reports whether e is at or before the checkpoint. An event of a lower sequence that was
// stored later is not: its stream was deleted and made again.
func (p Checkpoint) covers(e *jetstream.Event) bool {
	return e.Stream == p.Stream && e.Sequence <= p.Sequence && e.StoredAt <= p.StoredAt
}

// Change is what became of a key.
type Change struct {
	Key string
	// Event is the newest event of the key; a tombstone removes it.
	Event *jetstream.Event
}

// Table keeps rows by key, and how far they are, so that both change in one transaction. SQLTable is one. It is for one
// goroutine at a time; other instances may use the same table. A panic counts as an error.
type Table interface {
	// Checkpoint returns how far the table is; the zero Checkpoint when nothing was written to it.
	Checkpoint(ctx context.Context) (Checkpoint, error)
	// Commit writes changes, one a key, and moves the table from one checkpoint to another, in one
	// transaction. It returns ErrConflict, with nothing changed, when the table is not at from.
	Commit(ctx context.Context, from, to Checkpoint, changes []Change) error
}

// Changelog keeps a Table up to date with a topic: each key's newest event is its row, tombstones
// remove it. Rows and position commit in one transaction, so that whatever is killed when, the
// table is what the events up to its checkpoint make of it. Any number of instances may run side by
// side; one of them writes at a time.
//
// For a KV bucket instead of a table, run a Projection with Replace.
type Changelog struct {
	// Bus is where events come from. Required.
	Bus Bus
	// Topic and Group are as of a Projection. Required.
	Topic, Group string
	// From is where the group starts when it is new. Default: jetstream.FromLatest, the end of the
	// topic.
	From jetstream.Position
	// Into is the table. Required.
	Into Table
	// Batch is the most events of one transaction: default 500, 10,000 at most.
	Batch int
	// Attempts is how often one event alone is tried whose transaction fails while others succeed: default 5. Then it goes
	// to the dead letters, and the table goes on behind it.
	Attempts int
	// Observer is told what happens. Default: nobody.
	Observer Observer
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
}

// Run keeps the table up to date until ctx ends, and then returns nil with its leases handed back. Failures of the bus and
// of the table are logged and tried again; an error is returned when the configuration is wrong or the bus is closed.
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
		return nil //nolint:nilerr // being asked to end is no failure
	}
	return fmt.Errorf("changelog of %s: %w", c.Topic, err)
}

// changelog is a Changelog that runs. One goroutine at a time uses it.
type changelog struct {
	p     *Projection
	bus   Bus
	table Table

	at      Checkpoint // of the table, as far as it is known
	known   bool
	floor   uint64 // the first event that is the group's business
	reached uint64 // see feed
	batch   []*jetstream.Event
}

func (c *changelog) run(ctx context.Context) error {
	var f *feed
	f = newFeed(c.p.Logger, func(*jetstream.Event) string { return "" }, c.p.InFlight, func(ctx context.Context, l *lane, jobs []job) error {
		return c.take(ctx, jobs, func() { f.fails(l) })
	})
	return f.run(ctx, c.bus, c.p.Topic, c.p.Group, c.p.From, c.p.InFlight)
}

// take brings the table up to the jobs.
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

// ahead is where the table will be with the batch.
func (c *changelog) ahead() Checkpoint {
	if n := len(c.batch); n > 0 {
		return checkpointOf(c.batch[n-1])
	}
	return c.at
}

// locate asks the table how far it is.
func (c *changelog) locate(ctx context.Context) error {
	err := insist(ctx, c.p.Logger, "read the checkpoint of a table", func(ctx context.Context) (err error) {
		c.at, err = c.table.Checkpoint(ctx)
		return err
	})
	c.known = err == nil
	return err
}

// fillTo writes the stored events behind the table's checkpoint until e is among them; see
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
	c.batch = append(c.batch, e) // it was removed from the stream, and all before it as well
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
			// Another instance was first: what is behind its checkpoint is left to do.
			for len(events) > 0 && c.at.covers(events[0]) {
				c.p.Observer.Projected(c.p.Name, Known)
				events = events[1:]
			}
			continue
		}
		c.p.Logger.LogAttrs(ctx, slog.LevelWarn, "rows could not be written", slog.String("group", c.p.Group), slog.Int("events", len(events)), slog.Any("error", err))
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

// commit writes events, in the order of the stream, in one transaction.
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

// move commits changes, and knows where the table is then, whatever comes of it.
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

// sound reports whether the table takes a transaction at all: then it is the rows that it refuses.
func (c *changelog) sound(ctx context.Context) bool {
	if c.at == (Checkpoint{}) { // a new table: there is nothing to move
		_, err := c.table.Checkpoint(ctx)
		return err == nil
	}
	return c.table.Commit(ctx, c.at, c.at, nil) == nil
}

// oneByOne commits events each in a transaction of its own; what the table refuses again and again goes to the dead
// letters.
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
