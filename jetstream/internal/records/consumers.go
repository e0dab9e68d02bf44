package records

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

// ErrStreamGone says that the stream was deleted since this hub met it.
var ErrStreamGone = errors.New("jetstream: the stream was deleted")

// Consumer looks a group's consumer up. It returns ErrNotFound when there is none.
func (r *Records) Consumer(ctx context.Context, t *streams.Topic, name string) (*natsjs.ConsumerInfo, error) {
	c, err := r.Conn.JS.Consumer(ctx, t.Stream.Name, name)
	switch {
	case errors.Is(err, natsjs.ErrConsumerNotFound):
		return nil, event.ErrNotFound
	case errors.Is(err, natsjs.ErrStreamNotFound):
		r.Streams.Forget(t.Stream)
		return nil, fmt.Errorf("%w: topic %s", ErrStreamGone, t.Name)
	case err != nil:
		return nil, fmt.Errorf("jetstream: consumer %s of stream %s: %w", name, t.Stream.Name, err)
	}
	info := c.CachedInfo()
	if info.Config.AckPolicy != natsjs.AckExplicitPolicy || info.Config.DeliverSubject != "" {
		return nil, &event.Error{Code: event.CodeSubscribeFailed, Msg: "a consumer of that name exists that is no group (it is a push consumer, or without explicit acks): choose another group name"}
	}
	return info, nil
}

// GroupConsumer looks the consumer up that a group now is. It returns ErrNotFound when there is
// none, or when the group was deleted.
func (r *Records) GroupConsumer(ctx context.Context, t *streams.Topic, ptr *Generation) (*natsjs.ConsumerInfo, error) {
	if ptr.Deleted {
		return nil, event.ErrNotFound
	}
	return r.Consumer(ctx, t, ptr.Consumer)
}

// DeleteConsumer deletes a consumer that no group uses.
func (r *Records) DeleteConsumer(ctx context.Context, stream, name string) {
	if err := r.Conn.JS.DeleteConsumer(ctx, stream, name); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
		r.Often.Log(ctx, slog.LevelWarn, "a consumer that no group uses could not be deleted", stream, slog.String("stream", stream), slog.String("consumer", name), slog.Any("error", err))
	}
}

// resumeWithin is how soon deliveries go on after a pause.
const resumeWithin = 100 * time.Millisecond

// ResumeConsumer has the server deliver again, very soon. A pause that is taken away does not wake
// the pulls that wait (nats-server 2.15.2), and one that reaches its end does. So the pause is made
// to end in a moment, by the clock of the server.
func (r *Records) ResumeConsumer(ctx context.Context, t *streams.Topic, consumer string) error {
	for within := resumeWithin; ; within *= 2 {
		info, err := r.Consumer(ctx, t, consumer)
		if errors.Is(err, event.ErrNotFound) {
			return ErrMoved
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

// PauseConsumer has the server deliver nothing until a time. It returns ErrMoved when the
// consumer is gone.
func (r *Records) PauseConsumer(ctx context.Context, t *streams.Topic, consumer string, until time.Time) error {
	_, err := r.pausedConsumer(ctx, t, consumer, until)
	return err
}

// pausedConsumer is PauseConsumer. It reports whether the time was still to come.
func (r *Records) pausedConsumer(ctx context.Context, t *streams.Topic, consumer string, until time.Time) (bool, error) {
	answer, err := r.Conn.JS.PauseConsumer(ctx, t.Stream.Name, consumer, until)
	if errors.Is(err, natsjs.ErrConsumerNotFound) {
		return false, ErrMoved
	}
	if err != nil {
		return false, fmt.Errorf("jetstream: pause consumer %s of stream %s: %w", consumer, t.Stream.Name, err)
	}
	return answer.Paused, nil
}
