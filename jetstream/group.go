package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Settings of every group's consumer.
const (
	// more than the default, so that events in back-off do not block fresh ones
	maxAckPending = 65_536
	maxWaiting    = 4_096 // pulls that wait: one or two for each member
)

// memoryTTL is the longest TTL of a group whose consumer lives in the server's memory. A thousand
// consumers on one topic deliver two to four times as many events from memory as from files, which
// is what browser tabs need; a group that is to outlive its members for longer is kept in a file.
const memoryTTL = time.Minute

// group is a durable consumer. All members of this hub share it.
type group struct {
	bus      *Bus
	topic    *topicInfo
	name     string // as clients say it
	consumer string // its name on the server; a seek changes it
	fence    fence
	next     string // the subject to pull from
	info     string // the subject that asks about the consumer
	created  time.Time
	ttl      time.Duration // 0: it stays
	memory   bool          // it dies with its server
	first    uint64        // the first event that it is given at all
	paths    []path        // to the consumer, one for each connection of the pool

	arriving atomic.Int64 // events that arrived and are not held yet; raised with mu held
	// it was made in place of one that is gone; taken by the member that tells
	lost     atomic.Bool
	revision atomic.Uint64 // of the generation that named it; 0: none did
	letters  atomic.Int32  // dead letters that are not stored yet

	// Guarded by Bus.groupMu.
	users   int                        // how often share returned it
	members map[*Subscription]struct{} // of this hub

	mu      sync.Mutex
	known   attempts
	track   track
	acks    string // what its ack subjects begin with; "" before the first delivery
	watched int64  // when the server was last asked how far the group is
	idleAt  int64  // when it may be asked again whether other members wait
}

func (b *Bus) newGroup(t *topicInfo, name string, info *natsjs.ConsumerInfo, revision uint64) *group {
	g := &group{
		bus: b, topic: t, name: name, consumer: info.Name, fence: newFence(max(info.Config.AckWait, time.Second)),
		created: info.Created, ttl: info.Config.InactiveThreshold, memory: info.Config.MemoryStorage,
		first: max(info.Config.OptStartSeq, 1),
		next:  b.api + "CONSUMER.MSG.NEXT." + t.stream.name + "." + info.Name,
		info:  b.api + "CONSUMER.INFO." + t.stream.name + "." + info.Name,
		paths: make([]path, len(b.links)),
		track: newTrack(info),
	}
	g.revision.Store(revision)
	return b.share(g)
}

// key names the consumer among all of the server.
func (g *group) key() string { return g.topic.stream.name + "." + g.consumer }

// share returns the group that the hub's members of this consumer have in common. Each call is one
// use, which unshare ends.
func (b *Bus) share(g *group) *group {
	b.groupMu.Lock()
	defer b.groupMu.Unlock()
	if known := b.groups[g.key()]; known != nil && known.created.Equal(g.created) && known.topic.stream.created.Equal(g.topic.stream.created) {
		known.users++
		known.revision.Store(max(known.revision.Load(), g.revision.Load()))
		return known
	}
	now := b.clock.now()
	for i := range g.paths {
		g.paths[i].reset(now)
	}
	g.users, g.members = 1, make(map[*Subscription]struct{})
	b.groups[g.key()] = g
	return g
}

// liveGroup is the group on a consumer of that name that has members here; nil if there is none.
func (b *Bus) liveGroup(t *topicInfo, consumer string) *group {
	b.groupMu.Lock()
	defer b.groupMu.Unlock()
	g := b.groups[t.stream.name+"."+consumer]
	if g == nil || len(g.members) == 0 || !g.topic.stream.created.Equal(t.stream.created) {
		return nil
	}
	return g
}

// addMember makes a subscription known as a member of the group.
func (b *Bus) addMember(g *group, s *Subscription) {
	b.groupMu.Lock()
	defer b.groupMu.Unlock()
	g.members[s] = struct{}{}
}

// membersOf returns the members of the group on this hub.
func (b *Bus) membersOf(g *group) []*Subscription {
	b.groupMu.Lock()
	defer b.groupMu.Unlock()
	return slices.Collect(maps.Keys(g.members))
}

// unshare ends one use of the group, that of member s if it had entered.
func (b *Bus) unshare(g *group, s *Subscription) {
	b.groupMu.Lock()
	defer b.groupMu.Unlock()
	delete(g.members, s)
	if g.users--; g.users == 0 && b.groups[g.key()] == g {
		delete(b.groups, g.key())
	}
}

