//go:build unix

package model

import (
	"slices"
	"time"
)

// noticed is what the hub may take to notice the end of a lease: 250 ms by the protocol, and what a
// busy machine adds.
const noticed = 400 * time.Millisecond

// about lists the frames that settle the event id, of a history that is taken in.
func (s *sub) about(id string) []*frame {
	if s.settlesOf == nil {
		s.settlesOf = map[string][]*frame{}
		for _, f := range s.settles {
			ids := f.IDs
			if f.ID != "" && !slices.Contains(ids, f.ID) {
				ids = append(slices.Clone(ids), f.ID)
			}
			for i, id := range ids {
				if !slices.Contains(ids[:i], id) {
					s.settlesOf[id] = append(s.settlesOf[id], f)
				}
			}
		}
	}
	return s.settlesOf[id]
}

// refused reports whether f was answered with an error, and so had no effect.
func (f *frame) refused() bool { return f.reply != nil && !f.ok() }

// may lists the settling frames that may have been carried out while d was leased.
func (d *delivery) may(ops ...string) []*frame {
	var fs []*frame
	for _, f := range d.sub.about(d.id) {
		if f.answered >= d.lo && !f.refused() && slices.Contains(ops, f.Op) {
			fs = append(fs, f)
		}
	}
	return fs
}

// next is when the same subscription got the event again, at the earliest.
func (d *delivery) next() time.Duration {
	at := never
	for _, o := range d.group.events[d.id].deliveries {
		if o.sub == d.sub && o.line > d.line {
			at = min(at, o.lo)
		}
	}
	return at
}

// surely reports whether f was about this delivery and no other one of the same event to the same
// subscription.
func (d *delivery) surely(f *frame) bool { return f.sent >= d.at && f.answered <= d.next() && f.ok() }

// deadline is when the time of the lease ran out: not before lo, nor after hi.
func (d *delivery) deadline() (lo, hi time.Duration) {
	t := d.sub.leased()
	lo, hi = d.lo+t, d.at+t
	for _, f := range d.may("MODACK") {
		extend := time.Duration(f.ExtendMS) * time.Millisecond
		if extend == 0 {
			extend = t
		}
		extend = max(extend, time.Second)
		later := never
		if f.answered < never {
			later = f.answered + extend
		}
		if d.surely(f) {
			lo, hi = f.sent+extend, later
		} else {
			lo, hi = min(lo, f.sent+extend), max(hi, later)
		}
	}
	return lo, hi
}

// leaseEnd is the earliest moment at which the lease may have ended, other than by the frame but.
func (l *ledger) leaseEnd(d *delivery, but *frame) time.Duration {
	end, _ := d.deadline()
	for _, f := range d.may("ACK", "NACK") {
		if f != but {
			end = min(end, max(f.sent, d.lo))
		}
	}
	return min(end, d.sub.over(), l.voidedAt(d.sub.conn.hub, d.lo, never), l.takenBack(d), l.agedAt(d))
}

// released is the latest moment at which the lease may have ended, and again that at which the
// event may be delivered again then: never when it may have been settled for good.
func (l *ledger) released(d *delivery) (ended, again time.Duration) {
	_, hi := d.deadline()
	ended = never
	if hi < never {
		ended = hi + noticed
	}
	if over := d.sub.gone(); over < ended {
		ended = over
	}
	if c := d.sub.conn; c.closeAt < never {
		ended = min(ended, max(c.closeAt, d.at)+noticed)
	}
	again = ended
	for _, f := range d.may("ACK", "NACK") {
		if d.surely(f) {
			ended = min(ended, f.answered)
		}
		if f.Op == "ACK" {
			again = never
			continue
		}
		if again == never {
			continue
		}
		if f.answered == never {
			again = never
			continue
		}
		if back := f.answered + d.backOff(f); d.surely(f) {
			again = back
		} else {
			again = max(again, back)
		}
	}
	if m := d.sub.maxAttempts(); m > 0 && d.attempt >= m {
		again = never
	}
	return ended, again
}

// acked returns an ACK that surely settled the event by this delivery, or nil.
func (l *ledger) acked(d *delivery) *frame {
	for _, f := range d.may("ACK") {
		if !d.surely(f) || l.leaseEnd(d, f) <= f.answered || slices.ContainsFunc(d.tellers(), func(hub string) bool { return l.mayLoseAck(hub, f.sent, f.answered) }) {
			continue
		}
		return f
	}
	return nil
}

