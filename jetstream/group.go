package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// memoryTTL is the longest TTL of a group whose consumer lives in the server's memory. A thousand
// consumers on one topic deliver two to four times as many events from memory as from files, which
// is what browser tabs need; a group that is to outlive its members for longer is kept in a file.
const memoryTTL = time.Minute

// group is a durable consumer. All members of this hub share it.
type group struct {
	bus      *Bus
	topic    *streams.Topic
	name     string // as clients say it
	consumer string // its name on the server; a seek changes it
	fence    fence
	next     string // the subject to pull from
	info     string // the subject that asks about the consumer
	created  time.Time
	ttl      atomic.Int64  // a time.Duration; 0: it stays
	memory   bool          // it dies with its server
	maker    string        // the client that made it, "" for none
	slots    int           // of an ordered group; 0: it is not one
	ordering *orderedGroup // of an ordered group
	first    uint64        // the first event that it is given at all
	past     past          // what is known of events from generations before
	paths    []path        // to the consumer, one for each connection of the pool

	arriving atomic.Int64 // events that arrived and are not held yet; raised with mu held
	// it was made in place of one that is gone; taken by the member that tells
	lost     atomic.Bool
	deleted  atomic.Bool   // somebody deleted it
	revision atomic.Uint64 // of the generation that named it; 0: none did
	letters  atomic.Int32  // dead letters that are not stored yet
	seen     atomic.Int64  // when it was last noted that it has members; see keepSeen

	lingering int // its inboxes that linger; guarded by lingering.mu

	// Guarded by groupRegistry.mu.
	users   int                        // how often share returned it
	members map[*Subscription]struct{} // of this hub

	mu      sync.Mutex
	known   attempts
	looking sparedLook
	track   track
	acks    string // what its ack subjects begin with; "" before the first delivery
	watched int64  // when the server was last asked how far the group is
	idleAt  int64  // when it may be asked again whether other members wait
	sight   sight
	stuck   stuck
	sent    sentTimes
	leader  string // the server that led the consumer last; "" if that is not known
	ledAt   int64  // when the server was asked for it
	told    uint64 // the end of the last gap that the members know of
	// found is what is to be looked at for losses, and waiting the deliveries that came meanwhile;
	// both are bounded by what members hold.
	found    []found
	waiting  []*Delivery
	checking bool
}

func (b *Bus) newGroup(t *streams.Topic, name string, info *natsjs.ConsumerInfo, revision uint64, known past) *group {
	g := &group{
		bus: b, topic: t, name: name, consumer: info.Name, fence: newFence(max(info.Config.AckWait, time.Second)),
		created: native.ConsumerMade(info), memory: info.Config.MemoryStorage, maker: info.Config.Metadata[records.MetaMaker], slots: slotsOf(info),
		first: max(info.Config.OptStartSeq, 1), past: known,
		next:  b.conn.API + "CONSUMER.MSG.NEXT." + t.Stream.Name + "." + info.Name,
		info:  b.conn.API + "CONSUMER.INFO." + t.Stream.Name + "." + info.Name,
		paths: make([]path, len(b.conn.Links)),
		track: newTrack(info),
		sight: newSight(t, info),
	}
	g.ttl.Store(int64(info.Config.InactiveThreshold))
	g.revision.Store(revision)
	return b.groups.share(g)
}

// timeToLive is how long the group outlives its last member; 0: it stays.
func (g *group) timeToLive() time.Duration { return time.Duration(g.ttl.Load()) }

// key names the consumer among all of the server.
func (g *group) key() string { return g.topic.Stream.Name + "." + g.consumer }

// source names the group as the source of a line in the log.
func (g *group) source() string { return g.topic.Name + "::" + g.name }

// pastOf is what the members of the next generation are to know of events.
func pastOf(p *records.Generation) past {
	if p.Deleted {
		return past{}
	}
	return past{p.Settled, p.Tried}
}

// endedSince reports whether the group was deleted since its member knew it. A member that knows
// none yet is new.
func endedSince(p *records.Generation, was *group) bool {
	if was == nil {
		return false
	}
	known := was.revision.Load()
	return p.Deleted && p.Revision > known || p.After > known
}

// errGroupDeleted says that somebody deleted the group of a member.
var errGroupDeleted = errors.New("jetstream: the group was deleted")