// eachGroup calls f for the groups that have members here, without holding the lock.
func (b *Bus) eachGroup(f func(*group)) {
	b.groupMu.Lock()
	groups := make([]*group, 0, len(b.groups))
	for _, g := range b.groups {
		groups = append(groups, g)
	}
	b.groupMu.Unlock()
	for _, g := range groups {
		f(g)
	}
}

// consumerName is the name of a group's first consumer. In a family stream other topics may have a
// group of the same name, so there the topic is part of it; topics have no @.
func (t *topicInfo) consumerName(group string) string {
	if t.stream.family {
		return objectName(group + "@" + t.name)
	}
	return objectName(group)
}

// errStreamGone says that the stream was deleted since this hub met it.
var errStreamGone = errors.New("jetstream: the stream was deleted")

// join finds the group, or makes it: its topic too, which counts for client. start is asked only
// when the group is new.
//
// dead, if not nil, is the group as a member knew it whose consumer was deleted. The server says so
// before it is done, and a consumer of that name made now would begin with what is left of it on
// disk, its leases included: so the group goes on under a new name, as after a seek. Groups with a
// TTL live in memory, and leave nothing.
func (b *Bus) join(ctx context.Context, topic, name string, ttl time.Duration, client string, start startFunc, dead *group) (*group, error) {
	for range 8 {
		t, state, err := b.freshTopic(ctx, topic, client)
		if err != nil {
			return nil, err
		}
		ptr, err := b.generations.get(ctx, t, name)
		if err != nil {
			return nil, b.unavailable(err)
		}
		info, err := b.consumer(ctx, t, ptr.Consumer)
		if err == nil && !dead.is(info) {
			return b.newGroup(t, name, info, ptr.revision), nil
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, b.unavailable(err)
		}
		seq, lost, err := b.startOf(ctx, t, name, ptr, state, start, dead)
		if err != nil {
			return nil, err
		}
		if dead.leftOnDisk(t, ptr.Consumer) {
			info, rev, err := b.moveGroup(ctx, t, name, ptr, ttl, seq)
			if errors.Is(err, errGroupMoved) {
				continue
			}
			if err != nil {
				return nil, b.unavailable(err)
			}
			b.deleteConsumer(ctx, t.stream.name, ptr.Consumer)
			return b.newGroup(t, name, info, rev), nil
		}
		info, err = b.createConsumer(ctx, t, name, ptr.Consumer, ttl, seq)
		if errors.Is(err, natsjs.ErrConsumerExists) || err == nil && dead.is(info) {
			continue // another hub was first: its start counts; or the deleted one is still there
		}
		if err != nil {
			return nil, b.unavailable(err)
		}
		// A seek that came between reading the generation and here does not know of this consumer.
		again, err := b.generations.get(ctx, t, name)
		if err != nil {
			return nil, b.unavailable(err)
		}
		if again.Consumer == info.Name {
			g := b.newGroup(t, name, info, again.revision)
			// A later generation says that there was a group. With a TTL, it may have ended in
			// order.
			g.lost.Store(lost || dead == nil && ptr.Number > 1 && ttl == 0)
			g.storeFirstMark(ctx, seq-1)
			return g, nil
		}
		b.deleteConsumer(ctx, t.stream.name, info.Name)
	}
	return nil, &Error{Code: CodeSubscribeFailed, Msg: "the group is being moved again and again: try later"}
}

// is reports whether a consumer is the group's own, and not another one of its name.
func (g *group) is(info *natsjs.ConsumerInfo) bool {
	return g != nil && g.consumer == info.Name && g.created.Equal(info.Created)
}

// leftOnDisk reports whether the group had the name, on the stream that t is on, and left something
// on disk under it.
func (g *group) leftOnDisk(t *topicInfo, consumer string) bool {
	return g != nil && g.consumer == consumer && g.topic.stream.created.Equal(t.stream.created) && !g.memory
}

// moveGroup makes a consumer of a new name the group's next generation in one compare-and-set: it
// returns errGroupMoved when another was first.
func (b *Bus) moveGroup(ctx context.Context, t *topicInfo, group string, from generation, ttl time.Duration, start uint64) (*natsjs.ConsumerInfo, uint64, error) {
	next := from.next(t, group)
	info, err := b.createConsumer(ctx, t, group, next.Consumer, ttl, start)
	if err != nil {
		return nil, 0, err
	}
	rev, err := b.generations.swap(ctx, t, group, from, next)
	if errors.Is(err, errGroupMoved) {
		b.deleteConsumer(ctx, t.stream.name, next.Consumer)
	}
	// other errors leave the outcome unknown: the sweeper removes what is no group's
	return info, rev, err
}

