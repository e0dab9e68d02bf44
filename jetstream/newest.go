package jetstream

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

// Newest returns the newest events of a topic, oldest first: limit events, from 1 to MaxNewest. It
// returns fewer if their payloads take more than 8 MiB, or if the topic has fewer among the last 64
// × limit messages of its stream, as a topic of a family may. A topic that does not exist has no
// events. Newest creates no topic.
func (h History) Newest(ctx context.Context, limit int) ([]*event.Event, error) {
	limit = min(max(limit, 1), MaxNewest)
	t, state, err := h.reads.streams.FreshExisting(ctx, h.topic)
	if errors.Is(err, event.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for reach := uint64(limit); ; reach *= 4 {
		from := FromEarliest
		whole := state.LastSeq < state.FirstSeq+reach
		if !whole {
			from = FromAfterID(t.Stream.Name + "@" + strconv.FormatUint(state.LastSeq-reach, 10))
		}
		var found []*event.Event
		size := 0
		for e, err := range h.Read(ctx, ReadOptions{From: from}) {
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
