package jetstream

import "slices"

// recentAcksFor is how long an acknowledgement is kept at least, unless there are too many.
const recentAcksFor = int64(watchOthers)

// recentAcks are the reply subjects of acknowledgements that were sent over a path.
//
// An acknowledgement travels without an answer. When the leader of a replicated consumer changes,
// those of the last moments may have come to nobody, or to a leader that could not pass them on.
// The hub therefore keeps the recent ones, and sends them again after such a change. A repeated
// acknowledgement of an event that is settled does nothing.
type recentAcks struct {
	before, now []string // those of the turn before, and of this one
	turned      int64    // when this turn began
	doubted     bool     // they may have been lost: they are to be sent again
	since       int64    // from then on
}

// add keeps one more. It reports whether others were dropped that are not old.
func (a *recentAcks) add(reply string, limit int) (full bool) {
	if len(a.now) >= max(limit/2, 1) {
		full = len(a.before) > 0
		a.before, a.now = a.now, a.before[:0]
	}
	a.now = append(a.now, reply)
	return full
}

// turn drops those that are old, if the consumer still had the same leader at the moment confirmed,
// which is after they were sent. After patience, the server has given out their events again.
func (a *recentAcks) turn(now, confirmed, patience int64) {
	since := now - a.turned
	if a.doubted || since < recentAcksFor || confirmed < a.turned && since < patience {
		return
	}
	a.turned = now
	a.before, a.now = a.now, nil
}

// doubt has those that are kept sent again.
func (a *recentAcks) doubt(now int64) {
	if !a.doubted && len(a.before)+len(a.now) > 0 {
		a.doubted, a.since = true, now
	}
}

// dropDoubted gives up after a time: the consumer may be gone, and nobody will answer.
func (a *recentAcks) dropDoubted(now, after int64) {
	if a.doubted && now-a.since > after {
		*a = recentAcks{turned: now}
	}
}

// takeDoubted returns those that are to be sent again.
func (a *recentAcks) takeDoubted() []string {
	if !a.doubted {
		return nil
	}
	a.doubted = false
	return slices.Concat(a.before, a.now)
}

// noteAck keeps the acknowledgement of d, which was sent. In a cluster only: a single server has no
// other leader.
func (d *Delivery) noteAck() {
	if !d.m.sub.link.Clustered() {
		return
	}
	p, b := d.path(), d.group.bus
	p.mu.Lock()
	full := p.acks.add(d.reply, b.limits.RecentAcks)
	p.mu.Unlock()
	if full {
		b.obs.LimitReached("recent_acks")
	}
}

// turnAcks drops old acknowledgements.
func (p *path) turnAcks(now int64) {
	g := p.group
	g.mu.Lock()
	confirmed := g.ledAt
	g.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.acks.turn(now, confirmed, int64(g.fence.ackWait))
}

// doubtful reports whether acknowledgements are to be sent again.
func (p *path) doubtful() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.acks.doubted
}

// doubtAcks has the recent acknowledgements sent again as soon as the consumer answers: its leader
// has changed, or it has none.
func (g *group) doubtAcks() {
	now := g.bus.clock.Now()
	for i := range g.paths {
		p := &g.paths[i]
		p.change(func(kept []settlement) []settlement {
			p.acks.doubt(now)
			return kept
		})
	}
}

// ledBy takes note of the leader of the consumer, as the server names it. The server was asked at
// the given moment.
func (g *group) ledBy(leader string, asked int64) {
	g.mu.Lock()
	changed := leader != "" && g.leader != "" && g.leader != leader
	if leader != "" {
		g.leader, g.ledAt = leader, asked
	}
	g.mu.Unlock()
	if changed {
		g.doubtAcks()
	}
}
