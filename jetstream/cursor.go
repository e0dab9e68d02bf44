package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Group is what can be asked of a group from outside, and done to it: its members subscribe
// (Bus.Subscribe, Bus.Consume). It is a small value that costs nothing to make; making it checks
// nothing. Its methods may be called concurrently. They return a bad_topic or bad_group *Error for
// names that are none, an internal *Error when NATS does not answer as it should, and ErrClosed.
type Group struct {
	bus         *Bus
	topic, name string
}

// Group gives access to a group of a topic.
func (b *Bus) Group(topic, name string) Group { return Group{b, topic, name} }

// Cursor is a group's position: the newest event up to which everything is acknowledged.
type Cursor struct {
	Topic string
	// LastID and LastTS (epoch milliseconds of storage) are of the last event up to which all are
	// acknowledged. Empty when nothing is acknowledged yet. LastID is empty too when that event was
	// removed meanwhile.
	LastID string
	LastTS int64
}

// Cursor returns up to where the group has acknowledged everything. It returns ErrNotFound when the
// topic or the group does not exist.
func (g Group) Cursor(ctx context.Context) (Cursor, error) {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return Cursor{}, err
	}
	t, _, err := b.freshExisting(ctx, topic)
	if err != nil {
		return Cursor{}, err
	}
	ptr, err := b.generations.get(ctx, t, group)
	if err != nil {
		return Cursor{}, b.unavailable(err)
	}
	info, err := b.consumer(ctx, t, ptr.Consumer)
	if errors.Is(err, ErrNotFound) {
		return Cursor{}, ErrNotFound
	}
	if err != nil {
		return Cursor{}, b.unavailable(err)
	}
	c := Cursor{Topic: topic}
	if info.AckFloor.Consumer == 0 { // a new consumer shows start-1 as its floor
		return c, nil
	}
	e, err := b.bySequence(ctx, t, info.AckFloor.Stream)
	switch {
	case err == nil:
		c.LastID, c.LastTS = e.ID, e.StoredAt/1e6
	case errors.Is(err, ErrNotFound):
		if info.AckFloor.Last != nil {
			c.LastTS = info.AckFloor.Last.UnixMilli()
		}
	default:
		return Cursor{}, b.unavailable(err)
	}
	return c, nil
}

// Seek moves the group, live members on every hub included; a group that does not exist is made
// there. When Seek returns, no ack of an event delivered before counts for an event delivered
// after.
//
// Neither a consumer's reset nor one of the same name made anew fences acks that are under way, so
// each seek makes a consumer of a new name and makes it the group's generation in one
// compare-and-set.
func (g Group) Seek(ctx context.Context, to Position) error {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return err
	}
	if err := to.validate(); err != nil {
		return err
	}
	for range 8 {
		t, state, err := b.freshTopic(ctx, topic, "")
		if err != nil {
			return err
		}
		start, err := b.resolve(ctx, t, to, state)
		if err != nil {
			return err
		}
		ptr, err := b.generations.get(ctx, t, group)
		if err != nil {
			return b.unavailable(err)
		}
		ttl := time.Duration(0)
		if info, err := b.consumer(ctx, t, ptr.Consumer); err == nil {
			ttl = info.Config.InactiveThreshold
		} else if !errors.Is(err, ErrNotFound) {
			return b.unavailable(err)
		}
		_, _, err = b.moveGroup(ctx, t, group, ptr, ttl, start)
		if errors.Is(err, errGroupMoved) {
			continue
		}
		if err != nil {
			return b.unavailable(err)
		}
		b.deleteConsumer(ctx, t.stream.name, ptr.Consumer)
		return nil
	}
	return &Error{Code: CodeOverloaded, Msg: "the group is being moved by others again and again: try later"}
}

// Backlog is how far a group is.
type Backlog struct {
	// Waiting is the number of events that were not delivered yet, Leased of those that were and
	// are not settled.
	Waiting, Leased uint64
	// Floor is the sequence up to which everything is settled, Tail the last one of the stream,
	// other topics of a family included.
	Floor, Tail uint64
}

// Backlog returns how far the group is. It returns ErrNotFound when the topic or the group does not
// exist.
func (g Group) Backlog(ctx context.Context) (Backlog, error) {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return Backlog{}, err
	}
	t, state, err := b.freshExisting(ctx, topic)
	if err != nil {
		return Backlog{}, err
	}
	ptr, err := b.generations.get(ctx, t, group)
	if err != nil {
		return Backlog{}, b.unavailable(err)
	}
	info, err := b.consumer(ctx, t, ptr.Consumer)
	if errors.Is(err, ErrNotFound) {
		return Backlog{}, ErrNotFound
	}
	if err != nil {
		return Backlog{}, b.unavailable(err)
	}
	return Backlog{
		Waiting: info.NumPending, Leased: uint64(max(info.NumAckPending, 0)),
		Floor: info.AckFloor.Stream, Tail: state.LastSeq,
	}, nil
}

// Delete removes the group with its position. Its members, on all hubs, must have ended: one that
// lives makes the group anew. A group that does not exist is no error. The server needs a moment
// after it has answered: a group of the same name that is made at once may begin with what the old
// one held.
func (g Group) Delete(ctx context.Context) error {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return err
	}
	t, _, err := b.freshExisting(ctx, topic)
	if errors.Is(err, ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	ptr, err := b.generations.get(ctx, t, group)
	if err != nil {
		return b.unavailable(err)
	}
	// The generation stays, if one is stored: it says only how the next consumer is called.
	if err := b.js.DeleteConsumer(ctx, t.stream.name, ptr.Consumer); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
		return b.unavailable(fmt.Errorf("jetstream: delete group %q on stream %s: %w", group, t.stream.name, err))
	}
	return nil
}
