package reading

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// Place is a place in the stream of a topic, as the Place of the bus.
type Place struct {
	Stream      string
	Made        time.Time
	First, Last uint64
	Family      bool
}

// Place is History.Place.
func (r *Reads) Place(ctx context.Context, topic string, client string) (Place, error) {
	for try := 1; ; try++ {
		if client != "" {
			if _, err := r.Streams.Topic(ctx, topic, client); err != nil {
				return Place{}, err
			}
		}
		t, state, err := r.Streams.FreshExisting(ctx, topic)
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

// Back is History.Back.
func (r *Reads) Back(ctx context.Context, topic string, place Place, n int) (uint64, error) {
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
	t, err := r.Streams.Existing(ctx, topic)
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
		err := r.Walk(ctx, t, Query{From: from + 1, Last: place.Last, HeadersOnly: true}, func(m *conn.StoredMsg) error {
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

// Snapshot is Keys.Snapshot.
func (r *Reads) Snapshot(ctx context.Context, topic string, f func(*event.Event) error) (upTo uint64, err error) {
	t, err := r.Compacted(ctx, topic)
	if err != nil {
		return 0, r.Messages.Failed(err)
	}
	ident := ""
	_, err = r.Messages.All(ctx, t.Bucket.Stream, time.Time{}, 1, nil, func(m *conn.StoredMsg) error {
		e, at, ok := t.Entry(m)
		if !ok {
			return nil
		}
		if at.Ident == ident {
			upTo = max(upTo, at.Seq)
		} else { // what came before is of an earlier stream
			ident, upTo = at.Ident, at.Seq
		}
		return Own(f(e))
	})
	if ok, own := OwnError(err); ok {
		return upTo, own
	}
	if errors.Is(err, event.ErrNotFound) {
		return 0, nil
	}
	return upTo, r.Messages.Failed(err)
}
