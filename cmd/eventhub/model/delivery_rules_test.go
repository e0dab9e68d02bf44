//go:build unix

package model

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// holder wants each delivery to come after the end of all leases before it.
func holder(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		for _, x := range e.deliveries {
			if len(e.deliveries) == 1 {
				continue
			}
			end := l.leaseEnd(x, nil)
			for _, y := range e.deliveries {
				if x != y && l.before(x, y) && y.at < end && !l.settledLate(e, x, y) {
					lo, _ := x.deadline()
					all = append(all, g.broken(e.id, x.lo, y.at, "%v came although %v was leased, until %v at least (its time: %v)", y, x, short(end), short(lo)))
					return
				}
			}
		}
	})
	return all
}

// ackedAgain wants nothing to come that was acknowledged.
func ackedAgain(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		for _, x := range e.deliveries {
			if len(e.deliveries) == 1 {
				continue
			}
			f := l.acked(x)
			for _, y := range e.deliveries {
				if f != nil && x != y && l.before(x, y) && !l.forgot(g, x.lo, y.at) {
					all = append(all, g.broken(e.id, x.lo, y.at, "%v came although %v was acknowledged between %v and %v", y, x, short(f.sent), short(f.answered)))
					return
				}
			}
		}
	})
	return all
}

// backOff wants a refused event not to come before its time.
func backOff(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		for _, x := range e.deliveries {
			fs := x.may("NACK")
			if len(e.deliveries) == 1 || len(fs) != 1 || !x.surely(fs[0]) || l.leaseEnd(x, fs[0]) <= fs[0].answered {
				continue
			}
			f, due := fs[0], fs[0].sent+x.backOff(fs[0])
			for _, y := range e.deliveries {
				// The delays are the server's, and only in its memory.
				if x != y && l.before(x, y) && y.at < due && !l.within(x.lo, y.at, func(f *fault) bool { return f.losesAcks }) {
					all = append(all, g.broken(e.id, x.lo, y.at, "%v came although it was refused at %v until %v", y, short(f.sent), short(due)))
					return
				}
			}
		}
	})
	return all
}

// backOff is how long a refusal of d keeps the event back.
func (d *delivery) backOff(f *frame) time.Duration {
	if f.DelayMS != nil {
		return time.Duration(*f.DelayMS) * time.Millisecond
	}
	return min(50*time.Millisecond<<min(max(d.attempt-1, 0), 8), 10*time.Second)
}

// inFlight counts the leases that a subscription surely held at a time.
func inFlight(l *ledger) []violation {
	var all []violation
	for _, s := range l.subs {
		most := s.maxInFlight()
		if len(s.delivered) <= most {
			continue
		}
		ends := make([]time.Duration, len(s.delivered))
		for i, d := range s.delivered {
			ends[i] = l.leaseEnd(d, nil)
		}
		for i, y := range s.delivered {
			held, since := 1, y.lo
			for j, x := range s.delivered[:i] {
				if x.at <= y.lo && ends[j] > y.at {
					held++
					since = min(since, x.lo)
				}
			}
			if held > most && !l.forgot(y.group, since, y.at) {
				all = append(all, y.group.broken(y.id, y.lo, y.at, "%v is number %d of the events leased to its subscription, whose maxInFlight is %d", y, held, most))
				break
			}
		}
	}
	return all
}

// attempts wants each event's attempts to be 1, 2, 3…
func attempts(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		ds := slices.Clone(e.deliveries)
		slices.SortStableFunc(ds, func(a, b *delivery) int { return cmp.Or(a.attempt-b.attempt, cmp.Compare(a.lo, b.lo)) })
		last, since := 0, l.publishedAt(ds)
		for i, d := range ds {
			was := last
			if i > 0 {
				since = min(ds[i-1].lo, d.lo)
			}
			last = d.attempt
			to := d.at
			if i > 0 {
				to = max(to, ds[i-1].at)
			}
			switch {
			case l.rewound(g, since, to), l.forgot(g, since, to):
			case d.attempt < 1:
				all = append(all, g.broken(e.id, d.lo, d.at, "%v", d))
				return
			case d.attempt == was && (l.lastMoments(ds[:i]) || l.forgotUnseen(ds) || l.within(since, to, func(f *fault) bool { return f.notesLate })):
			case d.attempt == was:
				all = append(all, g.broken(e.id, ds[i-1].lo, d.at, "%v has the same attempt as %v", d, ds[i-1]))
				return
			case i > 0 && d.at < ds[i-1].lo:
				all = append(all, g.broken(e.id, d.lo, ds[i-1].at, "%v came after %v", ds[i-1], d))
				return
			case d.attempt-was > 1+l.unseen(g, since, d.at)+l.onTheWay(since, d.at)+g.inboxesEnded(since, d.at) && !l.within(since, d.at, func(f *fault) bool { return f.skips }):
				all = append(all, g.broken(e.id, since, d.at, "%v follows attempt %d, and no hub was lost in between", d, was))
				return
			}
		}
	})
	return all
}

