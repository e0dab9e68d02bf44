package jetstream

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// How often the server is asked how far groups are.
const (
	watchEvery  = 250 * time.Millisecond // the look at which are due
	watchMemory = records.MarkEvery      // a group in memory, or a quarter of its TTL
	watchOthers = 5 * time.Second        // other groups, while they change
	watchPassed = time.Second            // again, when the ack floor has passed unsettled events
	// watchBatch is the most questions at one look.
	watchBatch = 500
)

// consumerState is what the server says of a consumer, as far as the hub asks for it.
type consumerState struct {
	Error    *conn.APIError `json:"error"`
	AckFloor struct {
		Stream uint64 `json:"stream_seq"`
	} `json:"ack_floor"`
	Delivered struct {
		Consumer uint64 `json:"consumer_seq"`
		Stream   uint64 `json:"stream_seq"`
	} `json:"delivered"`
	Config struct {
		MaxAckPending int               `json:"max_ack_pending"`
		Metadata      map[string]string `json:"metadata"`
	} `json:"config"`
	NumPending    uint64    `json:"num_pending"`
	NumAckPending int       `json:"num_ack_pending"`
	NumWaiting    int       `json:"num_waiting"`
	Paused        bool      `json:"paused"`
	Created       time.Time `json:"created"`
	TimeStamp     time.Time `json:"ts"`
	Cluster       struct {
		Leader string `json:"leader"`
	} `json:"cluster"`
}

// ask asks the server about the group's consumer and calls then with the answer, if there is one.
// It does not block.
func (g *group) ask(l *conn.Link, now int64, then func(*consumerState)) {
	// An error means that the connection is down; what is asked here is asked again.
	_ = l.Ask(&nats.Msg{Subject: g.info}, now, conn.AskerFunc(func(reply *nats.Msg, err error) {
		if err != nil || conn.NoResponders(reply) {
			return
		}
		var state consumerState
		if err := json.Unmarshal(reply.Data, &state); err != nil {
			return
		}
		if state.Error != nil || !native.Made(state.Created, state.Config.Metadata).Equal(g.created) {
			g.verify()
			return
		}
		g.ledBy(state.Cluster.Leader, now)
		g.mu.Lock()
		g.sent.check(now, state.Delivered.Consumer, int64(g.fence.ackWait))
		lost := g.track.settledUpTo(state.AckFloor.Stream, state.Delivered.Consumer)
		g.known.settledUpTo(state.AckFloor.Stream, now-max(recentAcksFor, 2*int64(g.fence.ackWait)))
		if len(g.track.passed) > 0 {
			g.watched = now - int64(g.bus.cfg.watchOthers-watchPassed) // look once more soon
		}
		if len(lost) > 0 {
			g.check(found{returned: lost})
		}
		g.mu.Unlock()
		then(&state)
	}))
}

// verify lets the members look whether the consumer still exists.
func (g *group) verify() {
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, m := range s.members {
			m.verify(g)
		}
		s.mu.Unlock()
	}
}

// watchGroups keeps up with how far groups are, until the bus closes.
func (b *Bus) watchGroups() {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		now, asked := b.clock.Now(), 0
		b.groups.eachGroup(func(g *group) {
			g.keepSeen(b.conn.Link(), now)
			if asked < watchBatch && g.due(now) && len(b.groups.membersOf(g)) > 0 {
				asked++
				l := b.conn.Link()
				g.ask(l, now, func(*consumerState) { g.putMark(l) })
			}
		})
	}
}

// due reports whether the server is to be asked about the group now.
func (g *group) due(now int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	every := g.bus.cfg.watchOthers
	if g.memory {
		every = min(watchMemory, g.timeToLive()/4)
	} else if !g.track.active {
		return false
	}
	if now-g.watched < int64(every) {
		return false
	}
	g.watched = now
	g.track.active = false
	return true
}

// putMark stores how far a group in memory is. It does not block.
func (g *group) putMark(l *conn.Link) {
	if !g.memory || g.deleted.Load() || len(g.bus.groups.membersOf(g)) == 0 {
		return
	}
	g.mu.Lock()
	floor := g.track.floor
	g.mu.Unlock()
	// What fails here is done again soon.
	m := g.mark(floor, false)
	_ = l.Ask(m.Message(g.topic, g.name), g.bus.clock.Now(), conn.AskerFunc(func(*nats.Msg, error) {}))
}

