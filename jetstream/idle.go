package jetstream

import (
	"slices"
	"time"

	"eventhub/jetstream/event"
)

// What a subscription holds and its subscriber does not take is given back when another member
// waits for it.
const (
	// heldPatience is how long the subscriber has to take an event.
	heldPatience = 400 * time.Millisecond
	// A subscription that gave events back asks for none until its subscriber takes something, or
	// for this long, doubled each time.
	slowFirst = time.Second
	slowMax   = 15 * time.Second
)

// askIdle asks the server whether others wait for events, and returns when it may be asked again.
// s.mu is held.
func (m *member) askIdle(now int64) int64 {
	g, s := m.group, m.sub
	g.mu.Lock()
	ask := g.idleAt <= now
	if ask {
		g.idleAt = now + int64(heldPatience)
	}
	again := g.idleAt
	g.mu.Unlock()
	if ask && s.running() {
		s.wg.Go(func() { // not under mu: an answer may come before ask returns
			g.ask(s.link, now, func(state *consumerState) {
				for _, s := range s.bus.groups.membersOf(g) {
					s.idle(g, state.NumWaiting)
				}
			})
		})
	}
	return again
}

// idle is told how many pulls wait at the consumer. When some are not this member's own, others
// wait for events, and get those that it holds and its subscriber does not take. The server tells
// the end of each pull, so a member knows how many of its own wait.
func (s *Subscription) idle(g *group, waiting int) {
	now := s.bus.clock.Now()
	s.mu.Lock()
	i := slices.IndexFunc(s.members, func(m *member) bool { return m.group == g })
	if i < 0 || g.ordering != nil || !s.running() || !s.stale(s.members[i], now) || waiting <= s.members[i].pulls {
		s.mu.Unlock()
		return
	}
	back, active := s.takeStale(s.members[i], now)
	if active {
		s.slow = min(max(2*s.slow, slowFirst), slowMax)
		s.slowUntil = now + int64(s.slow)
		s.closeInboxes()
		s.schedule(s.slowUntil)
	}
	s.mu.Unlock()
	s.giveBack(back)
}

// stale reports whether the member holds something for too long. s.mu is held.
func (s *Subscription) stale(m *member, now int64) bool {
	return slices.ContainsFunc(s.out, func(d *Delivery) bool { return d.stale(m, now) })
}

func (d *Delivery) stale(m *member, now int64) bool {
	return d.m == m && !d.begun && d.resolved && now-d.arrived >= int64(heldPatience)
}

// takeStale ends what the member holds for too long, and reports whether any of it was waiting for
// the subscriber rather than for credit. s.mu is held.
func (s *Subscription) takeStale(m *member, now int64) (back []*Delivery, active bool) {
	for i := len(s.out) - 1; i >= 0; i-- {
		d := s.out[i]
		if !d.stale(m, now) {
			continue
		}
		if d.active && !active {
			active = true
			s.slowUntil = now + int64(slowFirst) // before remove asks for more
		}
		s.remove(d, event.Returned)
		back = append(back, d)
	}
	s.dropParked()
	return back, active
}

// quicken ends the time in which the subscription asks for nothing. s.mu is held.
func (s *Subscription) quicken() {
	if s.slowUntil == 0 {
		return
	}
	now := s.bus.clock.Now()
	if s.slowUntil > now {
		s.slow = 0 // the subscriber takes events again
	}
	s.slowUntil = 0
	if !s.running() {
		return
	}
	for _, m := range s.members {
		m.open()
	}
	s.refillSoon(now)
}

// dropParked forgets parked deliveries that have ended. s.mu is held.
func (s *Subscription) dropParked() {
	kept := s.parked[:0]
	for _, d := range s.parked {
		if d.index >= 0 {
			kept = append(kept, d)
		}
	}
	clear(s.parked[len(kept):])
	s.parked = kept
}