// joining is who joins which group, and what becomes of a group that does not exist.
type joining struct {
	topic, group string
	ttl          time.Duration
	// client is for whom a new topic and a new group count; "" is the program itself. With free,
	// groups do not count.
	client string
	free   bool
	slots  int       // of an ordered group; 0: the group is not to be one
	start  startFunc // asked only when the group is new
	// was is the group as the member knew it; nil for a new member. gone says that its consumer was
	// deleted, and ends that the member ends when somebody has deleted the group.
	was        *group
	gone, ends bool

	queue string // set by join: the queue of what was put back to the group
}

// join finds the group, or makes it, and its topic too.
//
// The server says that a consumer was deleted before it is done, and a consumer of that name made
// then would begin with what is left of it on disk, its leases included: so the group goes on under
// a new name, as after a seek. Groups with a TTL live in memory, and leave nothing.
func (b *Bus) join(ctx context.Context, j *joining) (*group, error) {
	var noted records.Entry
	g, err := b.joinNoting(ctx, j, &noted)
	if noted != (records.Entry{}) && (err != nil || g.maker != noted.Client) {
		b.records.Makers.Forget(ctx, noted) // it was not made, or by another
	}
	return g, err
}

// joinNoting is join. It sets noted when the group is noted for the client.
func (b *Bus) joinNoting(ctx context.Context, j *joining, noted *records.Entry) (*group, error) {
	dead := j.was
	if !j.gone {
		dead = nil
	}
	if j.ends && j.was != nil {
		switch gone, err := b.records.Deleted(ctx, j.was.topic.Stream); {
		case err != nil:
			return nil, b.conn.Unavailable(err)
		case gone:
			return nil, errGroupDeleted
		}
	}
	for range 8 {
		t, state, err := b.streams.FreshTopic(ctx, j.topic, j.client)
		if err != nil {
			return nil, err
		}
		ptr, err := b.records.Generation(ctx, t, j.group)
		if err != nil {
			return nil, b.conn.Unavailable(err)
		}
		if j.queue = ptr.PutBack; ptr.Deleted {
			j.queue = ""
		}
		if j.ends && endedSince(&ptr, j.was) {
			return nil, errGroupDeleted
		}
		info, err := b.records.GroupConsumer(ctx, t, &ptr)
		if err == nil && j.was == nil {
			if err := sameOrder(j, info); err != nil {
				return nil, err
			}
		}
		if err == nil && !dead.is(info) {
			g, err := b.rewound(ctx, t, j.group, ptr, info, state.LastSeq)
			if errors.Is(err, records.ErrMoved) {
				continue
			}
			if g != nil || err != nil {
				return g, err
			}
			if j.ttl > 0 || info.Config.InactiveThreshold == 0 {
				return b.newGroup(t, j.group, info, ptr.Revision, pastOf(&ptr)), nil
			}
			g, err = b.makeDurable(ctx, t, j.group, ptr, info)
			if errors.Is(err, records.ErrMoved) {
				continue
			}
			return g, err
		}
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return nil, b.conn.Unavailable(err)
		}
		from, err := b.startOf(ctx, t, j, &ptr, state)
		if err != nil {
			return nil, err
		}
		if !from.goesOn && *noted == (records.Entry{}) {
			if *noted, err = b.mayMakeGroup(ctx, t, j, state.Consumers); err != nil {
				return nil, err
			}
		}
		if j.was != nil && ptr.Durable {
			from.ttl = 0 // the member did not hear of it
		}
		anew := j.was == nil && !from.goesOn && !ptr.Deleted
		if anew { // nothing of a group of this name that has ended stays
			if err := b.records.DeleteBookmarks(ctx, t, j.group); err != nil {
				return nil, b.conn.Unavailable(err)
			}
			if anew = ptr.Carries(); anew {
				was := ptr
				ptr, j.queue = ptr.Emptied(), ""
				from.lost = from.lost || was.Number > 1 && from.ttl == 0
			}
		}
		if ptr.Deleted || anew || dead.leftOnDisk(t, ptr.Consumer) {
			g, err := b.startUnderNewName(ctx, t, j.group, ptr, from)
			if errors.Is(err, records.ErrMoved) {
				continue
			}
			if g != nil && anew {
				g.lost.Store(from.lost)
			}
			return g, err
		}
		from.paused = ptr.Paused
		info, err = b.createConsumer(ctx, t, j.group, ptr.Consumer, from)
		if errors.Is(err, natsjs.ErrConsumerExists) || err == nil && dead.is(info) {
			continue // another hub was first: its start counts; or the deleted one is still there
		}
		if err != nil {
			return nil, b.conn.Unavailable(err)
		}
		if hasRemains(info) {
			b.log.WarnContext(ctx, "found the remains of a consumer that the machines of NATS lost in a crash; the group starts under another name",
				slog.String("topic", t.Name), slog.String("group", j.group), slog.String("consumer", info.Name))
			g, err := b.startUnderNewName(ctx, t, j.group, ptr, from)
			if errors.Is(err, records.ErrMoved) {
				continue
			}
			if g != nil {
				g.lost.Store(from.lost || dead == nil && ptr.Number > 1 && from.ttl == 0)
			}
			return g, err
		}
		// A seek that came between reading the generation and here does not know of this consumer.
		again, err := b.records.Generation(ctx, t, j.group)
		if err != nil {
			return nil, b.conn.Unavailable(err)
		}
		if !again.Deleted && again.Consumer == info.Name {
			g := b.newGroup(t, j.group, info, again.Revision, pastOf(&again))
			// A later generation says that there was a group. With a TTL, it may have ended in
			// order.
			g.lost.Store(from.lost || dead == nil && ptr.Number > 1 && from.ttl == 0)
			g.storeFirstMark(ctx, from.seq-1)
			return g, nil
		}
		b.records.DeleteConsumer(ctx, t.Stream.Name, info.Name)
	}
	return nil, &event.Error{Code: event.CodeSubscribeFailed, Msg: "the group is being moved again and again: try later"}
}

