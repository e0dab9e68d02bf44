package projections

import (
	"context"
	"errors"
	"strconv"
	"time"

	"eventhub/jetstream"
)

// StatesBucket returns the name of the KV bucket with the states of a version of a projection.
// Versions start at 1.
func StatesBucket(projection string, version int) string {
	return "state_" + projection + "_v" + strconv.Itoa(version)
}

// States is a Store in a KV bucket, with one entry per key. Its methods may be called concurrently.
type States struct{ bucket Collection }

var _ Store = (*States)(nil)

// OpenStates opens the named bucket and creates it if it does not exist.
func OpenStates(ctx context.Context, bus Bus, bucket string) (*States, error) {
	c, err := bus.Collections().Open(ctx, bucket)
	if err != nil {
		return nil, err
	}
	return &States{c}, nil
}

// Load implements Store.
func (s *States) Load(ctx context.Context, key string) (State, error) {
	e, err := s.bucket.Get(ctx, key)
	if err != nil {
		return State{}, err
	}
	return entryState(e), nil
}

func entryState(e *jetstream.Entry) State {
	return State{Value: e.Value, From: parsePosition(e.Headers[headerSource]), Revision: e.Revision, StoredAt: e.StoredAt}
}

// Save implements Store. A removed key leaves a delete marker that names the event which removed
// it.
func (s *States) Save(ctx context.Context, key string, old, next State, _ *jetstream.Event) (State, error) {
	headers := map[string]string{headerSource: next.From.String()}
	write := func() (uint64, error) { return s.bucket.Put(ctx, key, next.Value, headers, old.Revision) }
	if next.Value == nil {
		write = func() (uint64, error) { return s.bucket.Delete(ctx, key, headers, old.Revision) }
	}
	rev, err := write()
	if errors.Is(err, jetstream.ErrKeyChanged) {
		return State{}, ErrConflict
	}
	if err != nil {
		return State{}, err
	}
	next.Revision, next.StoredAt = rev, time.Now().UnixNano()
	return next, nil
}

// Each implements Store.
func (s *States) Each(ctx context.Context, f func(string, State) error) error {
	return s.bucket.Each(ctx, func(e *jetstream.Entry) error {
		if e.Deleted {
			return nil
		}
		return f(e.Key, entryState(e))
	})
}
