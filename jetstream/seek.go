package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
)

// MaxBack is the maximum of Back.
const MaxBack = 1_000_000_000

// fenceSlack is how much longer than fence.fresh a seek waits, for clocks that run at different
// rates.
const fenceSlack = 100 * time.Millisecond

// Moved is what a move of a group does, or would do.
type Moved struct {
	// Redelivered is the number of events that the group had settled and gets again. Skipped is the
	// number of events that it had not settled and does not get.
	Redelivered, Skipped uint64
	// AtMost says that the numbers are upper bounds: the new position is between events that are
	// settled and events that are not, or the topic changed while its events were counted.
	AtMost bool
}

// Seek is Move for programs that own the group: it creates a group that does not exist, and its
// topic, at the position.
func (g Group) Seek(ctx context.Context, to Position) error {
	_, err := g.move(ctx, to, moveOptions{creates: true})
	return err
}

// Move moves the group, live members on every hub included, and returns what that did. It returns
// ErrNotFound when the topic, the group or the bookmark does not exist.
//
// Every event behind the new position is delivered, also those that were settled; none before it
// is. A move to InPlace keeps what is settled, and the attempts of the other events: it repairs a
// group to which the server gives no events any more. Leases end, and events in back-off come at
// once. If the server does not tell which events are settled, those behind the oldest unsettled one
// come again; then Redelivered is an upper bound.
//
// After Move has returned, no hub begins a lease of an event that was fetched before, and no
// settlement of an earlier lease counts. Move therefore takes some seconds. If ctx ends before
// that, the group may have been moved; repeat the call to be sure.
//
// Neither the reset of a consumer nor a new consumer of the same name fences acks on their way.
// Each move therefore creates a consumer with a new name, and makes it the group's generation by
// one compare-and-set.
func (g Group) Move(ctx context.Context, to Position) (Moved, error) {
	return g.move(ctx, to, moveOptions{counts: true})
}

// Preview returns what Move would do now, and changes nothing.
func (g Group) Preview(ctx context.Context, to Position) (Moved, error) {
	return g.move(ctx, to, moveOptions{counts: true, dry: true})
}

type moveOptions struct{ creates, counts, dry bool }

// aim is where a move goes.
type aim struct {
	start   uint64    // the first event that may be delivered
	settled []seqSpan // of those, what stays settled
	tried   []seqTries
	place   bool // it is where the group is
	exact   bool // then settled is all that is
}

func (g Group) move(ctx context.Context, to Position, how moveOptions) (moved Moved, err error) {
	b := g.bus
	if err := ValidGroup(g.name); err != nil {
		return moved, err
	}
	if err := to.validateMove(); err != nil {
		return moved, err
	}
	for range 8 {
		moved, left, err := g.moveOnce(ctx, to, how)
		if errors.Is(err, records.ErrMoved) {
			continue
		}
		if err == nil && left != nil {
			err = b.awaitFence(ctx, left)
		}
		return moved, err
	}
	return moved, &event.Error{Code: event.CodeOverloaded, Msg: "the group is being moved by others again and again: try later"}
}

// moveOnce moves the group unless another is first: then it returns records.ErrMoved. left is the
// consumer that the group has left; nil if it had none, or in a dry run.
func (g Group) moveOnce(ctx context.Context, to Position, how moveOptions) (moved Moved, left *natsjs.ConsumerInfo, err error) {
	b, topic, group := g.bus, g.topic, g.name
	find := func() (*streams.Topic, natsjs.StreamState, error) {
		if how.creates {
			return b.streams.FreshTopic(ctx, topic, "")
		}
		return b.streams.FreshExisting(ctx, topic)
	}
	t, state, err := find()
	if err != nil {
		return moved, nil, err
	}
	certain := true
	if t.Stream.Keep != nil && !how.dry {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, records.TurnTime)
		defer cancel()
		mine, err := b.records.Retention.TurnOfMove(ctx, t)
		if err != nil {
			return moved, nil, b.conn.Unavailable(err)
		}
		defer func() {
			if certain {
				mine.End(ctx)
			}
		}()
		if t, state, err = find(); err != nil { // events may have been removed
			return moved, nil, err
		}
	}
	ptr, err := b.records.Generation(ctx, t, group)
	if err != nil {
		return moved, nil, b.conn.Unavailable(err)
	}
	info, err := b.records.GroupConsumer(ctx, t, &ptr)
	missing := errors.Is(err, event.ErrNotFound)
	if missing && !how.creates {
		return moved, nil, event.ErrNotFound
	}
	if err != nil && !missing {
		return moved, nil, b.conn.Unavailable(err)
	}
	at := groupStart{}
	if !missing {
		at.ttl, at.maker, at.slots = info.Config.InactiveThreshold, info.Config.Metadata[records.MetaMaker], slotsOf(info)
	}
	taken := &takeover{ctx: ctx, info: info, end: func(bool) {}}
	if to.kind == atPlace && !how.dry && !missing {
		if taken, err = b.takeOver(ctx, t, group, &ptr, state); errors.Is(err, event.ErrNotFound) {
			err = records.ErrMoved
		}
		if err != nil {
			err = b.unavailableUnless(err, records.ErrMoved)
		}
	} else {
		taken.to, err = b.aimOf(ctx, t, group, to, state, info)
	}
	if err != nil {
		return moved, nil, err
	}
	if how.counts {
		if moved, err = effectOf(taken.ctx, b.reads, t, taken.info, taken.to); err != nil { //nolint:contextcheck // made of ctx
			taken.end(false)
			return moved, nil, err
		}
	}
	if how.dry {
		return moved, nil, nil
	}
	at.seq = taken.to.start
	ptr.Settled, ptr.Tried = taken.to.settled, taken.to.tried
	made, _, err := b.moveGroup(taken.ctx, t, group, ptr, at) //nolint:contextcheck // made of ctx
	taken.end(err == nil)
	if err != nil {
		certain = made == nil || errors.Is(err, records.ErrMoved)
		return moved, nil, b.unavailableUnless(err, records.ErrMoved)
	}
	b.log.InfoContext(ctx, "group moved", slog.String("topic", topic), slog.String("group", group), slog.Uint64("start", at.seq))
	return moved, info, nil
}