// mayMakeGroup counts a new group for the client that joins it, or returns the refusal. consumers
// is how many its stream has.
func (b *Bus) mayMakeGroup(ctx context.Context, t *streams.Topic, j *joining, consumers int) (records.Entry, error) {
	if j.client == "" {
		return records.Entry{}, nil
	}
	if consumers >= t.Stream.Room {
		b.obs.LimitReached("stream_groups")
		return records.Entry{}, &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("the topic has as many groups as there is room for on its stream, which is %d: have some deleted, or let them end by opts.groupTtlMs", t.Stream.Room)}
	}
	if j.free {
		return records.Entry{}, nil
	}
	return b.records.Makers.Note(ctx, t, j.group, j.client)
}

// makeDurable takes the TTL from a group that a member joins without one, so that nobody ends a
// group of others by having made it first. It returns records.ErrMoved when the group is another by
// then.
//
// The server changes the TTL of a consumer in a file, which keeps its leases and all that is
// settled. From memory, the group moves to a consumer in a file, as by a seek: at its oldest
// unsettled event, so that what was settled out of order behind it comes again.
func (b *Bus) makeDurable(ctx context.Context, t *streams.Topic, name string, ptr records.Generation, info *natsjs.ConsumerInfo) (*group, error) {
	durable := ptr
	durable.Durable = true
	if info.Config.MemoryStorage {
		to := groupStart{seq: max(info.AckFloor.Stream+1, info.Config.OptStartSeq), maker: info.Config.Metadata[records.MetaMaker], slots: slotsOf(info)}
		if live := b.groups.liveGroup(t, ptr.Consumer); live != nil {
			to.seq = max(to.seq, b.groups.resumeAt(live)) // acks may be under way
		}
		moved, rev, err := b.moveGroup(ctx, t, name, durable, to)
		if err != nil {
			return nil, b.unavailableUnless(err, records.ErrMoved)
		}
		b.records.DeleteConsumer(ctx, t.Stream.Name, ptr.Consumer)
		b.log.InfoContext(ctx, "group has no TTL any more; moved to a file", slog.String("topic", t.Name), slog.String("group", name))
		return b.newGroup(t, name, moved, rev, pastOf(&ptr)), nil
	}
	cfg := info.Config
	cfg.InactiveThreshold = 0
	_, err := b.conn.JS.UpdateConsumer(ctx, t.Stream.Name, cfg)
	if errors.Is(err, natsjs.ErrConsumerDoesNotExist) || errors.Is(err, natsjs.ErrConsumerNotFound) {
		return nil, records.ErrMoved // it ended at this moment
	}
	if err != nil {
		return nil, b.conn.Unavailable(fmt.Errorf("jetstream: take the TTL from consumer %s of stream %s: %w", info.Name, t.Stream.Name, err))
	}
	// other hubs read it there
	rev, err := b.records.Swap(ctx, t, name, ptr, durable)
	if err != nil {
		return nil, b.unavailableUnless(err, records.ErrMoved)
	}
	b.log.InfoContext(ctx, "group has no TTL any more", slog.String("topic", t.Name), slog.String("group", name))
	info.Config = cfg
	return b.newGroup(t, name, info, rev, pastOf(&ptr)), nil
}

