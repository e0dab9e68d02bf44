package jetstream

import (
	"maps"
	"slices"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
)

// maxUnsettled bounds track.unsettled.
const maxUnsettled = 10_000

// track is what this hub knows of how far a group is. It says where the group goes on when its
// consumer is lost, so that nothing unsettled is left out. Guarded by the group's mu.
type track struct {
	start uint64 // where the group stood when this hub joined: nothing before is unsettled
	floor uint64 // up to which the server said that all is settled
	// exact says that at the time of joining nothing was in flight, so that base, arrivals and
	// order tell whether every delivery came to this hub.
	exact    bool
	base     uint64 // the server's count of deliveries at that time
	order    uint64 // the highest that came
	arrivals uint64
	lastSeq  uint64 // newest stream sequence that arrived
	active   bool   // something has changed since the server was last asked
	// unsettled are the events that arrived and ended otherwise than by an ack: they come again, to
	// whichever member. It is bounded; oldestUnsettled is the oldest of those beyond the bound.
	unsettled       map[uint64]struct{}
	oldestUnsettled uint64
	// passed are those of them that the server's ack floor has passed, which it does when they were
	// removed from the stream, or when somebody has just settled them. Those that are still here at
	// the next look were lost.
	passed map[uint64]struct{}
}

func newTrack(info *natsjs.ConsumerInfo) track {
	return track{
		start: max(info.Config.OptStartSeq, info.AckFloor.Stream+1, 1),
		exact: info.NumAckPending == 0, base: info.Delivered.Consumer, order: info.Delivered.Consumer,
	}
}

func (t *track) arrived(p *conn.DeliveryMeta) {
	t.active = true
	t.arrivals++
	t.order = max(t.order, p.Order)
	t.lastSeq = max(t.lastSeq, p.StreamSeq)
	if len(t.unsettled) > 0 {
		delete(t.unsettled, p.StreamSeq)
	}
	if len(t.passed) > 0 {
		delete(t.passed, p.StreamSeq)
	}
}

// addUnsettled notes that an event will come again.
func (t *track) addUnsettled(seq uint64) {
	if t.unsettled == nil {
		t.unsettled = make(map[uint64]struct{})
	}
	switch {
	case len(t.unsettled) < maxUnsettled:
		t.unsettled[seq] = struct{}{}
	case t.oldestUnsettled == 0 || seq < t.oldestUnsettled:
		t.oldestUnsettled = seq
	}
}

// settledUpTo takes the server's word for how far all is settled, and returns the events that were
// removed while they waited to come again. That is known while all deliveries come to this hub;
// delivered is the server's count of them.
func (t *track) settledUpTo(floor, delivered uint64) (lost []uint64) {
	t.floor = max(t.floor, floor)
	lost = slices.Collect(maps.Keys(t.passed))
	t.passed = nil
	for seq := range t.unsettled {
		if seq <= floor {
			delete(t.unsettled, seq)
			if t.passed == nil {
				t.passed = make(map[uint64]struct{})
			}
			t.passed[seq] = struct{}{}
		}
	}
	if !t.exact || delivered-t.base != t.arrivals {
		lost, t.passed = nil, nil
	}
	if len(t.passed) > 0 {
		t.active = true // look once more
	}
	if t.oldestUnsettled <= floor {
		t.oldestUnsettled = 0
	}
	return lost
}

// addUnsettled notes that an event will come again.
func (g *group) addUnsettled(seq uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.track.addUnsettled(seq)
}

// cutOff notes that a connection was lost: a server that was killed counts deliveries from an older
// number, so that the numbers do not tell any more whether all came to this hub. A group in memory
// that survived was not on that server.
func (g *group) cutOff(clustered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !clustered {
		g.sent = sentTimes{} // what came before came from the server that is gone
	}
	g.watched = 0 // the consumer may be another one by now
	g.sight.cut = true
	if !g.memory {
		g.track.exact = false
	}
}

// settled notes that the event of d will not come again after all.
func (g *group) settled(d *Delivery) {
	g.mu.Lock()
	delete(g.track.unsettled, d.seq)
	delete(g.track.passed, d.seq)
	full := g.known.settled(d.seq, d.delivered, g.bus.clock.Now(), g.bus.limits.AttemptsKnown)
	g.mu.Unlock()
	if full {
		g.bus.obs.LimitReached("attempts_known")
	}
}

// resumeAt is the sequence at which the group goes on when its consumer was lost: nothing before is
// unsettled, whichever hub had it. When every delivery came to this hub, that is the oldest event
// known to be unsettled, or the one behind the newest that came; oldest is the oldest that a member
// holds, 0 for none. Otherwise it is the ack floor that the server named last: what was settled
// since comes again.
func (t *track) resumeAt(oldest uint64) uint64 {
	safe := t.safe()
	if !t.exact || t.order-t.base != t.arrivals {
		return safe
	}
	if t.lastSeq == 0 {
		return safe
	}
	next := t.lastSeq + 1
	if t.oldestUnsettled > 0 {
		next = min(next, t.oldestUnsettled)
	}
	if oldest > 0 {
		next = min(next, oldest)
	}
	for seq := range t.unsettled {
		next = min(next, seq)
	}
	return max(next, safe)
}

// safe is behind the ack floor that the server named last: nothing before is unsettled.
func (t *track) safe() uint64 { return max(t.start, t.floor+1) }
