package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// MaxRepairSpan ("repair_span") is the maximum number of sequences between a group's ack floor and
// its newest delivered event in which a repair looks for unsettled events. Beyond the limit, the
// group gets all of these events again.
const MaxRepairSpan = 1_000_000

// Times of a repair.
const (
	// takeOverPause is how long deliveries stop at most, and takeOverWait how long a repair may
	// take until the group is moved.
	takeOverPause = 20 * time.Second
	takeOverWait  = 12 * time.Second
	// letGoWait is how long hubs have to let their leases go.
	letGoWait = time.Second
	// pendingWait is how long the server is asked which events it waits for, and advisoryWait how
	// long its answers may take.
	pendingWait  = 6 * time.Second
	advisoryWait = 500 * time.Millisecond
	// pendingBatch is how many events it is asked about before it must have heard that.
	pendingBatch = 5_000
)

// past is what is known of events of a group from generations before.
type past struct {
	settled []seqSpan  // members acknowledge them unseen
	tried   []seqTries // in the order of their sequences
}

// seqTries is the sequence of an event, and its attempts.
type seqTries = native.Tries

// attempts is how many attempts an event had before the group was repaired.
func (p *past) attempts(seq uint64) int { return native.AttemptsBefore(p.tried, seq) }

// heldAnswer is what a hub says when it lets its leases go.
type heldAnswer struct {
	Held  []uint64   `json:"held"`  // what it surely held
	Tried []seqTries `json:"tried"` // the attempts that it knows of
	Acked []uint64   `json:"acked"` // what was acknowledged, and waits to be sent
}

// letGo gives up what the members of this hub hold of the group, as when a connection is lost: no
// settlement of it is sent any more. The members stay, and ask for events anew.
func (g *group) letGo() heldAnswer {
	a := heldAnswer{Held: []uint64{}, Tried: []seqTries{}, Acked: g.keptAcks()}
	now := g.bus.clock.Now()
	var unseen []*Delivery
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, d := range s.out {
			if d.group != g {
				continue
			}
			if d.usable(now) && len(a.Held) < MaxBookmarkEvents {
				a.Held = append(a.Held, d.seq)
			}
			if !d.begun {
				unseen = append(unseen, d)
				if d.resolved && len(a.Tried) < MaxBookmarkEvents {
					a.Tried = append(a.Tried, seqTries{d.seq, uint64(d.Attempt - 1)}) //nolint:gosec // attempts begin at 1
				}
			}
		}
		for _, m := range s.members {
			if m.group == g {
				m.reattach(false)
			}
		}
		s.mu.Unlock()
	}
	g.mu.Lock()
	for seq, acc := range g.known.accounts {
		if len(a.Tried) < 2*MaxBookmarkEvents {
			a.Tried = append(a.Tried, seqTries{seq, uint64(max(acc.last-acc.spared, 0) + g.past.attempts(seq))}) //nolint:gosec // not negative
		}
	}
	g.mu.Unlock()
	for _, d := range unseen {
		d.m.sub.spare(d, false)
	}
	return a
}

// keptAcks are the events that were acknowledged here while the way to the server was silent, and
// that nobody else has by now.
func (g *group) keptAcks() []uint64 {
	acked := []uint64{}
	for i := range g.paths {
		p := &g.paths[i]
		p.mu.Lock()
		kept := slices.Clone(p.kept)
		p.mu.Unlock()
		for _, k := range kept {
			if bytes.Equal(k.what, conn.AckNow) && len(acked) < MaxBookmarkEvents && k.d.inTime() {
				acked = append(acked, k.d.seq)
			}
		}
	}
	return acked
}

// takeover is what a repair has found out. Until the group is moved, or end is called, the consumer
// of the group delivers nothing.
type takeover struct {
	to   aim
	info *natsjs.ConsumerInfo
	ctx  context.Context //nolint:containedctx // it ends before the pause does
	end  func(moved bool)
}

