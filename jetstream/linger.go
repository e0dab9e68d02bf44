package jetstream

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"eventhub/jetstream/internal/conn"
)

const (
	// An inbox that lingers gives back what no other member of the hub takes. As long as its pulls
	// wait, the same event may come again, at most as often as they ask for events. After a round
	// through all inboxes that linger, and freeBounces more, it waits each time: for up to
	// bouncePause, by chance, because the server deals events that come back in step always to the
	// same pulls.
	freeBounces = 4
	bouncePause = 10 * time.Millisecond
	// quietFor is how long nothing must come to the inboxes of a subscription that drains before
	// they are unsubscribed, and quietMax how long that is waited for.
	quietFor = 25 * time.Millisecond
	quietMax = time.Second
)

// lingering are closed inboxes whose pulls have not ended.
type lingering struct {
	*core
	groups *groupRegistry

	mu      sync.Mutex
	inboxes map[*inbox]struct{}
}

func newLingering(g *groupRegistry) *lingering {
	return &lingering{core: g.core, groups: g, inboxes: make(map[*inbox]struct{})}
}

// bounceDelay is how long an event of the group waits that is given back after so many clients had
// not seen it.
func (w *lingering) bounceDelay(g *group, spared int) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if spared < freeBounces+g.lingering {
		return 0
	}
	return rand.N(bouncePause) //nolint:gosec // no secret
}

// bequeath gives what came to an inbox that lingers to a member of the group on this hub that asks
// for events and has room. It reports false if there is none. Given back instead, the event may
// come to inboxes that linger again and again.
func (in *inbox) bequeath(d *Delivery, came incoming) bool {
	if in.m.sub.keeper != nil {
		return false // the owner of an ordered group has no other
	}
	for _, s := range in.m.sub.bus.groups.membersOf(in.group) {
		wanted := s.wants(d) // not under mu
		s.mu.Lock()
		i := slices.IndexFunc(s.members, func(m *member) bool { return m.group == in.group && m.inbox != nil })
		if i < 0 || !s.running() || !s.room() {
			s.mu.Unlock()
			continue
		}
		d.m, d.cuts = s.members[i], s.link.Cuts.Load()
		// It is in no order with what comes to the member's own inbox.
		d.Redelivered, d.Order, d.Stretch = true, 0, 0
		d.m.take(d, wanted, came)
		return true
	}
	return false
}

// room reports whether the subscription may hold one more event that it did not ask for. s.mu is
// held.
func (s *Subscription) room() bool {
	return s.active+len(s.parked) < s.opts.MaxInFlight && s.heldBytes < s.bus.limits.HeldBytes &&
		(s.heldBytes == 0 || s.bus.subscriptions.held.Load() < int64(s.bus.limits.HeldTotal)) && s.opts.Holder.room(s, 1) >= 1
}

// linger keeps a closed inbox until its pulls have ended, at the given time at the latest. Until
// then, members that join the group share what is known of it. linger reports false when too many
// inboxes linger.
func (w *lingering) linger(in *inbox, until int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.inboxes) >= w.limits.LingeringInboxes {
		w.obs.LimitReached("lingering_inboxes")
		return false
	}
	in.until = until
	w.inboxes[in] = struct{}{}
	in.m.sub.inboxes++
	in.group.lingering++
	w.groups.reshare(in.group)
	return true
}

// endLingering ends one inbox.
func (w *lingering) endLingering(in *inbox) {
	w.mu.Lock()
	_, there := w.inboxes[in]
	if there {
		delete(w.inboxes, in)
		in.m.sub.inboxes--
		in.group.lingering--
	}
	w.mu.Unlock()
	if there {
		w.groups.unshare(in.group, nil)
		_ = in.sub.Drain() // fails only when the connection is closed
	}
}

// sweepLingering ends the inboxes whose pulls have surely ended.
func (w *lingering) sweepLingering(now int64) {
	var over []*inbox
	w.mu.Lock()
	for in := range w.inboxes {
		if in.until <= now {
			over = append(over, in)
		}
	}
	w.mu.Unlock()
	for _, in := range over {
		in.m.sub.mu.Lock()
		in.ended(in.pulls)
		in.m.sub.mu.Unlock()
		w.endLingering(in)
	}
}

// forgetLingering ends the inboxes of a link that was lost: what waits in buffers is not ours to
// touch.
func (w *lingering) forgetLingering(l *conn.Link) {
	var lost []*inbox
	w.mu.Lock()
	for in := range w.inboxes {
		if in.m.sub.link == l {
			lost = append(lost, in)
		}
	}
	w.mu.Unlock()
	for _, in := range lost {
		in.m.sub.mu.Lock()
		in.forgotten = true
		in.ended(in.pulls)
		in.m.sub.mu.Unlock()
		w.endLingering(in)
	}
}

// endInboxes ends the inboxes of a subscription that drains, and returns what came to them
// meanwhile. What is given back afterwards does not come to them: the server takes the end of an
// inbox and what follows in order. Only an event that is on its way in that very moment waits out
// AckWait.
func (s *Subscription) endInboxes(ctx context.Context) []*Delivery {
	if !s.link.Clustered() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), quietMax)
	defer cancel()
	tick := time.NewTicker(quietFor / 5)
	defer tick.Stop()
	began := s.bus.clock.Now()
	for s.bus.lingering.lingers(s) {
		s.mu.Lock()
		quiet := s.bus.clock.Now()-max(s.lastCame, began) >= int64(quietFor)
		s.mu.Unlock()
		if quiet || ctx.Err() != nil {
			break
		}
		<-tick.C
	}
	s.bus.lingering.endLingeringOf(s)
	s.mu.Lock()
	defer s.mu.Unlock()
	came := s.custody
	s.custody = nil
	return came
}

// lingers reports whether inboxes of the subscription linger.
func (w *lingering) lingers(s *Subscription) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return s.inboxes > 0
}

// endLingeringOf ends the inboxes that linger of the groups of a subscription, whichever member's
// they were: what it gives back must not come to them.
func (w *lingering) endLingeringOf(s *Subscription) {
	var over []*inbox
	w.mu.Lock()
	for in := range w.inboxes {
		if in.m.sub == s || in.m.sub.link == s.link && in.m.sub.group == s.group {
			over = append(over, in)
		}
	}
	w.mu.Unlock()
	for _, in := range over {
		in.m.sub.mu.Lock()
		in.ended(in.pulls)
		in.m.sub.mu.Unlock()
		w.endLingering(in)
	}
}
