package jetstream

import (
	"context"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// A stream is taken to end before a group's position when it says so rewindSure times, rewindEvery
// apart.
const (
	rewindSure  = 5
	rewindEvery = 100 * time.Millisecond
)

// rewound looks whether the stream ends before the group's position: then machines of NATS have
// crashed and the stream has lost its end, but the consumer has not. The server gives the sequences
// of the lost events to new ones, and passes over these for the group. The group therefore goes on
// under a new name, from its ack floor or the end of the stream, and its members hear of a reset.
// rewound returns nil if the group is where it may be, and records.ErrMoved if another moved it.
// The stream is known to have reached end.
func (b *Bus) rewound(ctx context.Context, t *streams.Topic, name string, ptr records.Generation, info *natsjs.ConsumerInfo, end uint64) (*group, error) {
	position := max(info.Delivered.Stream, info.AckFloor.Stream)
	if position <= end {
		return nil, nil
	}
	// The stream is asked later than the consumer. The leader of a stream may apply an event later
	// than the leader of a consumer all the same, so the stream is asked repeatedly.
	tick := time.NewTicker(rewindEvery)
	defer tick.Stop()
	for range rewindSure {
		stream, err := b.conn.FindStream(ctx, t.Stream.Name)
		if err != nil {
			return nil, b.conn.Unavailable(err)
		}
		if end = stream.State.LastSeq; !native.StreamMade(stream).Equal(t.Stream.Created) || position <= end {
			return nil, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, b.conn.Unavailable(ctx.Err())
		}
	}
	to := groupStart{seq: min(info.AckFloor.Stream, end) + 1, ttl: info.Config.InactiveThreshold, maker: info.Config.Metadata[records.MetaMaker], slots: slotsOf(info)}
	moved, rev, err := b.moveGroup(ctx, t, name, ptr, to)
	if err != nil {
		return nil, b.unavailableUnless(err, records.ErrMoved)
	}
	b.records.DeleteConsumer(ctx, t.Stream.Name, ptr.Consumer)
	b.log.ErrorContext(ctx, "events were lost: the stream ends before the position of a group; moved the group back",
		slog.String("topic", t.Name), slog.String("group", name), slog.Uint64("position", position), slog.Uint64("end", end))
	g := b.newGroup(t, name, moved, rev, pastOf(&ptr))
	g.lost.Store(true)
	return g, nil
}