// takeOver has the consumer of a group deliver nothing and all hubs let their leases go, and finds
// out what the next generation is to know of events: which behind the ack floor are settled, and
// how many attempts the others had. A repair that fails afterwards leaves the group as it was; what
// was leased then comes again after AckWait.
func (b *Bus) takeOver(ctx context.Context, t *streams.Topic, group string, ptr *records.Generation, state natsjs.StreamState) (*takeover, error) {
	within, cancel := context.WithTimeout(ctx, takeOverWait)
	info, err := b.records.GroupConsumer(within, t, ptr)
	if err == nil && !ptr.Paused {
		err = b.records.PauseConsumer(within, t, ptr.Consumer, info.TimeStamp.Add(takeOverPause))
	}
	taken := &takeover{ctx: within, end: func(moved bool) {
		cancel()
		if !moved && !ptr.Paused {
			b.endShortPause(ctx, t, group, ptr.Consumer)
		}
	}}
	if err != nil {
		cancel()
		return nil, err
	}
	var unsettled []uint64
	hubs, err := b.askToLetGo(within, t, ptr.Consumer)
	if err == nil {
		unsettled, taken.info, taken.to.exact, err = b.unsettled(within, t, ptr, hubs)
	}
	if err != nil {
		taken.end(false)
		return nil, err
	}
	b.log.InfoContext(ctx, "group is being repaired; hubs have let their leases go", slog.String("topic", t.Name), slog.String("group", group),
		slog.Int("hubs", hubs.hubs), slog.Int("unsettled", taken.info.NumAckPending), slog.Bool("exact", taken.to.exact))
	mark := bookmarkOf(ptr, taken.info, unsettled, taken.to.exact)
	// What retention has removed was given to the group before.
	taken.to.start = max(mark.Floor+1, min(state.FirstSeq, mark.Newest+1))
	taken.to.place, taken.to.settled = true, mark.Settled
	taken.to.tried = hubs.triesOf(unsettled, taken.to.exact, ptr.Tried)
	return taken, nil
}

// hubsAnswer is what all hubs have said.
type hubsAnswer struct {
	hubs        int
	kept        bool // an older hub has kept its leases
	held, acked map[uint64]struct{}
	tried       map[uint64]uint64
}

// triesOf returns the attempts that events have had. An event that was delivered and that no hub
// knows was with a hub that is gone: its attempts count as one.
func (h *hubsAnswer) triesOf(unsettled []uint64, exact bool, before []seqTries) []seqTries {
	tried := make(map[uint64]uint64)
	for _, t := range before {
		tried[t[0]] = t[1]
	}
	for seq, n := range h.tried {
		tried[seq] = max(tried[seq], n)
	}
	var list []seqTries
	add := func(seq uint64) {
		if n := tried[seq]; n > 0 {
			list = append(list, seqTries{seq, n})
		}
	}
	if exact {
		for _, seq := range unsettled {
			if _, known := h.tried[seq]; !known {
				tried[seq]++
			}
			add(seq)
		}
		return list
	}
	for seq := range tried {
		add(seq)
	}
	slices.SortFunc(list, func(a, b seqTries) int { return slices.Compare(a[:], b[:]) })
	return list[:min(len(list), 2*MaxBookmarkEvents)]
}

// askToLetGo has all hubs let go what they hold of a consumer, and returns what they say.
func (b *Bus) askToLetGo(ctx context.Context, t *streams.Topic, consumer string) (*hubsAnswer, error) {
	all := &hubsAnswer{held: make(map[uint64]struct{}), acked: make(map[uint64]struct{}), tried: make(map[uint64]uint64)}
	q := records.Question{Held: t.Stream.Name + "." + consumer, LetGo: true}
	err := b.records.AskHubs(ctx, q, letGoWait, func(answer []byte) bool {
		var a heldAnswer
		all.hubs++
		if json.Unmarshal(answer, &a) != nil {
			_ = json.Unmarshal(answer, &a.Held) // an older hub keeps what it holds
			all.kept = true
		}
		for _, seq := range a.Held {
			all.held[seq] = struct{}{}
		}
		for _, seq := range a.Acked {
			all.acked[seq] = struct{}{}
		}
		for _, t := range a.Tried {
			all.tried[t[0]] = max(all.tried[t[0]], t[1])
		}
		return false
	})
	return all, err
}

// unsettled returns the events up to the newest delivered one that are to be delivered again, in
// order. exact is false when that is not known: then all behind the ack floor are.
func (b *Bus) unsettled(ctx context.Context, t *streams.Topic, ptr *records.Generation, hubs *hubsAnswer) (seqs []uint64, info *natsjs.ConsumerInfo, exact bool, err error) {
	pending, info, exact, err := b.askPending(ctx, t, ptr)
	if err != nil {
		return nil, nil, false, err
	}
	if !exact && !hubs.kept {
		held := slices.Sorted(maps.Keys(hubs.held))
		if pending, exact, err = b.heldOf(ctx, t, info, held); err != nil {
			return nil, nil, false, err
		}
	}
	for _, seq := range pending {
		if _, acked := hubs.acked[seq]; !acked && !native.Covered(ptr.Settled, seq) {
			seqs = append(seqs, seq)
		}
	}
	return seqs, info, exact, nil
}

// heldOf returns those of the held events that the server waits for, and whether these are all. A
// hub may still hold events that were removed meanwhile: those removed by a bound are behind the
// ack floor by now, and of others nothing is known.
func (b *Bus) heldOf(ctx context.Context, t *streams.Topic, info *natsjs.ConsumerInfo, held []uint64) (pending []uint64, all bool, err error) {
	floor := floorOf(info)
	held = slices.DeleteFunc(slices.Clone(held), func(seq uint64) bool { return seq <= floor })
	if len(held) != info.NumAckPending {
		return nil, false, nil
	}
	s, err := b.conn.FindStream(ctx, t.Stream.Name)
	if err != nil || s.State.NumDeleted > 0 {
		return nil, false, err
	}
	return held, true, nil
}

