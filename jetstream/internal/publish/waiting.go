package jetstream

import (
	"context"
	"errors"
	"strconv"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// MaxDelayedPage is the maximum of the limit of Topic.Delayed.
const MaxDelayedPage = 1_000

// DelayedEvent is an event that waits to be stored in its topic.
type DelayedEvent struct {
	ID string
	// Key is "" for an event without a key.
	Key string
	// At is when the event is due.
	At time.Time
	// Published is when it was published.
	Published time.Time
	// Bytes is the size of the payload.
	Bytes int
}

// DelayedPage is a part of the events that wait for a topic.
type DelayedPage struct {
	Events []DelayedEvent
	// Next is for the next page; "" at the end.
	Next string
}

// Delayed lists the events that wait for the topic, in the order in which they were published. A
// page has at most limit events, and fewer where they are large. Events that are due are not among
// them. The topic need not exist. It returns a bad_options *Error for a limit or a next that is
// none.
func (t Topic) Delayed(ctx context.Context, next string, limit int) (DelayedPage, error) {
	a := t.admin
	if err := ValidTopic(t.name); err != nil {
		return DelayedPage{}, err
	}
	if limit < 1 || limit > MaxDelayedPage {
		return DelayedPage{}, event.BadOptions("limit is %d: 1 to %d are allowed", limit, MaxDelayedPage)
	}
	from := uint64(1)
	if next != "" {
		n, err := strconv.ParseUint(next, 10, 64)
		if err != nil || n == 0 {
			return DelayedPage{}, event.BadOptions("next is not from the answer before: leave it out to begin")
		}
		from = n
	}
	if _, err := a.publishing.schedules.open(ctx, false); errors.Is(err, event.ErrNotFound) || errors.Is(err, errNoSchedules) {
		return DelayedPage{}, nil
	} else if err != nil {
		return DelayedPage{}, err
	}
	var page DelayedPage
	left := uint64(0)
	query := &conn.DirectQuery{Seq: from, Batch: limit, NextBySubj: waitPrefix + "*." + objectName(t.name) + ".*"}
	_, err := a.conn.Direct(ctx, delayedStream, query, func(m *conn.StoredMsg, pending uint64) error {
		left, from = pending, m.Seq+1
		subject := m.Header.Get(headerTarget)
		at, err := time.Parse("@at "+time.RFC3339Nano, m.Header.Get(headerSchedule))
		if subjectTopic(subject) == t.name && err == nil { // others no hub has stored
			page.Events = append(page.Events, DelayedEvent{
				ID: storedID(m.Header, delayedStream, m.Seq), Key: subjectKey(subject), At: at, Published: m.Time, Bytes: len(m.Data),
			})
		}
		return nil
	})
	if err != nil {
		return DelayedPage{}, a.conn.Unavailable(err)
	}
	if left > 0 {
		page.Next = strconv.FormatUint(from, 10)
	}
	return page, nil
}

// CancelDelayed is Publisher.Cancel for operators.
func (t Topic) CancelDelayed(ctx context.Context, id string) error {
	return t.admin.publishing.publisher.Cancel(ctx, t.name, id)
}
