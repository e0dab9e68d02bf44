package reading

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/streams"
)

// StepBack returns the sequence of the event that is n events before the first one behind floor, or
// of the first event if there are fewer.
func (r *Reads) StepBack(ctx context.Context, t *streams.Topic, floor, n uint64, state natsjs.StreamState) (uint64, error) {
	first := max(state.FirstSeq, 1)
	if floor < first {
		return floor + 1, nil
	}
	behind, err := r.CountFrom(ctx, t, floor+1)
	if err != nil {
		return 0, err
	}
	enough := func(seq uint64) (bool, error) { // n events or more are in seq..floor
		count, err := r.CountFrom(ctx, t, seq)
		return count >= behind+n, err
	}
	low, high := first, floor+1 // the answer is in low..high; high has too few
	if n <= floor {
		// Without gaps this is it.
		guess := max(floor-n+1, first)
		ok, err := enough(guess)
		if err != nil {
			return 0, err
		}
		if ok {
			low = guess
			if n == floor-guess+1 {
				return guess, nil
			}
		} else {
			high = guess
		}
	}
	if ok, err := enough(low); err != nil || !ok {
		return low, err // there are fewer
	}
	for low+1 < high {
		middle := low + (high-low)/2
		ok, err := enough(middle)
		switch {
		case err != nil:
			return 0, err
		case ok:
			low = middle
		default:
			high = middle
		}
	}
	return low, nil
}

// CountFrom counts the events of a topic from a sequence on. The server counts them when it makes a
// consumer; nobody reads them.
func (r *Reads) CountFrom(ctx context.Context, t *streams.Topic, seq uint64) (uint64, error) {
	c, err := r.Conn.JS.CreateConsumer(ctx, t.Stream.Name, natsjs.ConsumerConfig{
		Name: rand.Text(), AckPolicy: natsjs.AckNonePolicy, FilterSubjects: t.Filters(), DeliverPolicy: natsjs.DeliverByStartSequencePolicy,
		OptStartSeq: max(seq, 1), MemoryStorage: true, InactiveThreshold: MakeWait, Replicas: 1, HeadersOnly: true,
	})
	if err != nil {
		return 0, r.Conn.Unavailable(fmt.Errorf("jetstream: count events of stream %s: %w", t.Stream.Name, err))
	}
	info := c.CachedInfo()
	// else the server drops it after MakeWait
	_ = r.Conn.JS.DeleteConsumer(ctx, t.Stream.Name, info.Name)
	return info.NumPending, nil
}

// Between counts the events of a topic in from..to. sure is false when the topic changed meanwhile
// again and again.
func (r *Reads) Between(ctx context.Context, t *streams.Topic, from, to uint64) (n uint64, sure bool, err error) {
	if from > to {
		return 0, true, nil
	}
	for range 3 {
		before, err := r.CountFrom(ctx, t, to+1)
		if err != nil {
			return 0, false, err
		}
		all, err := r.CountFrom(ctx, t, from)
		if err != nil {
			return 0, false, err
		}
		after, err := r.CountFrom(ctx, t, to+1)
		if err != nil {
			return 0, false, err
		}
		n = max(all, before) - before
		if before == after {
			return n, true, nil
		}
	}
	return n, false, nil
}

// LastSettled returns the id of the last event up to which a group has settled everything, and when
// it was stored. The id is empty when the event was removed, and both are when there is none.
func (r *Reads) LastSettled(ctx context.Context, t *streams.Topic, info *natsjs.ConsumerInfo) (id string, ts int64, err error) {
	if info.AckFloor.Consumer == 0 { // a new consumer shows start-1 as its floor
		return "", 0, nil
	}
	e, err := r.BySequence(ctx, t, info.AckFloor.Stream)
	switch {
	case err == nil:
		return e.ID, e.StoredAt / 1e6, nil
	case !errors.Is(err, event.ErrNotFound):
		return "", 0, r.Conn.Unavailable(err)
	case info.AckFloor.Last != nil:
		return "", info.AckFloor.Last.UnixMilli(), nil
	}
	return "", 0, nil
}