// tellers are the hubs that may have to tell NATS what is said of the delivery: that of its member,
// and in an ordered group, any that may give out the events.
func (d *delivery) tellers() []string {
	hubs := []string{d.sub.conn.hub}
	if !d.group.ordered {
		return hubs
	}
	for hub, with := range d.group.presences() {
		if with.since <= d.at && hub != hubs[0] {
			hubs = append(hubs, hub)
		}
	}
	return hubs
}

// settledLate reports whether the lease x may have been ended by what was said of another delivery
// of the event just before its way to NATS fell silent, and came when x was leased: "a settlement
// that was sent while NATS answered, and was then held up".
func (l *ledger) settledLate(e *event, x, y *delivery) bool {
	for _, z := range e.deliveries {
		if z == x || z == y {
			continue
		}
		ended, _ := l.released(z)
		if l.within(x.lo, y.at, func(f *fault) bool {
			silent := f.from + margin(l.set)*2/5 + noticed
			return f.holdsBack && (f.allHubs || f.target == z.sub.conn.hub) && f.to >= x.lo && f.to <= y.at &&
				l.leaseEnd(z, nil) <= silent && ended >= f.from-noticed
		}) {
			return true
		}
	}
	return false
}

// before reports whether x was surely handed out before y.
func (l *ledger) before(x, y *delivery) bool {
	switch {
	case x.at <= y.lo:
		return true
	case y.at <= x.lo:
		return false
	}
	return x.attempt < y.attempt && !l.rewound(x.group, min(x.lo, y.lo), max(x.at, y.at))
}

// rewound reports whether the attempts of a group may have begun again, or gone back.
func (l *ledger) rewound(g *group, from, to time.Duration) bool {
	return l.vanished(g, from, to) || l.within(from, to, func(f *fault) bool { return f.rewinds && f.during(from, to) })
}

// vanished reports whether a group with a TTL may have disappeared and begun anew.
func (l *ledger) vanished(g *group, from, to time.Duration) bool {
	return slices.ContainsFunc(l.vanishings(g), func(v span) bool { return v.from <= to && v.to >= from })
}

// mostMemory is the longest TTL of a group that lives in the memory of its server (docs/nats.md).
const mostMemory = time.Minute

// forgot reports whether what a group has settled may come again: the group disappeared for want of
// members, or lives in the memory of a server that was restarted, and went back to its ack floor.
func (l *ledger) forgot(g *group, from, to time.Duration) bool {
	ttl := g.ttl()
	return l.vanished(g, from, to) || 0 < ttl && ttl <= mostMemory && l.within(from-ttl, to, func(f *fault) bool { return f.rewinds })
}

// ttl is the group's, 0 for a durable one.
func (g *group) ttl() time.Duration {
	least := time.Duration(0)
	for _, f := range g.starts {
		if f.Opts == nil || f.Opts.GroupTTLMS == 0 {
			return 0
		}
		if t := time.Duration(f.Opts.GroupTTLMS) * time.Millisecond; least == 0 || t < least {
			least = t
		}
	}
	return least
}

// vanishings are the times in which a group with a TTL may have disappeared, for want of members.
func (l *ledger) vanishings(g *group) []span {
	ttl := g.ttl()
	if ttl == 0 {
		return nil
	}
	// A member of a hub that is frozen or cut off is not one for the server.
	var with []span
	for _, s := range g.subs {
		parts := []span{{s.start.answered, s.over()}}
		for _, f := range l.faults {
			if f.voids && (f.allHubs || f.target == s.conn.hub) {
				parts = without(parts, span{f.from, f.to})
			}
		}
		with = append(with, parts...)
	}
	_, since := g.creators(0)
	if since >= l.end {
		return nil
	}
	gaps := []span{{since, l.end}}
	for _, w := range with {
		gaps = without(gaps, w)
	}
	return slices.DeleteFunc(gaps, func(s span) bool { return s.to-s.from < ttl*7/10 })
}

// without takes away from spans what lies in cut.
func without(spans []span, cut span) []span {
	var left []span
	for _, s := range spans {
		if cut.to <= s.from || cut.from >= s.to {
			left = append(left, s)
			continue
		}
		if s.from < cut.from {
			left = append(left, span{s.from, cut.from})
		}
		if cut.to < s.to {
			left = append(left, span{cut.to, s.to})
		}
	}
	return left
}
