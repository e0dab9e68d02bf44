package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
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
		ptr, err := b.records.generations.get(ctx, t, group)
		if err != nil {
			return b.conn.Unavailable(err)
		}
		if _, err = b.records.groupConsumer(ctx, t, &ptr); errors.Is(err, event.ErrNotFound) {
			return event.ErrNotFound
		} else if err != nil {
			return b.conn.Unavailable(err)
		}
		if paused {
			err = b.records.pauseConsumer(ctx, t, ptr.Consumer, pausedUntil)
		}
		if err == nil && ptr.Paused != paused {
			next := ptr
			next.Paused = paused
			_, err = b.records.generations.swap(ctx, t, group, ptr, next)
		}
		switch {
		case err != nil:
		case paused: // once more: a bookmark that was made meanwhile may have ended the pause
			err = b.records.pauseConsumer(ctx, t, ptr.Consumer, pausedUntil)
		default:
			err = b.records.resumeConsumer(ctx, t, ptr.Consumer)
		}
		if err == nil {
			err = b.records.pauseQueue(ctx, ptr.PutBack, paused)
		}
		if errors.Is(err, errGroupMoved) {
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
func (r *records) pauseQueue(ctx context.Context, queue string, paused bool) (err error) {
	if queue == "" {
		return nil
	}
	t := &streams.Topic{Stream: &streams.Stream{Name: putBackStream}}
	if paused {
		err = r.pauseConsumer(ctx, t, queue, pausedUntil)
	} else {
		err = r.resumeConsumer(ctx, t, queue)
	}
	if errors.Is(err, errGroupMoved) {
		return nil
	}
	return err
}

// resumeWithin is how soon deliveries go on after a pause.
const resumeWithin = 100 * time.Millisecond

// resumeConsumer has the server deliver again, very soon. A pause that is taken away does not wake
// the pulls that wait (nats-server 2.15.2), and one that reaches its end does. So the pause is made
// to end in a moment, by the clock of the server.
func (r *records) resumeConsumer(ctx context.Context, t *streams.Topic, consumer string) error {
	for within := resumeWithin; ; within *= 2 {
		info, err := r.consumer(ctx, t, consumer)
		if errors.Is(err, event.ErrNotFound) {
			return errGroupMoved
		}
		if err != nil {
			return err
		}
		ends, err := r.pausedConsumer(ctx, t, consumer, info.TimeStamp.Add(within))
		if err != nil || ends || within > 10*time.Second {
			return err
		}
	}
}

// pauseConsumer has the server deliver nothing until a time. It returns errGroupMoved when the
// consumer is gone.
func (r *records) pauseConsumer(ctx context.Context, t *streams.Topic, consumer string, until time.Time) error {
	_, err := r.pausedConsumer(ctx, t, consumer, until)
	return err
}

// pausedConsumer is pauseConsumer. It reports whether the time was still to come.
func (r *records) pausedConsumer(ctx context.Context, t *streams.Topic, consumer string, until time.Time) (bool, error) {
	answer, err := r.conn.JS.PauseConsumer(ctx, t.Stream.Name, consumer, until)
	if errors.Is(err, natsjs.ErrConsumerNotFound) {
		return false, errGroupMoved
	}
	if err != nil {
		return false, fmt.Errorf("jetstream: pause consumer %s of stream %s: %w", consumer, t.Stream.Name, err)
	}
	return answer.Paused, nil
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
