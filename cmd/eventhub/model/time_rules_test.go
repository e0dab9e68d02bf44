//go:build unix

package model

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// answerWithin is how long clients wait for an answer.
const answerWithin = 15 * time.Second

// answers wants each frame answered in time while its connection lives, the client reads and the
// hub runs.
func answers(l *ledger) []violation {
	var all []violation
	for _, f := range l.frames {
		c := f.conn
		limit := f.sent + answerWithin
		for _, s := range l.silent(c) {
			if s.from < limit && s.to > f.sent {
				limit += min(s.to, l.end) - max(s.from, f.sent)
			}
		}
		if c.guest || c.over() <= limit || l.end <= limit || c.confused && f.Corr == nil {
			continue
		}
		switch {
		case f.reply == nil:
			all = append(all, violation{topic: f.Topic, group: f.Group, msg: fmt.Sprintf("c%d: the %s sent at %v is not answered", c.number, f.Op, short(f.sent)), from: f.sent, to: limit})
		case f.lo > limit && !c.small:
			all = append(all, violation{topic: f.Topic, group: f.Group, msg: fmt.Sprintf("c%d: the %s sent at %v is answered %v later", c.number, f.Op, short(f.sent), short(f.lo-f.sent)), from: f.sent, to: f.answered})
		}
	}
	return all
}

// silent are the times in which a connection cannot be expected to say anything.
func (l *ledger) silent(c *connection) []span {
	all := slices.Clone(c.deaf)
	for _, f := range l.faults {
		if f.target == c.hub && (f.kind == "freeze-hub" || f.kind == "stall-hub") || f.kind == "stall-harness" {
			all = append(all, span{f.from, f.to})
		}
	}
	return all
}

// hoarded wants no event to wait for longer than the tolerance while a member has room for it.
func hoarded(l *ledger) []violation {
	var all []violation
	// Events that a lost hub holds come after AckWait, and so do those that were on their way from
	// a lost server or to it. Otherwise all is well 5 s after a fault.
	var busy []span
	for _, f := range l.faults {
		to := f.to
		if to < never {
			to = max(f.to+5*time.Second, f.from+l.set.ackWait()+2*time.Second)
		}
		if f.voids || f.allHubs || f.leaderless && l.set.Cluster {
			to = max(to, min(f.to, never-time.Hour)+l.set.ackWait()+2*time.Second)
		}
		busy = append(busy, span{f.from, to})
	}
	idle := map[*sub][]span{}
	for _, g := range l.sortedGroups() {
		if len(g.subs) == 0 || len(l.vanishings(g)) > 0 {
			continue
		}
		waits := l.waits(g)
		for _, w := range waits {
			free := []span{w.span}
			for _, b := range busy {
				free = without(free, b)
			}
			free = l.withoutOwners(g, free)
			if w.slot != noSlot {
				free = l.withoutUse(g, w, free)
			}
			for _, b := range g.blind() {
				free = without(free, span{b.from, b.to + noticed})
			}
			free = slices.DeleteFunc(free, func(s span) bool { return s.to-s.from <= l.set.tolerance() })
			if len(free) == 0 {
				continue
			}
			for _, s := range g.subs {
				if s.conn.guest {
					continue
				}
				if _, ok := idle[s]; !ok {
					idle[s] = l.idle(s)
				}
				room := idle[s]
				if w.slot != noSlot {
					room = s.owning(g, w.slot, room)
				}
				room = l.withoutRestarts(g, s, room)
				if v, found := l.hoardedFrom(g, w, free, s, room); found {
					all = append(all, v)
					break
				}
			}
		}
	}
	return all
}

func (l *ledger) hoardedFrom(g *group, w idleEvent, free []span, s *sub, idle []span) (violation, bool) {
	for _, f := range free {
		for _, i := range idle {
			from, to := max(f.from, i.from), min(f.to, i.to, l.end)
			if to-from > l.set.tolerance() {
				return g.broken(w.id, from, to, "nobody held it from %v to %v, and c%d had room for it from %v to %v", short(w.from), short(min(w.to, l.end)), s.conn.number, short(i.from), short(min(i.to, l.end))), true
			}
		}
	}
	return violation{}, false
}

// idleEvent is a time in which an event surely was deliverable and nobody held it.
type idleEvent struct {
	span

	id   string
	slot int // of an ordered group; noSlot for what any member gets
}

func (l *ledger) waits(g *group) []idleEvent {
	var all []idleEvent
	ids, buried := map[string]bool{}, l.buried()[g.groupKey]
	made, since := g.creators(0)
	if len(made) == 0 || since == never {
		return nil
	}
	turn := map[string]time.Duration{} // by key of an ordered group: when all so far is settled
	for _, s := range l.stored[g.topic] {
		p := l.sentN[s.n]
		slot, due := l.queued(g, s, turn)
		if surely, _ := l.wants(g, s); !surely || ids[s.id] || p == nil || !p.ok() {
			continue
		}
		ids[s.id] = true
		from := max(p.answered, since, due)
		var ds []*delivery
		if e := g.events[s.id]; e != nil {
			ds = slices.Clone(e.deliveries)
			slices.SortFunc(ds, func(a, b *delivery) int { return cmp.Compare(a.lo, b.lo) })
		}
		for _, d := range ds {
			if d.lo > from {
				all = append(all, idleEvent{span{from, d.lo}, s.id, slot})
			}
			_, again := l.released(d)
			from = max(from, again)
		}
		// else it was dead-lettered, perhaps by a delivery that nobody saw
		if from < l.end && !buried[s.id] {
			all = append(all, idleEvent{span{from, never}, s.id, slot})
		}
	}
	return all
}

// idle are the times in which a member surely had room for more.
func (l *ledger) idle(s *sub) []span {
	free := []span{{s.start.answered, s.over()}}
	for i, p := range s.pauses {
		until := never
		for _, r := range s.resumes {
			if r.line > p.line && r.ok() && (i+1 == len(s.pauses) || r.line < s.pauses[i+1].line) {
				until = r.answered
				break
			}
		}
		free = without(free, span{p.sent, until})
	}
	for _, d := range s.conn.deaf {
		free = without(free, d)
	}
	// A sweep over what may have been in flight.
	type edge struct {
		at time.Duration
		n  int
	}
	var edges []edge
	for _, d := range s.delivered {
		ended, _ := l.released(d)
		edges = append(edges, edge{d.lo, 1}, edge{ended, -1})
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), b.n-a.n) })
	held, most, fullSince := 0, s.maxInFlight(), never
	for _, e := range edges {
		was := held
		held += e.n
		switch {
		case was < most && held >= most:
			fullSince = e.at
		case was >= most && held < most:
			free = without(free, span{fullSince, e.at})
			fullSince = never
		}
	}
	if fullSince < never {
		free = without(free, span{fullSince, never})
	}
	return free
}

// frames are what does not fit together at all.
func frames(l *ledger) []violation {
	var all []violation
	for _, v := range l.odd {
		if v.rule == "frames" {
			all = append(all, v)
		}
	}
	for _, c := range l.order {
		if c.guest || c.endAt == never || c.closeAt <= c.endAt {
			continue
		}
		excused := l.within(c.endLo-time.Second, c.endAt, func(f *fault) bool { return f.ends && f.target == c.hub })
		if len(c.deaf) > 0 && c.endAt-c.deaf[len(c.deaf)-1].from < 40*time.Second {
			excused = true // who does not read is given up after a while
		}
		if !excused {
			all = append(all, violation{msg: fmt.Sprintf("c%d: the hub ended the connection: %s", c.number, c.why), from: c.endLo, to: c.endAt})
		}
	}
	return all
}
