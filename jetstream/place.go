package jetstream

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// Place is a place in the stream of a topic.
type Place struct {
	// Stream is the name of the stream, and Made when it was created: a stream of the same name
	// that is created later is another one.
	Stream string
	Made   time.Time
	// First is the sequence of the oldest event that the stream holds, and Last that of the newest
	// one it ever held. A stream that never had an event has 1 and 0.
	First, Last uint64
	// Family reports that the stream holds other topics, too: sequences do not count the events of
	// the topic.
	Family bool
}

// Place returns where the topic is. It returns ErrNotFound when the topic does not exist. With a
// client, it creates the topic instead, if the client may create one more.
func (h History) Place(ctx context.Context, client string) (Place, error) {
	for try := 1; ; try++ {
		if client != "" {
			if _, err := h.reads.streams.Topic(ctx, h.topic, client); err != nil {
				return Place{}, err
			}
		}
		t, state, err := h.reads.streams.FreshExisting(ctx, h.topic)
		if errors.Is(err, event.ErrNotFound) && client != "" && try < 3 {
			continue // it was deleted meanwhile
		}
		if err != nil {
			return Place{}, err
		}
		return Place{Stream: t.Stream.Name, Made: t.Stream.Created, First: max(state.FirstSeq, 1), Last: state.LastSeq, Family: t.Stream.Family}, nil
	}
}

// backWindow is how many sequences Back looks at first, for each event that it looks for, and
// backLimit how many in all.
const (
	backWindow = 4
	backLimit  = 100_000
)

// Back returns the sequence after which at most n events of the topic come, up to the sequence of
// place.Last. It looks at the last 100,000 events of the stream.
func (h History) Back(ctx context.Context, place Place, n int) (uint64, error) {
	least := place.First - 1
	if place.Last-min(least, place.Last) > backLimit {
		least = place.Last - backLimit
	}
	if least >= place.Last {
		return place.Last, nil
	}
	if !place.Family {
		if place.Last-least > uint64(n) { //nolint:gosec // not negative
			least = place.Last - uint64(n) //nolint:gosec // not negative
		}
		return least, nil
	}
	t, err := h.reads.streams.Existing(ctx, h.topic)
	if err != nil {
		return 0, err
	}
	for window := uint64(n * backWindow); ; window *= 4 { //nolint:gosec // not negative
		from := least
		if place.Last-least > window {
			from = place.Last - window
		}
		last := make([]uint64, 0, n) // a circle
		seen := 0
		err := h.reads.walk(ctx, t, walkOptions{start: from + 1, headersOnly: true, batch: 1_000}, func(m *conn.StoredMsg) error {
			if m.Seq > place.Last {
				return errStopWalk
			}
			if len(last) < n {
				last = append(last, m.Seq)
			} else {
				last[seen%n] = m.Seq
			}
			seen++
			return nil
		})
		if err != nil {
			return 0, err
		}
		if seen >= n || from == least {
			if seen < n {
				return from, nil
			}
			return last[seen%n] - 1, nil
		}
	}
}

// Snapshot calls f with the newest event of every key of a compacted topic, as Each does, and
// returns the sequence of the topic's stream up to which that is the present state: every key that
// changed later has an event behind it.
func (k Keys) Snapshot(ctx context.Context, f func(*event.Event) error) (upTo uint64, err error) {
	t, err := k.reads.compacted(ctx, k.topic)
	if err != nil {
		return 0, k.reads.readFailed(err)
	}
	ident := ""
	_, err = k.reads.messages.readAll(ctx, t.Bucket.Stream, time.Time{}, 1, nil, func(m *conn.StoredMsg) error {
		e, at, ok := t.Entry(m)
		if !ok {
			return nil
		}
		if at.Ident == ident {
			upTo = max(upTo, at.Seq)
		} else { // what came before is of an earlier stream
			ident, upTo = at.Ident, at.Seq
		}
		return stopped(f(e))
	})
	if own, ok := errors.AsType[*stopError](err); ok {
		return upTo, own.err
	}
	if errors.Is(err, event.ErrNotFound) {
		return 0, nil
	}
	return upTo, k.reads.readFailed(err)
}
