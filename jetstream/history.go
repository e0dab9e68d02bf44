package jetstream

import (
	"context"
	"errors"
)

// History is the events that a topic holds, read by no group. It is a small value that costs
// nothing to make; making it checks nothing. Its methods may be called concurrently. They make no
// topic, and return a bad_topic *Error for a name that is none, an internal *Error when NATS does
// not answer as it should, and ErrClosed.
type History struct {
	bus   *Bus
	topic string
}

// History gives access to the events that a topic holds.
func (b *Bus) History(topic string) History { return History{b, topic} }

// NextOfKey returns the first event of a key behind a sequence of the topic's stream, read at the
// stream's leader. It returns ErrNotFound when there is none, or the topic does not exist.
func (h History) NextOfKey(ctx context.Context, key string, after uint64) (*Event, error) {
	b, topic := h.bus, h.topic
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

// Bounds are the sequences of the first event that is left in the topic's stream and of the last
// one that was stored, other topics of a family included; 1 and 0 in a stream that never had any.
// It returns ErrNotFound when the topic does not exist.
func (h History) Bounds(ctx context.Context) (first, last uint64, err error) {
	_, state, err := h.bus.freshExisting(ctx, h.topic)
	return max(state.FirstSeq, 1), state.LastSeq, err
}