// publishedAt is when the event was published, or else when it was first seen.
func (l *ledger) publishedAt(ds []*delivery) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	if s := l.byID[[2]string{ds[0].group.topic, ds[0].id}]; s != nil && l.sentN[s.n] != nil {
		return l.sentN[s.n].sent
	}
	return ds[0].lo
}

// forgotUnseen reports whether a server that was killed may have forgotten a delivery that no
// client had. The hub that had it notes it all the same.
func (l *ledger) forgotUnseen(ds []*delivery) bool {
	return l.within(l.publishedAt(ds), ds[0].lo, func(f *fault) bool { return f.kind == "kill-node" })
}

// lastMoments reports whether one of the deliveries came in the last moments of a server that was
// killed, which may have forgotten it. The hub that had it knows; another hub does not.
func (l *ledger) lastMoments(ds []*delivery) bool {
	return slices.ContainsFunc(ds, func(d *delivery) bool {
		return l.within(d.lo, d.at+justBefore, func(f *fault) bool { return f.rewinds })
	})
}

// unseen counts how often an event may have been given to members that no client saw it come to.
func (l *ledger) unseen(g *group, from, to time.Duration) int {
	n := 0
	for _, b := range g.blind() {
		if b.from <= to && b.to >= from {
			n += 1 + int((min(b.to, to)-max(b.from, from))/b.sub.leased())
		}
	}
	return n
}

// inboxesEnded counts the members that paused or ended. When the server has picked an event for an
// inbox that ends in that very moment, it delivers the event to another at once, and counts the
// delivery that it did not make (docs/upstream).
func (g *group) inboxesEnded(from, to time.Duration) int {
	n := 0
	count := func(sent, done time.Duration) {
		if sent <= to && (done == never || done+2*noticed >= from) {
			n++
		}
	}
	for _, f := range g.starts {
		for _, p := range f.sub.pauses {
			count(p.sent, p.answered)
		}
		if stop := f.sub.stop; stop != nil {
			count(stop.sent, stop.answered)
		}
		if f.conn.guest { // a pull ends with its answer, and the leases stay
			count(f.sent, f.answered)
		}
		if c := f.conn; c.endAt < never {
			count(min(c.closeAt, c.endLo), c.endAt)
		}
	}
	return n
}

// onTheWay counts the hubs of a cluster that were drained: an event that was on its way to one in
// that very moment waits out AckWait, and counts as an attempt that no client saw (ARCHITECTURE.md,
// "Attempts").
func (l *ledger) onTheWay(from, to time.Duration) int {
	n := 0
	for _, f := range l.faults {
		if l.set.Cluster && f.kind == "stop-hub" && f.from <= to && f.to >= from {
			n++
		}
	}
	return n
}

// blind is a time in which a connection may have been given events that its client never read: it
// cut the connection off, which the hub notices a little later, or the hub died and took with it
// what the kernel had not sent.
type blind struct {
	span

	sub *sub
}

func (g *group) blind() []blind {
	var all []blind
	for _, f := range g.starts {
		c := f.conn
		killed := strings.Contains(c.why, "reset by peer") || c.small && c.closeAt == never && c.endAt < never
		if f.refused() || !c.abrupt && !killed {
			continue
		}
		from := max(f.sent, c.unreadSince())
		if stop := f.sub.stop; stop == nil || stop.sent > from || stop.answered == never {
			all = append(all, blind{span{from, min(c.closeAt, c.endAt) + 2*noticed}, f.sub})
		}
	}
	return all
}

// unreadSince bounds from below when the hub wrote what the client did not read before the
// connection ended. On a small one, an empty socket says nothing; but it was behind the last answer
// that was read.
func (c *connection) unreadSince() time.Duration {
	if !c.small {
		return c.endLo
	}
	since := c.opened
	if c.guest { // the answers come another way; what it has not read came after what it read
		return max(since, c.heard-time.Second)
	}
	for _, f := range c.frames {
		if f.answered != never {
			since = max(since, f.sent)
		}
	}
	return since
}
