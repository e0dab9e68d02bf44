package jetstream

import (
	"context"
	"errors"

	"eventhub/jetstream/event"
)

// History reads the stored events of a topic, without a group. A History is a small value that
// costs nothing to create, and creating one checks nothing. Its methods may be called concurrently.
// Except for Place, they create no topic. They return a bad_topic *Error for an invalid name, an
// internal *Error when NATS fails to answer properly, and ErrClosed.
type History struct {
	reads *reads
	topic string
}

// History gives access to the stored events of a topic.
func (b *Bus) History(topic string) History { return History{b.reads, topic} }

// ByID returns the event with an id. It returns ErrNotFound when there is no such event. Ids that
// are not UUIDv7s are searched among the last 100,000 events. The search counts for the client, as
// in ReadOptions.
func (h History) ByID(ctx context.Context, id, client string) (*event.Event, error) {
	r := h.reads
	if err := FromAfterID(id).validate(); err != nil {
		return nil, err
	}
	t, state, err := r.streams.FreshExisting(ctx, h.topic)
	if err != nil {
		return nil, err
	}
	seq, err := r.ids.find(ctx, t, id, state, client)
	if unknown, ok := errors.AsType[*event.Error](err); ok && unknown.Code == event.CodeUnknownID || err == nil && seq == 0 {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	e, err := r.bySequence(ctx, t, seq)
	if err != nil {
		return nil, r.unavailableOrNil(err)
	}
	if e.ID != id || e.Topic != h.topic {
		return nil, event.ErrNotFound // an id that tells its place is found when its event is gone
	}
	return e, nil
}

// NextOfKey returns the first event of a key after a sequence of the topic's stream, read at the
// stream's leader. It returns ErrNotFound when there is no such event or the topic does not exist.
// A leader that was elected a moment ago may lack the newest events; Bounds tells how far it is.
func (h History) NextOfKey(ctx context.Context, key string, after uint64) (*event.Event, error) {
	r, topic := h.reads, h.topic
	t, err := r.streams.Existing(ctx, topic)
	if err != nil {
		return nil, err
	}
	m, err := r.conn.GetMsg(ctx, t.Stream.Name, map[string]any{"seq": after + 1, "next_by_subj": keyedSubject(topic, key)})
	if err != nil {
		if errors.Is(err, event.ErrNotFound) {
			return nil, event.ErrNotFound
		}
		return nil, r.conn.Unavailable(err)
	}
	return t.Event(m), nil
}

// Bounds returns the sequences of the oldest event that the topic's stream still holds and of the
// last event stored, other topics of a family included. It returns 1 and 0 for a stream that never
// had an event. It returns ErrNotFound when the topic does not exist.
func (h History) Bounds(ctx context.Context) (first, last uint64, err error) {
	_, state, err := h.reads.streams.FreshExisting(ctx, h.topic)
	return max(state.FirstSeq, 1), state.LastSeq, err
}
