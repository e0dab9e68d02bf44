package projections

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream"
)

// maxCause is the longest id that the bus takes in caused_by, in bytes. Those that it gives are shorter, but native
// clients give what they like.
const maxCause = 1_024

// TopicStore is a Store on a compacted topic: each state is an event of its key, so that clients can subscribe to what
// changes, and read what is there.
type TopicStore struct {
	bus   Bus
	topic string
}

var _ Store = (*TopicStore)(nil)

// NewTopicStore keeps states on a topic, which must be compacted (jetstream.TopicRule.Compaction) for states to outlive the
// topic's retention.
func NewTopicStore(bus Bus, topic string) *TopicStore {
	return &TopicStore{bus: bus, topic: topic}
}

// Load implements Store.
func (t *TopicStore) Load(ctx context.Context, key string) (State, error) {
	e, err := t.bus.Keys(t.topic).Get(ctx, key)
	if errors.Is(err, jetstream.ErrNotFound) {
		return State{}, nil
	}
	if err != nil {
		return State{}, err
	}
	return eventState(e), nil
}

func eventState(e *jetstream.Event) State {
	s := State{From: parsePosition(e.Headers[headerSource]), Revision: e.Sequence, StoredAt: e.StoredAt}
	if e.Gone {
		s.Revision = 0
	}
	if !e.Tombstone {
		s.Value = e.Payload
	}
	return s
}

// Save implements Store.
func (t *TopicStore) Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (State, error) {
	opts := jetstream.PublishOptions{Key: key, ExpectKeySequence: &old.Revision, Tombstone: next.Value == nil}
	if cause != nil && len(cause.ID) <= maxCause {
		opts.CausedBy = []string{cause.ID}
	}
	if next.From != (Position{}) {
		opts.Headers = map[string]string{headerSource: next.From.String()}
	}
	receipt, err := t.bus.Publish(ctx, t.topic, next.Value, opts)
	if errors.Is(err, jetstream.ErrKeyChanged) {
		return State{}, ErrConflict
	}
	if err != nil {
		return State{}, err
	}
	next.Revision, next.StoredAt = receipt.Sequence, time.Now().UnixNano()
	return next, nil
}

// Each implements Store.
func (t *TopicStore) Each(ctx context.Context, f func(string, State) error) error {
	return t.bus.Keys(t.topic).Each(ctx, func(e *jetstream.Event) error {
		if e.Tombstone {
			return nil
		}
		return f(e.Key, eventState(e))
	})
}
