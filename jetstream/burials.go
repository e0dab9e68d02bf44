package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// burials stores dead letters. Its methods may be called concurrently.
type burials struct {
	*core
	streams    *streams.Streams
	publishers *publish.Publishers

	rations *letterRations // shared with clients that publish dead letters themselves
	first   firstLetters
}

func newBurials(c *core, s *streams.Streams, p *publish.Publishers) *burials {
	return &burials{core: c, streams: s, publishers: p, rations: newLetterRations(c)}
}

// store stores a dead letter, and returns once it is stored. One that does not fit into a message,
// or into the messages that its stream takes, is stored without the payload.
func (b *burials) store(ctx context.Context, l deadEvent) error {
	// not admitted: a letter is larger than what it wraps, and has no key
	t, err := b.streams.Topic(ctx, native.DeadLetterPrefix+l.original.Topic, "")
	if err != nil {
		return err
	}
	letter := l.letter().Append(nil)
	bare := len(letter) > b.publishers.MaxMessage()-deadMargin
	origin := originRef{stream: l.original.Stream, seq: l.original.Sequence, storedAt: l.original.StoredAt, tombstone: l.original.Tombstone}
	for {
		if bare && l.whole {
			return event.ErrTooLarge
		}
		if bare {
			origin.bare = true
			// Control characters of a native publisher's text grow sixfold as JSON. What does not
			// fit stays in its stream.
			letter = l.letter().WithoutPayload().Append(nil)
		}
		original := ""
		if origin.stream != "" {
			original = origin.String()
		}
		err := b.publishers.Store(ctx, t, letter, l.id, original)
		if err == nil {
			b.note(l)
			return nil
		}
		refused, ok := errors.AsType[*conn.APIError](err)
		if bare || !ok || refused.ErrCode != conn.ErrCodeTooLarge {
			return err
		}
		bare = true
	}
}

// buryDelayed stores the dead letter of a delayed event, whose payload is stored nowhere else.
func (b *burials) buryDelayed(ctx context.Context, original *event.Event, reason string, attempts int, id string) error {
	return b.store(ctx, deadEvent{
		original: original, group: DelayedGroup, reason: native.ShortReason(reason), attempts: attempts, at: time.Now(), id: id, whole: true,
	})
}

// note logs a dead letter that was stored, if it is the first of its group.
func (b *burials) note(l deadEvent) {
	if b.first.first(l.original.Topic, l.group) {
		b.log.Warn("first dead letter of a group", slog.String("topic", l.original.Topic), slog.String("group", l.group),
			slog.String("event", l.original.ID), slog.Int("attempts", l.attempts), slog.String("letters", native.DeadLetterPrefix+l.original.Topic))
	}
}
