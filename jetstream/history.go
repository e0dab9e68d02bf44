package jetstream

import (
	"context"
	"errors"
	"fmt"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// NextOfKey returns the first event of a key behind a sequence of the topic's stream, read at the stream's leader. It returns
// ErrNotFound when there is none, or the topic does not exist.
func (b *Bus) NextOfKey(ctx context.Context, topic, key string, after uint64) (*Event, error) {
	t, err := b.existing(ctx, topic)
	if err != nil {
		return nil, err
	}
	m, err := b.getMsg(ctx, t.stream.name, map[string]any{"seq": after + 1, "next_by_subj": keyedSubject(topic, key)})
	if err != nil {
		if errors.Is(err, ErrNotFound) {
			return nil, ErrNotFound
		}
		return nil, b.unavailable(err)
	}
	return t.event(m), nil
}

// Backlog is how far a group is.
type Backlog struct {
	// Waiting is the number of events that were not delivered yet, Leased of those that were and are not settled.
	Waiting, Leased uint64
	// Floor is the sequence up to which everything is settled, Tail the last one of the stream, other topics of a family
	// included.
	Floor, Tail uint64
}

// Backlog returns how far a group is. It returns ErrNotFound when the topic or the group does not exist.
func (b *Bus) Backlog(ctx context.Context, topic, group string) (Backlog, error) {
	if err := ValidGroup(group); err != nil {
		return Backlog{}, err
	}
	t, state, err := b.freshExisting(ctx, topic)
	if err != nil {
		return Backlog{}, err
	}
	ptr, err := b.pointers.get(ctx, t, group)
	if err != nil {
		return Backlog{}, b.unavailable(err)
	}
	info, err := b.consumer(ctx, t, ptr.Consumer)
	if err != nil {
		return Backlog{}, err
	}
	return Backlog{
		Waiting: info.NumPending, Leased: uint64(max(info.NumAckPending, 0)),
		Floor: info.AckFloor.Stream, Tail: state.LastSeq,
	}, nil
}

// DeleteGroup removes a group with its position. Its members, on all hubs, must have ended: one that lives makes the group
// anew. A group that does not exist is no error. The server needs a moment after it has answered: a group of the same name
// that is made at once may begin with what the old one held.
func (b *Bus) DeleteGroup(ctx context.Context, topic, group string) error {
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
	ptr, err := b.pointers.get(ctx, t, group)
	if err != nil {
		return b.unavailable(err)
	}
	// The pointer stays, if there is one: it says only how the next consumer is called.
	if err := b.js.DeleteConsumer(ctx, t.stream.name, ptr.Consumer); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
		return b.unavailable(fmt.Errorf("jetstream: delete group %q on stream %s: %w", group, t.stream.name, err))
	}
	return nil
}
