package projections

import (
	"context"
	"errors"
	"math"
	"time"

	"eventhub/jetstream"
)

// ErrTruncated is returned by Reconstruct beside a state when the topic has dropped events before that moment: the state
// follows from those that are left, which is all of it only where each event says everything about its key.
var ErrTruncated = errors.New("projections: the topic has dropped some of the events before that moment")

// Reconstruct returns the state of one key at a past moment, from the history of a topic
// (jetstream.Bus.History): apply, as a Projection's Apply, over the events of the key that were
// stored until then. Its Value is nil when there was none.
func Reconstruct(ctx context.Context, history History, key string, at time.Time, apply func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error)) (State, error) {
	var s State
	if at.UnixMilli() <= 0 {
		return s, nil
	}
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Key: key, Until: at, Limit: math.MaxInt}
	err := history.Scan(ctx, opts, func(e *jetstream.Event) (err error) {
		if s.Value, err = apply(ctx, s.Value, e); err != nil {
			return err
		}
		s.From, s.StoredAt = positionOf(e), e.StoredAt
		return nil
	})
	if err != nil {
		return s, err
	}
	// Asked last: what was dropped while the above read is not in the state either.
	first, _, err := history.Bounds(ctx)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return s, nil
	case err == nil && first > 1:
		return s, ErrTruncated
	}
	return s, err
}
