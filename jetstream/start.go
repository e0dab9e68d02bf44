package jetstream

import (
	"context"
	"errors"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// startFunc resolves the sequence at which a new group starts.
type startFunc func(ctx context.Context, t *streams.Topic, state natsjs.StreamState) (uint64, error)

// starts resolves where the groups on the topics start, as far as they are new: all of them before
// one is made, so that a subscription that cannot be made leaves nothing behind.
//
// An afterId is an event of one topic. On the others, the groups start at what was stored since
// that event.
func (s *Subscription) starts(ctx context.Context, names []string) ([]startFunc, error) {
	b := s.bus
	at := s.opts.From
	starts := make([]startFunc, len(names))
	if at.kind != atID {
		for i := range names {
			starts[i] = func(ctx context.Context, t *streams.Topic, state natsjs.StreamState) (uint64, error) {
				return b.reads.Resolve(ctx, t, at.start(), state, s.opts.CountFor)
			}
		}
		return starts, nil
	}
	unknown := error(&event.Error{Code: event.CodeUnknownID, Msg: "no event of this topic has the id of afterId: there is no event yet"})
	found, missing := false, false
	exists := make([]bool, len(names))
	for i, name := range names {
		_, err := b.Group(name, s.group).Cursor(ctx)
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return nil, b.conn.Unavailable(err)
		}
		exists[i] = err == nil
		missing = missing || err != nil
	}
	var since time.Time // when the event was stored
	for i, name := range names {
		t, state, err := b.streams.FreshExisting(ctx, name)
		if errors.Is(err, event.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, b.conn.Unavailable(err)
		}
		if exists[i] {
			// It goes on from where it is; should it vanish at this moment, it starts at the end.
			starts[i] = fixed(t, state.LastSeq+1)
		}
		if !missing {
			continue // nothing needs the event: it is not searched for
		}
		seq, held, err := b.reads.Locate(ctx, t, at.id, state, s.opts.CountFor)
		switch refused, ok := errors.AsType[*event.Error](err); {
		case ok && refused.Code == event.CodeUnknownID:
			unknown = err
		case err != nil:
			return nil, err
		default:
			found = true
			if !held {
				break // the topic has lost the event, or another topic holds it: since decides
			}
			if since.IsZero() {
				if event, err := b.reads.BySequence(ctx, t, seq); err == nil {
					since = time.Unix(0, event.StoredAt)
				}
			}
			if !exists[i] {
				starts[i] = fixed(t, seq+1)
			}
		}
	}
	if made, v7 := streams.MadeAt(at.id); found && since.IsZero() && v7 {
		since = made
	}
	for i := range names {
		if starts[i] != nil {
			continue
		}
		if !found {
			return nil, unknown
		}
		starts[i] = func(ctx context.Context, t *streams.Topic, state natsjs.StreamState) (uint64, error) {
			return b.reads.Resolve(ctx, t, FromTime(since).start(), state, s.opts.CountFor)
		}
	}
	return starts, nil
}

// fixed starts at a sequence that was resolved on a stream. If that was created again meanwhile,
// all that is in it is new.
func fixed(was *streams.Topic, seq uint64) startFunc {
	return func(_ context.Context, t *streams.Topic, state natsjs.StreamState) (uint64, error) {
		if !t.Stream.Created.Equal(was.Stream.Created) {
			return 1, nil
		}
		return min(seq, state.LastSeq+1), nil
	}
}
