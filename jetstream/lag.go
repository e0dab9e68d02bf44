package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// MaxLags is the maximum number of groups that Groups.Lags returns.
const MaxLags = 10_000

// Lag is how far a group is behind. The figures are those of the leaders of the group's consumers;
// reading them reads at most one event.
type Lag struct {
	Topic, Group string
	// Ephemeral is set for a group with a TTL.
	Ephemeral bool
	// Pending is the number of events that were not delivered yet, those that a redrive has put
	// back included.
	Pending uint64
	// InFlight is the number of events that were delivered and are not settled, those in back-off
	// included.
	InFlight uint64
	// OldestUnacked is how long ago the oldest event was stored that is not settled; 0 if there is
	// none.
	OldestUnacked time.Duration
	// StuckSince is since when the group is stuck: events and requests of members of this hub wait,
	// and the server has delivered nothing for Limits.StuckAfter. Zero: it is not, or it has no
	// members on this hub.
	StuckSince time.Time
}

// Lags returns the lag of up to limit groups of all topics, in the order of topics and groups. more
// says that there are further groups. limit is 1..MaxLags.
func (a Groups) Lags(ctx context.Context, limit int) (lags []Lag, more bool, err error) {
	b := a.bus
	if limit < 1 || limit > MaxLags {
		return nil, false, badOptions("limit is %d: 1 to %d are allowed", limit, MaxLags)
	}
	type name struct{ topic, group string }
	consumers := make(map[name][]*natsjs.ConsumerInfo)
	streams := b.js.StreamNames(ctx)
	for stream := range streams.Name() {
		if strings.HasPrefix(stream, "KV_") || strings.HasPrefix(stream, "OBJ_") {
			continue
		}
		err := b.eachConsumer(ctx, stream, func(info *natsjs.ConsumerInfo) {
			if at := (name{info.Config.Metadata[metaTopic], info.Config.Metadata[metaGroup]}); at.topic != "" && at.group != "" {
				consumers[at] = append(consumers[at], info)
			}
		})
		if err != nil {
			return nil, false, b.unavailable(err)
		}
	}
	if err := streams.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return nil, false, b.unavailable(fmt.Errorf("jetstream: list streams: %w", err))
	}
	names := make([]name, 0, len(consumers))
	for at := range consumers {
		names = append(names, at)
	}
	slices.SortFunc(names, func(a, b name) int {
		if c := strings.Compare(a.topic, b.topic); c != 0 {
			return c
		}
		return strings.Compare(a.group, b.group)
	})
	for _, at := range names {
		lag, ok, err := b.lag(ctx, at.topic, at.group, consumers[at])
		if err != nil {
			return nil, false, err
		}
		if !ok {
			continue
		}
		if len(lags) == limit {
			return lags, true, nil
		}
		lags = append(lags, lag)
	}
	return lags, false, nil
}

// eachConsumer calls f for each consumer of a stream. A stream that does not exist has none.
func (b *Bus) eachConsumer(ctx context.Context, stream string, f func(*natsjs.ConsumerInfo)) error {
	s, err := b.js.Stream(ctx, stream)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("jetstream: stream %s: %w", stream, err)
	}
	list := s.ListConsumers(ctx)
	for info := range list.Info() {
		b.seen(info)
		f(info)
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return fmt.Errorf("jetstream: list consumers of stream %s: %w", stream, err)
	}
	return nil
}

// Lag returns how far the group is behind. It returns ErrNotFound when the topic or the group does
// not exist.
func (g Group) Lag(ctx context.Context) (Lag, error) {
	b := g.bus
	t, ptr, err := g.pointer(ctx)
	if err != nil {
		return Lag{}, err
	}
	info, err := b.groupConsumer(ctx, t, &ptr)
	if errors.Is(err, ErrNotFound) {
		return Lag{}, ErrNotFound
	}
	if err != nil {
		return Lag{}, b.unavailable(err)
	}
	lag, err := b.lagOf(ctx, t, g.name, []*natsjs.ConsumerInfo{info})
	if err != nil {
		return Lag{}, err
	}
	waiting, leased, err := b.putBackCount(ctx, ptr.PutBack)
	if err != nil {
		return Lag{}, b.unavailable(err)
	}
	lag.Pending += waiting
	lag.InFlight += leased
	return lag, nil
}

// lag adds up the consumers of a group: that of its present generation, and that of its put-back
// events. ok is false for a group that does not exist any more.
func (b *Bus) lag(ctx context.Context, topic, group string, consumers []*natsjs.ConsumerInfo) (lag Lag, ok bool, err error) {
	t, err := b.existing(ctx, topic)
	if errors.Is(err, ErrNotFound) {
		return lag, false, nil
	}
	if err != nil {
		return lag, false, err
	}
	if len(consumers) > 1 || consumers[0].Stream != t.stream.name {
		ptr, err := b.generations.get(ctx, t, group)
		if err != nil {
			return lag, false, b.unavailable(err)
		}
		consumers = slices.DeleteFunc(consumers, func(info *natsjs.ConsumerInfo) bool {
			return ptr.Deleted || info.Name != ptr.Consumer && info.Name != ptr.PutBack
		})
	}
	if !slices.ContainsFunc(consumers, func(info *natsjs.ConsumerInfo) bool { return info.Stream == t.stream.name }) {
		return lag, false, nil
	}
	lag, err = b.lagOf(ctx, t, group, consumers)
	return lag, err == nil, err
}

// lagOf adds up the consumers of a group.
func (b *Bus) lagOf(ctx context.Context, t *topicInfo, group string, consumers []*natsjs.ConsumerInfo) (Lag, error) {
	lag := Lag{Topic: t.name, Group: group}
	for _, info := range consumers {
		if at := b.stuckSince(info); !at.IsZero() {
			lag.StuckSince = at
		}
		lag.Ephemeral = lag.Ephemeral || info.Config.InactiveThreshold > 0
		open := info.NumPending + uint64(max(info.NumAckPending, 0))
		lag.Pending += info.NumPending
		lag.InFlight += open - info.NumPending
		if open == 0 || info.Stream != t.stream.name {
			continue
		}
		oldest, err := b.nextStored(ctx, t, &walkOptions{}, floorOf(info))
		if err != nil {
			return lag, err
		}
		if oldest != nil {
			lag.OldestUnacked = max(info.TimeStamp.Sub(oldest.time), 0)
		}
	}
	return lag, nil
}
