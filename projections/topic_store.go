package projections

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream"
)

// maxCause is the longest id in bytes that the bus accepts in caused_by. Ids made by the bus are
// shorter, but native clients may choose any id.
const maxCause = 1_024

// TopicStore is a Store on a compacted topic. Each state is an event of its key, so clients can
// subscribe to changes and read the current states. Its methods may be called concurrently.
type TopicStore struct {
	bus   Bus
	topic string
}

var (
	_ Store     = (*TopicStore)(nil)
	_ manyStore = (*TopicStore)(nil)
)

// NewTopicStore returns a store on a topic. The topic must be compacted
// (topics.Rule.Compaction); otherwise its retention removes states.
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

// loadMany implements manyStore. A state whose event has left the stream is taken for one of the
// stream here; its Save then fails with ErrConflict.
func (t *TopicStore) loadMany(ctx context.Context, keys []string) (map[string]State, error) {
	events, err := t.bus.Keys(t.topic).GetMany(ctx, keys)
	if err != nil {
		return nil, err
	}
	states := make(map[string]State, len(events))
	for key, e := range events {
		states[key] = eventState(e)
	}
	return states, nil
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
	opts := jetstream.PublishOptions{Key: key, ExpectKeySequence: &old.Revision, Tombstone: next.Value == nil, KeyExists: old.Value != nil}
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
