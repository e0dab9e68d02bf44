package reading

import (
	"context"
	"errors"
	"strconv"

	"eventhub/jetstream/event"
)

const (
	// MaxNewest is the maximum number of events that History.Newest returns.
	MaxNewest = 1000
	// newestReach is how many messages of the stream Newest reads at most, per event that it looks
	// for.
	newestReach = 64
	// newestBytes bounds the payloads that Newest returns, besides the newest event, which it
	// always returns.
	newestBytes = 8 << 20
)

// Newest is History.Newest.
func (r *Reads) Newest(ctx context.Context, topic string, limit int) ([]*event.Event, error) {
	limit = min(max(limit, 1), MaxNewest)
	t, state, err := r.Streams.FreshExisting(ctx, topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for reach := uint64(limit); ; reach *= 4 {
		from := Position{Kind: AtEarliest}
		whole := state.LastSeq < state.FirstSeq+reach
		if !whole {
			from = Position{Kind: AtID, ID: t.Stream.Name + "@" + strconv.FormatUint(state.LastSeq-reach, 10)}
		}
		part, err := r.Range(ctx, topic, &RangeOptions{From: from})
		if err != nil {
			return nil, err
		}
		var found []*event.Event
		size := 0
		for e, err := range part.Events(ctx) {
			if err != nil {
				return nil, err
			}
			found = append(found, e)
			size += len(e.Payload)
			for len(found) > limit || size > newestBytes && len(found) > 1 {
				size -= len(found[0].Payload)
				found[0], found = nil, found[1:]
			}
		}
		if len(found) >= limit || size > newestBytes/2 || whole || reach >= newestReach*uint64(limit) {
			return found, nil
		}
	}
}