// freshTopic is the topic with the stream as it is now: generations count only for the very stream
// that they were made for, and what this hub knows may be of one that was deleted and made anew
// meanwhile.
func (b *Bus) freshTopic(ctx context.Context, topic, client string) (*topicInfo, natsjs.StreamState, error) {
	for range 3 {
		t, err := b.topic(ctx, topic, client)
		if err != nil {
			return nil, natsjs.StreamState{}, err
		}
		info, err := b.findStream(ctx, t.stream.name)
		if err == nil && info.Created.Equal(t.stream.created) {
			return t, info.State, nil
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, natsjs.StreamState{}, b.unavailable(err)
		}
		b.forget(t.stream)
	}
	return nil, natsjs.StreamState{}, &Error{Code: CodeSubscribeFailed, Msg: "the topic is being deleted and made again and again: try later"}
}

// freshExisting is freshTopic for those who read: it makes nothing, and returns ErrNotFound
// instead.
func (b *Bus) freshExisting(ctx context.Context, topic string) (*topicInfo, natsjs.StreamState, error) {
	t, err := b.existing(ctx, topic)
	if err != nil {
		return nil, natsjs.StreamState{}, err
	}
	info, err := b.findStream(ctx, t.stream.name)
	switch {
	case errors.Is(err, ErrNotFound):
		b.forget(t.stream)
		return nil, natsjs.StreamState{}, ErrNotFound
	case err != nil:
		return nil, natsjs.StreamState{}, b.unavailable(err)
	case !info.Created.Equal(t.stream.created):
		b.forget(t.stream)
		if t, err = b.existing(ctx, topic); err != nil {
			return nil, natsjs.StreamState{}, err
		}
	}
	return t, info.State, nil
}

// gone reports whether err says that a consumer, or its stream, does not exist.
func gone(err error) bool { return errors.Is(err, ErrNotFound) || errors.Is(err, errStreamGone) }

// consumer looks a group's consumer up. It returns ErrNotFound when there is none.
func (b *Bus) consumer(ctx context.Context, t *topicInfo, name string) (*natsjs.ConsumerInfo, error) {
	c, err := again(ctx, func(ctx context.Context) (natsjs.Consumer, error) { return b.js.Consumer(ctx, t.stream.name, name) })
	switch {
	case errors.Is(err, natsjs.ErrConsumerNotFound):
		return nil, ErrNotFound
	case errors.Is(err, natsjs.ErrStreamNotFound):
		b.forget(t.stream)
		return nil, fmt.Errorf("%w: topic %s", errStreamGone, t.name)
	case err != nil:
		return nil, fmt.Errorf("jetstream: consumer %s of stream %s: %w", name, t.stream.name, err)
	}
	info := c.CachedInfo()
	if info.Config.AckPolicy != natsjs.AckExplicitPolicy || info.Config.DeliverSubject != "" {
		return nil, &Error{Code: CodeSubscribeFailed, Msg: "a consumer of that name exists that is no group (it is a push consumer, or without explicit acks): choose another group name"}
	}
	return info, nil
}

func (b *Bus) createConsumer(ctx context.Context, t *topicInfo, group, name string, ttl time.Duration, start uint64) (*natsjs.ConsumerInfo, error) {
	cfg := natsjs.ConsumerConfig{
		Name:           name,
		Durable:        name,
		DeliverPolicy:  natsjs.DeliverByStartSequencePolicy,
		OptStartSeq:    start,
		AckPolicy:      natsjs.AckExplicitPolicy,
		AckWait:        b.cfg.AckWait,
		MaxDeliver:     -1,
		MaxAckPending:  maxAckPending,
		MaxWaiting:     maxWaiting,
		FilterSubjects: t.filters(),
		Metadata:       map[string]string{"eventhub.group": group, "eventhub.topic": t.name},
	}
	if ttl > 0 {
		cfg.InactiveThreshold = ttl
		cfg.MemoryStorage = ttl <= memoryTTL
	}
	c, err := again(ctx, func(ctx context.Context) (natsjs.Consumer, error) {
		return b.js.CreateConsumer(ctx, t.stream.name, cfg)
	})
	if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
		return nil, &Error{Code: CodeOverloaded, Msg: "the topic has as many groups as the event store keeps for one (1,000 unless it is configured otherwise): leave some, or let them end by opts.groupTtlMs"}
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: create consumer %s of stream %s: %w", name, t.stream.name, err)
	}
	return c.CachedInfo(), nil
}

func (b *Bus) deleteConsumer(ctx context.Context, stream, name string) {
	if err := b.js.DeleteConsumer(ctx, stream, name); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
		b.log.WarnContext(ctx, "a consumer that no group uses could not be deleted", slog.String("stream", stream), slog.String("consumer", name), slog.Any("error", err))
	}
}
