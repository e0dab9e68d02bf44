package projections

import (
	"context"
	"errors"
	"math"
	"time"

	"eventhub/jetstream"
)

// ErrTruncated is returned by Reconstruct, together with a state, if the topic has dropped events.
// The state then follows from the remaining events, which is exact only if each event contains the
// whole state of its key.
var ErrTruncated = errors.New("projections: the topic has dropped some events before the given time")

// Reconstruct returns the state of a key at a past time. It calls apply, the Apply function of a
// Projection, for each event of the key that was stored up to that time, including the whole
// millisecond. The Value of the state is nil if there was none.
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
	// Read the bounds last, so that events dropped during the scan count as dropped.
	first, _, err := history.Bounds(ctx)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return s, nil
	case err == nil && first > 1:
		return s, ErrTruncated
	}
	return s, err
}