// storeFirstMark stores where a group in memory begins, before its first member knows that the
// group is there: from then on, whichever hub creates the group again knows where it goes on. A
// mark that cannot be stored is kept, and stored later.
func (g *group) storeFirstMark(ctx context.Context, floor uint64) {
	if !g.memory {
		return
	}
	g.bus.records.StoreMark(ctx, g.topic, g.name, g.mark(floor, false))
}

// mark says how far the group is.
func (g *group) mark(floor uint64, left bool) records.Mark {
	return records.Mark{Consumer: g.consumer, Stream: g.topic.Stream.Created, Floor: floor, TTLMS: g.timeToLive().Milliseconds(), SeenMS: time.Now().UnixMilli(), Left: left, Maker: g.maker}
}

// storeLastMark stores how far a group in memory is, when a member leaves it, and waits until it is
// stored. Without a connection, the mark is stored when it is back.
func (g *group) storeLastMark(ctx context.Context, l *conn.Link) {
	if !g.memory || g.deleted.Load() {
		return
	}
	if floor, err := g.askFloor(ctx, l); err == nil {
		m := g.mark(floor, true)
		if _, err := l.RequestMsg(ctx, m.Message(g.topic, g.name)); err == nil {
			return
		}
	}
	g.bus.records.KeepMark(g.topic, g.name, g.mark(g.bus.groups.resumeAt(g)-1, true))
}

// askFloor asks up to which event all is settled.
func (g *group) askFloor(ctx context.Context, l *conn.Link) (uint64, error) {
	reply, err := l.Request(ctx, g.info, nil)
	if err != nil {
		return 0, err
	}
	var state consumerState
	if err := json.Unmarshal(reply.Data, &state); err != nil {
		return 0, err
	}
	if state.Error != nil {
		return 0, state.Error
	}
	if !native.Made(state.Created, state.Config.Metadata).Equal(g.created) {
		return 0, event.ErrNotFound
	}
	return state.AckFloor.Stream, nil
}

// groupStart is how a group begins whose consumer does not exist.
type groupStart struct {
	seq    uint64
	ttl    time.Duration
	maker  string // the client that made it
	slots  int    // of an ordered group; 0: it is not one
	paused bool
	// goesOn says that the group is no new one: only its consumer was lost.
	goesOn bool
	// lost says that members may have been there after the mark: their hub died before it could say
	// so.
	lost bool
}

// startOf is where a group begins whose consumer does not exist. A group in memory whose server was
// restarted goes on behind the floor of its mark, unless it has had no member for its TTL; other
// groups begin where the one who joins says.
func (b *Bus) startOf(ctx context.Context, t *streams.Topic, j *joining, ptr *records.Generation, state natsjs.StreamState) (s groupStart, err error) {
	s = groupStart{ttl: j.ttl, maker: j.client, slots: j.slots, goesOn: j.was != nil}
	if j.was != nil {
		s.maker, s.slots = j.was.maker, j.was.slots
	}
	if j.gone || ptr.Deleted {
		s.seq, err = j.start(ctx, t, state)
		return s, err
	}
	if live := b.groups.liveGroup(t, ptr.Consumer); live != nil {
		// its members here have not noticed yet
		s.seq, s.maker, s.goesOn = min(b.groups.resumeAt(live), state.LastSeq+1), live.maker, true
		return s, nil
	}
	m, err := b.records.Mark(ctx, t, j.group)
	if err != nil {
		return s, b.conn.Unavailable(err)
	}
	known := m != nil && m.Consumer == ptr.Consumer && m.Stream.Equal(t.Stream.Created)
	if !known || time.Since(time.UnixMilli(m.SeenMS)) > m.Life() {
		s.lost = known && !m.Left
		s.seq, err = j.start(ctx, t, state)
		return s, err
	}
	b.log.InfoContext(ctx, "group goes on at its mark; its server was restarted", slog.String("topic", t.Name), slog.String("group", j.group), slog.Uint64("floor", m.Floor))
	s.seq, s.maker, s.goesOn = min(m.Floor, state.LastSeq)+1, m.Maker, true
	return s, nil
}
