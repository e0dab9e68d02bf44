package publish

import (
	"context"
	"errors"
	"strconv"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// MaxWaiting is the maximum of the limit of Publishers.Waiting.
const MaxWaiting = 1_000

// Waiting is an event that waits to be stored in its topic.
type Waiting struct {
	ID            string
	Key           string // "" without one
	At, Published time.Time
	Bytes         int // of the payload
}

// Waiting calls f for the events that wait for a topic, at most limit of them, in the order in
// which they were published. next is that of the page before, or "" to begin; the result is that of
// the next page, or "" at the end.
func (p *Publishers) Waiting(ctx context.Context, topic, next string, limit int, f func(Waiting)) (string, error) {
	if err := event.ValidTopic(topic); err != nil {
		return "", err
	}
	if limit < 1 || limit > MaxWaiting {
		return "", event.BadOptions("limit is %d: 1 to %d are allowed", limit, MaxWaiting)
	}
	from := uint64(1)
	if next != "" {
		n, err := strconv.ParseUint(next, 10, 64)
		if err != nil || n == 0 {
			return "", event.BadOptions("next is not from the answer before: leave it out to begin")
		}
		from = n
	}
	if _, err := p.schedules.open(ctx, false); errors.Is(err, event.ErrNotFound) || errors.Is(err, errNoSchedules) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	left := uint64(0)
	query := &conn.DirectQuery{Seq: from, Batch: limit, NextBySubj: waitPrefix + "*." + native.ObjectName(topic) + ".*"}
	_, err := p.Conn.Direct(ctx, DelayedStream, query, func(m *conn.StoredMsg, pending uint64) error {
		left, from = pending, m.Seq+1
		subject := m.Header.Get(headerTarget)
		at, err := time.Parse("@at "+time.RFC3339Nano, m.Header.Get(headerSchedule))
		// others no hub has stored
		if of, key, _ := native.ParseSubject(subject); of == topic && err == nil {
			f(Waiting{
				ID: native.StoredID(m.Header, DelayedStream, m.Seq), Key: key, At: at, Published: m.Time, Bytes: len(m.Data),
			})
		}
		return nil
	})
	if err != nil {
		return "", p.Conn.Unavailable(err)
	}
	if left > 0 {
		return strconv.FormatUint(from, 10), nil
	}
	return "", nil
}