// askPending asks the server which events of a consumer it waits for. No request of JetStream tells
// that. But the server publishes an advisory for each refusal of an event that it waits for, and
// none for one that is settled. So the hub refuses all events behind the ack floor, with a delay of
// AckWait: for an event that somebody holds, that is what an in-progress ack is, and one that waits
// for its next delivery waits for AckWait. Nothing is delivered meanwhile, so what the server waits
// for only becomes less. When it waited for as many events before and after as there are
// advisories, these are the ones.
func (b *Bus) askPending(ctx context.Context, t *streams.Topic, ptr *records.Generation) (pending []uint64, info *natsjs.ConsumerInfo, exact bool, err error) {
	deadline := time.Now().Add(pendingWait)
	for round := 1; ; round++ {
		before, err := b.records.GroupConsumer(ctx, t, ptr)
		if err != nil {
			return nil, nil, false, err
		}
		floor, newest := floorOf(before), before.Delivered.Stream
		switch {
		case before.NumAckPending == 0:
			return nil, before, true, nil
		case before.NumAckPending > MaxBookmarkEvents:
			b.obs.LimitReached("bookmark_events")
			return nil, before, false, nil
		case newest-min(floor, newest) > MaxRepairSpan:
			b.obs.LimitReached("repair_span")
			return nil, before, false, nil
		}
		pending, err := b.refusals(ctx, t, before)
		if err != nil && ctx.Err() == nil {
			b.often.Log(ctx, slog.LevelWarn, "failed to ask NATS for the unsettled events of a group; asking again", t.Name, slog.String("topic", t.Name), slog.Any("error", err))
		}
		after, err := b.records.GroupConsumer(ctx, t, ptr)
		if err != nil {
			return nil, nil, false, err
		}
		if len(pending) == before.NumAckPending && len(pending) == after.NumAckPending && before.Delivered.Consumer == after.Delivered.Consumer {
			return pending, after, true, nil
		}
		if round >= 3 && time.Now().After(deadline) {
			return nil, after, false, nil
		}
	}
}

// nakAdvisory begins the subjects of advisories of refusals.
const nakAdvisory = "$JS.EVENT.ADVISORY.CONSUMER.MSG_NAKED."

// refusals refuses the events behind the ack floor, and returns those that the server waited for.
func (b *Bus) refusals(ctx context.Context, t *streams.Topic, info *natsjs.ConsumerInfo) ([]uint64, error) {
	l := b.conn.Link()
	// the server waits for no more; twice, as events may be refused again by others
	advisories := make(chan *nats.Msg, 2*info.NumAckPending+1)
	sub, err := l.NC.ChanSubscribe(nakAdvisory+t.Stream.Name+"."+info.Name, advisories)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is closed
	if err := l.NC.FlushWithContext(ctx); err != nil {
		return nil, err
	}
	prefix := "$JS.ACK." + t.Stream.Name + "." + info.Name + "."
	if live := b.groups.liveGroup(t, info.Name); live != nil {
		prefix = live.acksPrefix()
	}
	refuse := strconv.AppendInt([]byte(`-NAK {"delay":`), int64(info.Config.AckWait), 10)
	refuse = append(refuse, '}')
	for seq := floorOf(info) + 1; seq <= info.Delivered.Stream; {
		for range pendingBatch {
			if seq > info.Delivered.Stream {
				break
			}
			subject := prefix + "1." + strconv.FormatUint(seq, 10) + "." + strconv.FormatUint(info.Delivered.Consumer, 10) + ".0.0"
			if err := l.NC.Publish(subject, refuse); err != nil {
				return nil, err
			}
			seq++
		}
		// A consumer works its acks off in order.
		if _, err := l.Request(ctx, prefix+noEvent, conn.InProgress); err != nil {
			return nil, fmt.Errorf("jetstream: consumer %s of stream %s does not take refusals: %w", info.Name, t.Stream.Name, err)
		}
	}
	named := make(map[uint64]struct{}, info.NumAckPending)
	idle := time.NewTimer(advisoryWait)
	defer idle.Stop()
	for len(named) < info.NumAckPending {
		select {
		case m := <-advisories:
			var said struct {
				Seq uint64 `json:"stream_seq"`
			}
			if json.Unmarshal(m.Data, &said) == nil {
				named[said.Seq] = struct{}{}
			}
			continue
		case <-idle.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		return nil, errors.New("jetstream: NATS published fewer advisories than it waits for events; let the NATS user subscribe to " + nakAdvisory + ">")
	}
	pending := make([]uint64, 0, len(named))
	for seq := range named {
		pending = append(pending, seq)
	}
	slices.Sort(pending)
	return pending, nil
}
