package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// Group has the operations on a group from outside; members use Bus.Subscribe or Bus.Consume. A
// Group is a small value that costs nothing to create, and creating one checks nothing. Its methods
// may be called concurrently. They return a bad_topic or bad_group *Error for invalid names, an
// internal *Error when NATS fails to answer properly, and ErrClosed.
type Group struct {
	bus         *Bus
	topic, name string
}

// Group gives access to a group of a topic.
func (b *Bus) Group(topic, name string) Group { return Group{b, topic, name} }

// Cursor is the position of a group: the newest event up to which every event is acknowledged.
type Cursor struct {
	Topic string
	// LastID and LastTS (epoch milliseconds of storage) belong to the last event up to which every
	// event is acknowledged. Both are empty when no event is acknowledged yet. LastID is also empty
	// when that event has been removed.
	LastID string
	LastTS int64
}

// Cursor returns the position up to which the group has acknowledged every event. It returns
// ErrNotFound when the topic or the group does not exist.
func (g Group) Cursor(ctx context.Context) (Cursor, error) {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return Cursor{}, err
	}
	t, _, err := b.streams.FreshExisting(ctx, topic)
	if err != nil {
		return Cursor{}, err
	}
	ptr, err := b.records.Generation(ctx, t, group)
	if err != nil {
		return Cursor{}, b.conn.Unavailable(err)
	}
	info, err := b.records.GroupConsumer(ctx, t, &ptr)
	if errors.Is(err, event.ErrNotFound) {
		return Cursor{}, event.ErrNotFound
	}
	if err != nil {
		return Cursor{}, b.conn.Unavailable(err)
	}
	c := Cursor{Topic: topic}
	c.LastID, c.LastTS, err = b.reads.LastSettled(ctx, t, info)
	return c, err
}

// Backlog is the progress of a group.
type Backlog struct {
	// Waiting is the number of events that were not delivered yet. Leased is the number of events
	// that were delivered and are not settled.
	Waiting, Leased uint64
	// Floor is the sequence up to which every event is settled. Tail is the last sequence of the
	// stream, other topics of a family included.
	Floor, Tail uint64
	// PutBack is the number of dead-lettered events that were put back to the group and were not
	// delivered yet (DeadLetters.Redrive). PutBackLeased is the number of those that were delivered
	// and are not settled. Waiting and Leased count neither.
	PutBack, PutBackLeased uint64
}

// Backlog returns the progress of the group. It returns ErrNotFound when the topic or the group
// does not exist.
func (g Group) Backlog(ctx context.Context) (Backlog, error) {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return Backlog{}, err
	}
	t, state, err := b.streams.FreshExisting(ctx, topic)
	if err != nil {
		return Backlog{}, err
	}
	ptr, err := b.records.Generation(ctx, t, group)
	if err != nil {
		return Backlog{}, b.conn.Unavailable(err)
	}
	info, err := b.records.GroupConsumer(ctx, t, &ptr)
	if errors.Is(err, event.ErrNotFound) {
		return Backlog{}, event.ErrNotFound
	}
	if err != nil {
		return Backlog{}, b.conn.Unavailable(err)
	}
	backlog := Backlog{
		Waiting: info.NumPending, Leased: uint64(max(info.NumAckPending, 0)),
		Floor: info.AckFloor.Stream, Tail: state.LastSeq,
	}
	if backlog.PutBack, backlog.PutBackLeased, err = b.queues.putBackCount(ctx, ptr.PutBack); err != nil {
		return Backlog{}, b.conn.Unavailable(err)
	}
	return backlog, nil
}

// Delete removes the group with its position, and what the hub has noted about it. It returns
// ErrNotFound when the topic or the group does not exist. The subscriptions of its members end, on
// all hubs, if they have SubscribeOptions.OnDeleted; other members make the group again, at its
// oldest unsettled event. A group of the same name that is made later is a new one.
//
// One compare-and-set deletes the group: from then on, no hub uses its consumer. A hub that dies
// before it has removed the rest leaves that to the next Delete, or to the sweeper.
func (g Group) Delete(ctx context.Context) error {
	b, topic, group := g.bus, g.topic, g.name
	if err := ValidGroup(group); err != nil {
		return err
	}
	for range 8 {
		t, _, err := b.streams.FreshExisting(ctx, topic)
		if err != nil {
			return err
		}
		ptr, err := b.records.Generation(ctx, t, group)
		if err != nil {
			return b.conn.Unavailable(err)
		}
		info, err := b.records.Consumer(ctx, t, ptr.Consumer)
		exists := err == nil
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return b.conn.Unavailable(err)
		}
		if exists && !ptr.Deleted {
			_, err := b.records.Swap(ctx, t, group, ptr, records.Generation{Generation: native.Generation{Number: ptr.Number, Consumer: ptr.Consumer, After: ptr.After, Deleted: true}})
			if errors.Is(err, records.ErrMoved) {
				continue
			}
			if err != nil {
				return b.conn.Unavailable(err)
			}
		}
		maker := ""
		if exists {
			maker = info.Config.Metadata[records.MetaMaker]
			if err := b.conn.JS.DeleteConsumer(ctx, t.Stream.Name, ptr.Consumer); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
				return b.conn.Unavailable(fmt.Errorf("jetstream: delete group %q on stream %s: %w", group, t.Stream.Name, err))
			}
		}
		if err := b.records.Forget(ctx, t, group, maker); err != nil {
			return b.conn.Unavailable(err)
		}
		if err := b.queues.dropQueue(ctx, ptr.PutBack); err != nil {
			return b.conn.Unavailable(err)
		}
		if !exists || ptr.Deleted {
			return event.ErrNotFound
		}
		b.log.InfoContext(ctx, "group deleted", slog.String("topic", topic), slog.String("group", group))
		return nil
	}
	return &event.Error{Code: event.CodeOverloaded, Msg: "the group is being moved by others again and again: try later"}
}
