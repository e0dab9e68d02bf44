package jetstream

import (
	"context"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// Bounds of looking for stuck groups.
const (
	// minStuckAfter and maxStuckAfter are the bounds of Limits.StuckAfter.
	minStuckAfter = time.Second
	maxStuckAfter = time.Hour
	// stuckAsks is how many groups are asked about at each look, of which there are twelve in
	// Limits.StuckAfter.
	stuckAsks = 100
	// stuckSure is how often in a row the server must have said the same.
	stuckSure = 3
	// stuckPrompt is how long an answer may take that counts.
	stuckPrompt = 2 * time.Second
)

// stuck is what this hub knows of whether the server gives a group what it has for it. Guarded by
// the group's mu.
type stuck struct {
	asked     int64  // when the server was last asked, or has last said
	began     int64  // when answers in a row began to say the same; 0: the last did not
	answers   int    // that many
	delivered uint64 // the server's count of deliveries in them
	since     int64  // since when the group is stuck, by the hub's clock; 0: it is not
}

// lookForStuck looks for groups that get nothing although something is there for them, until the
// bus closes.
func (b *Bus) lookForStuck() {
	tick := time.NewTicker(b.limits.StuckAfter / 12)
	defer tick.Stop()
	for {
		select {
		case <-b.conn.Ctx.Done():
			return
		case <-tick.C:
		}
		now, asked := b.clock.Now(), 0
		b.groups.eachGroup(func(g *group) {
			l, since := g.waits()
			if since == 0 || b.clock.Stalled(now) {
				g.flows("nothing is asked for")
				return
			}
			if asked < stuckAsks && g.askStuck(now, since) {
				asked++
				g.ask(l, now, func(state *consumerState) { g.answered(l, now, state) })
			}
		})
	}
}

// waits returns since when a member of this hub has waited for an event for which it has credit,
// and the link over which it has asked; 0 if none waits.
func (g *group) waits() (l *conn.Link, since int64) {
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, m := range s.members {
			if m.group == g && m.waits != 0 && m.requested > 0 && s.running() && s.link.Up.Load() && (since == 0 || m.waits < since) {
				l, since = s.link, m.waits
			}
		}
		s.mu.Unlock()
	}
	return l, since
}

// askedSince reports whether a member has sent a request for events between the two times.
func (g *group) askedSince(from, to int64) bool {
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, m := range s.members {
			if m.group == g && m.requested > 0 && from <= m.pulled && m.pulled <= to {
				s.mu.Unlock()
				return true
			}
		}
		s.mu.Unlock()
	}
	return false
}

// askStuck reports whether the server is to be asked about the group now: a member has waited since
// the given time. Whoever else asks about the group meanwhile spares the question.
func (g *group) askStuck(now, since int64) bool {
	after := int64(g.bus.limits.StuckAfter)
	g.mu.Lock()
	defer g.mu.Unlock()
	every := after
	if g.stuck.began != 0 || g.stuck.since != 0 {
		every = after / 6
	}
	if now-since < after/2 || now-g.stuck.asked < every {
		return false
	}
	g.stuck.asked = now
	return true
}

// stuckState is what the server says of a consumer, as far as it tells that a group is stuck.
type stuckState struct {
	at        time.Time // by the clock of the server
	delivered uint64    // how often
	newest    uint64    // the sequence up to which it has delivered
	asks      int       // requests that wait
	waiting   bool      // there is something that it could deliver
}

func (s *consumerState) stuck() stuckState {
	return stuckState{
		at: s.TimeStamp, delivered: s.Delivered.Consumer, newest: s.Delivered.Stream, asks: s.NumWaiting,
		waiting: s.NumPending > 0 && !s.Paused && (s.Config.MaxAckPending <= 0 || s.NumAckPending < s.Config.MaxAckPending),
	}
}

// answered takes the server's answer to a question of lookForStuck.
func (g *group) answered(l *conn.Link, sent int64, state *consumerState) {
	if now := g.bus.clock.Now(); now-sent <= int64(stuckPrompt) && !g.silent(l, now) {
		g.judge(now, state.stuck())
	}
}

