package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
)

// pausedUntil is the end of a pause that nobody ends: the server knows pauses with an end only.
var pausedUntil = time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC)

// Pause stops the deliveries to the group, on all hubs, until Resume. Leases stay valid. Hubs give
// back what they have fetched and not begun. Members may come and go meanwhile. Restarts and moves
// do not end the pause. Pausing a group that is paused changes nothing. Pause returns ErrNotFound
// when the topic or the group does not exist.
//
// The server stops first. Hubs hear of the pause from the group's generation, which also tells
// whoever creates the consumer again.
func (g Group) Pause(ctx context.Context) error { return g.setPaused(ctx, true) }

// Resume ends a Pause: deliveries go on at once. It returns ErrNotFound when the topic or the group
// does not exist.
func (g Group) Resume(ctx context.Context) error { return g.setPaused(ctx, false) }

func (g Group) setPaused(ctx context.Context, paused bool) error {
	b, group := g.bus, g.name
	if err := ValidGroup(group); err != nil {
		return err
	}
	for range 8 {
		t, _, err := b.streams.FreshExisting(ctx, g.topic)
		if err != nil {
			return err
		}
		ptr, err := b.records.Generation(ctx, t, group)
		if err != nil {
			return b.conn.Unavailable(err)
		}
		if _, err = b.records.GroupConsumer(ctx, t, &ptr); errors.Is(err, event.ErrNotFound) {
			return event.ErrNotFound
		} else if err != nil {
			return b.conn.Unavailable(err)
		}
		if paused {
			err = b.records.PauseConsumer(ctx, t, ptr.Consumer, pausedUntil)
		}
		if err == nil && ptr.Paused != paused {
			next := ptr
			next.Paused = paused
			_, err = b.records.Swap(ctx, t, group, ptr, next)
		}
		switch {
		case err != nil:
		case paused: // once more: a bookmark that was made meanwhile may have ended the pause
			err = b.records.PauseConsumer(ctx, t, ptr.Consumer, pausedUntil)
		default:
			err = b.records.ResumeConsumer(ctx, t, ptr.Consumer)
		}
		if err == nil {
			err = b.queues.pauseQueue(ctx, ptr.PutBack, paused)
		}
		if errors.Is(err, records.ErrMoved) {
			continue
		}
		if err != nil {
			return b.conn.Unavailable(err)
		}
		b.log.InfoContext(ctx, "group paused or resumed", slog.String("topic", g.topic), slog.String("group", group), slog.Bool("paused", paused))
		return nil
	}
	return &event.Error{Code: event.CodeOverloaded, Msg: "the group is being moved by others again and again: try later"}
}

// pauseQueue has the server stop or go on with what was put back to a group. A queue whose consumer
// is gone is paused by whoever creates it again.
func (q *queues) pauseQueue(ctx context.Context, queue string, paused bool) (err error) {
	if queue == "" {
		return nil
	}
	t := &streams.Topic{Stream: &streams.Stream{Name: putBackStream}}
	if paused {
		err = q.records.PauseConsumer(ctx, t, queue, pausedUntil)
	} else {
		err = q.records.ResumeConsumer(ctx, t, queue)
	}
	if errors.Is(err, records.ErrMoved) {
		return nil
	}
	return err
}

// groupPaused gives back what the member, and that of its queue, holds and has not begun: the group
// gets no events now. s.mu is held.
func (m *member) groupPaused() {
	s := m.sub
	var back []*Delivery
	for i := len(s.out) - 1; i >= 0; i-- {
		if i >= len(s.out) {
			continue
		}
		if d := s.out[i]; (d.m == m || d.m.main == m) && !d.begun {
			s.remove(d, event.Returned)
			back = append(back, d)
		}
	}
	s.dropParked()
	if len(back) > 0 {
		s.wg.Go(func() { s.giveBack(back) })
	}
}