// unavailableUnless is unavailable, but for an error that the caller handles.
func (c *core) unavailableUnless(err, but error) error {
	if errors.Is(err, but) {
		return err
	}
	return c.conn.Unavailable(err)
}

// is reports whether a consumer is the group's own, and not another one of its name.
func (g *group) is(info *natsjs.ConsumerInfo) bool {
	return g != nil && g.consumer == info.Name && g.created.Equal(native.ConsumerMade(info))
}

// leftOnDisk reports whether the group had the name, on the stream that t is on, and left something
// on disk under it.
func (g *group) leftOnDisk(t *streams.Topic, consumer string) bool {
	return g != nil && g.consumer == consumer && g.topic.Stream.Created.Equal(t.Stream.Created) && !g.memory
}

// hasRemains reports whether a consumer that was made a moment ago began with a position on disk: a
// consumer of its name had left it, and the description of that consumer was not synced before the
// machines of NATS crashed. The server does not remember when such a consumer has delivered last.
func hasRemains(info *natsjs.ConsumerInfo) bool {
	return info.Delivered.Last == nil && (info.Delivered.Consumer > 0 || info.AckFloor.Consumer > 0 || info.NumAckPending > 0)
}

// startUnderNewName starts a group whose consumer's name has something left on disk. It returns
// records.ErrMoved when another was first.
func (b *Bus) startUnderNewName(ctx context.Context, t *streams.Topic, name string, ptr records.Generation, from groupStart) (*group, error) {
	info, rev, err := b.moveGroup(ctx, t, name, ptr, from)
	if err != nil {
		return nil, b.unavailableUnless(err, records.ErrMoved)
	}
	b.records.DeleteConsumer(ctx, t.Stream.Name, ptr.Consumer)
	g := b.newGroup(t, name, info, rev, pastOf(&ptr))
	g.storeFirstMark(ctx, from.seq-1)
	return g, nil
}

// moveGroup makes a consumer of a new name the group's next generation in one compare-and-set: it
// returns records.ErrMoved when another was first.
func (b *Bus) moveGroup(ctx context.Context, t *streams.Topic, group string, from records.Generation, to groupStart) (*natsjs.ConsumerInfo, uint64, error) {
	next := from.Next(t, group)
	to.paused = next.Paused
	info, err := b.createConsumer(ctx, t, group, next.Consumer, to)
	if err != nil {
		return nil, 0, err
	}
	rev, err := b.records.Swap(ctx, t, group, from, next)
	if errors.Is(err, records.ErrMoved) {
		b.records.DeleteConsumer(ctx, t.Stream.Name, next.Consumer)
	}
	if err == nil && info.Config.MemoryStorage {
		b.records.StoreMark(ctx, t, group, records.Mark{
			Consumer: next.Consumer, Stream: t.Stream.Created, Floor: to.seq - min(to.seq, 1), TTLMS: to.ttl.Milliseconds(),
			SeenMS: time.Now().UnixMilli(), Left: true, Maker: to.maker,
		})
	}
	// other errors leave the outcome unknown: the sweeper removes what is no group's
	return info, rev, err
}

// gone reports whether err says that a consumer, or its stream, does not exist.
func gone(err error) bool {
	return errors.Is(err, event.ErrNotFound) || errors.Is(err, records.ErrStreamGone)
}

func (b *Bus) createConsumer(ctx context.Context, t *streams.Topic, group, name string, from groupStart) (*natsjs.ConsumerInfo, error) {
	cfg := native.ConsumerConfig(t.Name, group, name, t.Stream.Family)
	cfg.OptStartSeq, cfg.AckWait = from.seq, b.cfg.AckWait
	if from.maker != "" {
		cfg.Metadata[records.MetaMaker] = from.maker
	}
	if from.slots > 0 {
		cfg.Metadata[native.MetaSlots] = strconv.Itoa(from.slots)
	}
	if from.paused {
		cfg.PauseUntil = &pausedUntil
	}
	if from.ttl > 0 {
		cfg.InactiveThreshold = from.ttl
		cfg.MemoryStorage = from.ttl <= memoryTTL
	}
	c, err := b.conn.JS.CreateConsumer(ctx, t.Stream.Name, cfg)
	if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == natsjs.JSErrCodeMaximumConsumersLimit {
		return nil, &event.Error{Code: event.CodeOverloaded, Msg: "the topic has as many groups as the event store keeps for one: have some deleted, or let them end by opts.groupTtlMs"}
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: create consumer %s of stream %s: %w", name, t.Stream.Name, err)
	}
	return c.CachedInfo(), nil
}