// seen takes what the server has said to another. It spares questions, and tells of no group alone
// that it is stuck.
func (r *groupRegistry) seen(info *natsjs.ConsumerInfo) {
	r.mu.Lock()
	g := r.byKey[info.Stream+"."+info.Name]
	r.mu.Unlock()
	if g == nil || !g.created.Equal(native.ConsumerMade(info)) {
		return
	}
	state := stuckState{
		at: info.TimeStamp, delivered: info.Delivered.Consumer, newest: info.Delivered.Stream, asks: info.NumWaiting,
		waiting: info.NumPending > 0 && !info.Paused && (info.Config.MaxAckPending <= 0 || info.NumAckPending < info.Config.MaxAckPending),
	}
	now := r.clock.Now()
	if !state.waiting {
		g.judge(now, state)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stuck.began == 0 { // lookForStuck asks
		g.stuck.asked = now - int64(r.limits.StuckAfter)
	}
}

// judge decides whether the group is stuck, by the server's answer.
func (g *group) judge(now int64, state stuckState) {
	after := int64(g.bus.limits.StuckAfter)
	_, since := g.waits()
	if since != 0 && state.waiting && state.asks == 0 {
		g.askAgain(now)
	}
	g.mu.Lock()
	k := &g.stuck
	k.asked = now
	switch {
	case since == 0 || !state.waiting:
		g.flowing("nothing waits for it")
		g.mu.Unlock()
		return
	case k.began == 0 || k.delivered != state.delivered:
		g.flowing("it gets events")
		k.began, k.delivered = now, state.delivered
	}
	k.answers++
	began := k.began
	sure := k.since == 0 && k.answers >= stuckSure && now-began >= after/2 && now-since >= after
	g.mu.Unlock()
	// The server knows that it is asked, or has been asked once more.
	if sure && (state.asks > 0 || g.askedSince(began, now-int64(stuckPrompt/2))) {
		g.bus.conn.Apart(func() { g.declare(state) })
	}
}

// declare notes that the group is stuck, if there is an event that waits for that long: what the
// server counts may have been removed.
func (g *group) declare(state stuckState) {
	b := g.bus
	ctx, cancel := context.WithTimeout(b.conn.Ctx, lossWait)
	defer cancel()
	oldest, err := b.reads.NextStored(ctx, g.topic, max(state.newest, g.first-1)+1, time.Time{})
	if err != nil || oldest == nil {
		return
	}
	waited := state.at.Sub(oldest.Time)
	if waited < b.limits.StuckAfter {
		return
	}
	_, since := g.waits()
	g.mu.Lock()
	now := b.clock.Now()
	declared := since != 0 && g.stuck.since == 0 && g.stuck.began != 0 && g.stuck.delivered == state.delivered
	if declared {
		g.stuck.since = max(since, now-int64(waited))
		since = g.stuck.since
	}
	g.mu.Unlock()
	if declared {
		b.log.WarnContext(ctx, "group is stuck: events and requests for them wait, and NATS delivers nothing; eventhub group repair moves the group to a new consumer",
			slog.String("topic", g.topic.Name), slog.String("group", g.name), slog.String("consumer", g.consumer),
			slog.Duration("for", time.Duration(now-since).Round(time.Second)))
	}
}

// askAgain has members ask for events anew of whose request the server does not know.
func (g *group) askAgain(now int64) {
	for _, s := range g.bus.groups.membersOf(g) {
		s.mu.Lock()
		for _, m := range s.members {
			if m.group == g && m.waits != 0 && m.requested > 0 && s.running() && now-m.pulled > int64(stuckPrompt) {
				m.repeat(now)
			}
		}
		s.refill()
		s.mu.Unlock()
	}
}

// repeat asks for events anew, because the request that waits was lost. s.mu is held.
func (m *member) repeat(now int64) {
	waits := m.waits
	m.again(now)
	m.waits = waits
}

// flows notes that the group is not stuck.
func (g *group) flows(why string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flowing(why)
}

// flowing is flows where g.mu is held.
func (g *group) flowing(why string) {
	since := g.stuck.since
	g.stuck = stuck{asked: g.stuck.asked}
	if since != 0 {
		g.bus.log.Info("group is not stuck any more", slog.String("topic", g.topic.Name), slog.String("group", g.name), slog.String("consumer", g.consumer),
			slog.String("reason", why), slog.Duration("after", time.Duration(g.bus.clock.Now()-since).Round(time.Second)))
	}
}

// stuckSince is since when this hub knows that the group is stuck; the zero time if it is not.
func (r *groupRegistry) stuckSince(info *natsjs.ConsumerInfo) time.Time {
	r.mu.Lock()
	g := r.byKey[info.Stream+"."+info.Name]
	r.mu.Unlock()
	if g == nil || !g.created.Equal(native.ConsumerMade(info)) {
		return time.Time{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stuck.since == 0 {
		return time.Time{}
	}
	return r.clock.At(g.stuck.since)
}
