package bench

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// eventSubject returns the native subject for events of a topic.
func eventSubject(topic string) string { return "event." + topic }

// objectName returns the hub's name for the stream of a topic or the consumer of a group. Names
// beyond the hub's length limit are not supported.
func objectName(s string) string {
	var b strings.Builder
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '_', c == '-':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return b.String()
}

// makeStream creates the stream of a topic with the same settings as the hub.
func (a *admin) makeStream(ctx context.Context, topic string, replicas int) error {
	_, err := a.js.CreateStream(ctx, natsjs.StreamConfig{
		Name:        objectName(topic),
		Subjects:    []string{eventSubject(topic), "keyed.*." + topic},
		MaxAge:      7 * 24 * time.Hour,
		Duplicates:  2 * time.Minute,
		Replicas:    replicas,
		AllowDirect: true,
	})
	if err != nil {
		return fmt.Errorf("create the stream of %s: %w", topic, err)
	}
	return nil
}

// consumerConfig returns the configuration of a group's consumer with the same settings as the hub.
// ttl 0 means a durable group.
func consumerConfig(group string, ttl time.Duration) natsjs.ConsumerConfig {
	name := objectName(group)
	return natsjs.ConsumerConfig{
		Name:              name,
		Durable:           name,
		DeliverPolicy:     natsjs.DeliverByStartSequencePolicy,
		OptStartSeq:       1,
		AckPolicy:         natsjs.AckExplicitPolicy,
		AckWait:           30 * time.Second,
		MaxDeliver:        -1,
		MaxAckPending:     65_536,
		MaxWaiting:        4096,
		InactiveThreshold: ttl,
		MemoryStorage:     ttl > 0,
	}
}

// stored returns the number of events in the topic's stream, or 0 without a stream.
func (a *admin) stored(ctx context.Context, topic string) (int, error) {
	name, err := a.js.StreamNameBySubject(ctx, eventSubject(topic))
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return 0, nil
	}
	if err == nil {
		var stream natsjs.Stream
		if stream, err = a.js.Stream(ctx, name); err == nil {
			return int(stream.CachedInfo().State.Msgs), nil //nolint:gosec // the count fits
		}
	}
	return 0, fmt.Errorf("read the stream of %s: %w", topic, err)
}

// settled waits until the server has delivered every event to all groups of a topic and processed
// the acknowledgements.
func (a *admin) settled(ctx context.Context, topic string) error {
	stream, err := a.js.Stream(ctx, objectName(topic))
	if err != nil {
		return fmt.Errorf("read the stream of %s: %w", topic, err)
	}
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	timeout := time.NewTimer(stallAfter)
	defer timeout.Stop()
	for {
		pending, unacked := uint64(0), 0
		groups := stream.ListConsumers(ctx)
		for info := range groups.Info() {
			pending += info.NumPending
			unacked += info.NumAckPending
		}
		if err := groups.Err(); err != nil {
			return fmt.Errorf("list the groups of %s: %w", topic, err)
		}
		if pending == 0 && unacked == 0 {
			return nil
		}
		select {
		case <-ticker.C:
		case <-timeout.C:
			return fmt.Errorf("%d events still undelivered and %d unacknowledged after %v", pending, unacked, stallAfter)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// remove deletes the stream of a topic that only this run has used.
func (a *admin) remove(ctx context.Context, topic string) error {
	if err := a.js.DeleteStream(ctx, objectName(topic)); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return fmt.Errorf("remove the stream of %s: %w", topic, err)
	}
	return nil
}