// awaitFence deletes the consumer of a generation that was left, and waits until no hub begins a
// lease of it any more.
func (b *Bus) awaitFence(ctx context.Context, left *natsjs.ConsumerInfo) error {
	unsure := func(err error) error {
		return &event.Error{Code: event.CodeOverloaded, Msg: "the group was moved, but members may still be given events that were fetched before: repeat the request to be sure", Err: err}
	}
	_, err := conn.Again(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, b.conn.JS.DeleteConsumer(ctx, left.Stream, left.Name)
	})
	if err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return unsure(fmt.Errorf("jetstream: delete consumer %s of stream %s: %w", left.Name, left.Stream, err))
	}
	f := newFence(max(left.Config.AckWait, time.Second))
	wait := time.NewTimer(min(f.fresh, b.cfg.moveWait) + fenceSlack)
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return unsure(ctx.Err())
	case <-b.conn.Ctx.Done():
		return event.ErrClosed
	}
}

// validateMove is validate for a move of a group.
func (p Position) validateMove() error {
	switch {
	case p.kind == atBack && (p.back < 1 || p.back > MaxBack):
		return event.BadOptions("n is %d: 1 to %d are allowed", p.back, MaxBack)
	case p.kind == atBack:
		return nil
	case p.kind == atBookmark:
		return validBookmark(p.id)
	case p.kind == atPlace:
		return nil
	}
	return p.validate()
}

// aimOf resolves where a move goes. info is the group's consumer, nil if there is none.
func (b *Bus) aimOf(ctx context.Context, t *streams.Topic, group string, to Position, state natsjs.StreamState, info *natsjs.ConsumerInfo) (aim, error) {
	switch to.kind {
	case atBack:
		if info == nil {
			return aim{}, event.ErrNotFound
		}
		seq, err := b.reads.StepBack(ctx, t, floorOf(info), uint64(to.back), state) //nolint:gosec // above 0
		return aim{start: seq}, err
	case atBookmark:
		return b.aimAtBookmark(ctx, t, group, to.id, state)
	case atPlace:
		if info == nil {
			return aim{}, event.ErrNotFound
		}
		return aim{start: floorOf(info) + 1, place: true}, nil
	default:
		seq, err := b.reads.Resolve(ctx, t, to.start(), state, "")
		return aim{start: seq}, err
	}
}

// floorOf is the sequence up to which a group has settled everything.
func floorOf(info *natsjs.ConsumerInfo) uint64 {
	return max(info.AckFloor.Stream, max(info.Config.OptStartSeq, 1)-1)
}

// effectOf computes what a move does to a group as its consumer is: nil for a group that is new.
func effectOf(ctx context.Context, r *reading.Reads, t *streams.Topic, info *natsjs.ConsumerInfo, to aim) (Moved, error) {
	if info == nil {
		return Moved{}, nil
	}
	floor := floorOf(info)
	newest := max(info.Delivered.Stream, floor) // behind it, nothing was delivered
	pending := uint64(max(info.NumAckPending, 0))
	count := func(m *Moved, from, upTo uint64) (uint64, error) {
		n, sure, err := r.Between(ctx, t, from, upTo)
		m.AtMost = m.AtMost || !sure
		return n, err
	}
	var m Moved
	if to.exact {
		return m, nil
	}
	switch {
	case to.start <= floor+1:
		n, err := count(&m, to.start, newest)
		if err != nil {
			return m, err
		}
		m.Redelivered = max(n, pending) - pending
		if len(to.settled) > 0 || to.place && m.Redelivered > 0 {
			// which of them are settled now is not known
			m.AtMost = true
		}
	case to.start > newest:
		n, err := count(&m, newest+1, to.start-1)
		if err != nil {
			return m, err
		}
		m.Skipped = n + pending
	default:
		before, err := count(&m, floor+1, to.start-1)
		if err != nil {
			return m, err
		}
		behind, err := count(&m, to.start, newest)
		if err != nil {
			return m, err
		}
		settled := max(before+behind, pending) - pending
		m.Skipped, m.Redelivered = min(pending, before), min(settled, behind)
		m.AtMost = m.AtMost || pending > 0 && settled > 0
	}
	return m, nil
}
