//go:build unix

package model

import (
	"cmp"
	"slices"
	"time"
)

// attempts wants each event's attempts to be 1, 2, 3…
func attempts(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		ds := slices.Clone(e.deliveries)
		slices.SortStableFunc(ds, func(a, b *delivery) int { return cmp.Or(a.attempt-b.attempt, cmp.Compare(a.lo, b.lo)) })
		for i, d := range ds {
			since := l.publishedAt(ds)
			was := 0
			if before := lastBefore(ds[:i], d); before != nil {
				was, since = before.attempt, min(before.lo, d.lo)
			}
			from, to := since, d.at
			if i > 0 {
				from, to = min(d.lo, ds[i-1].lo), max(to, ds[i-1].at)
			}
			again := l.rewound(g, from, to) || l.forgot(g, from, to)
			most := 1 + l.unseen(g, since, d.at) + l.onTheWay(since, d.at) + g.inboxesEnded(since, d.at) + l.missed(since, d.at)
			switch {
			case d.attempt < 1:
				all = append(all, g.broken(e.id, d.lo, d.at, "%v", d))
				return
			case d.attempt-was > most:
				all = append(all, g.broken(e.id, since, d.at, "%v follows attempt %d, and %d at most were unseen in between", d, was, most-1))
				return
			case again:
			case d.attempt == was && (l.lastMoments(ds[:i]) || l.forgotUnseen(ds) || d.attempt > i && l.notedLate(g, l.publishedAt(ds), to)):
			case d.attempt == was:
				all = append(all, g.broken(e.id, ds[i-1].lo, d.at, "%v has the same attempt as %v", d, ds[i-1]))
				return
			case i > 0 && d.at < ds[i-1].lo && l.lastMoments(ds[i:i+1]):
			case i > 0 && d.at < ds[i-1].lo:
				all = append(all, g.broken(e.id, d.lo, ds[i-1].at, "%v came after %v", ds[i-1], d))
				return
			}
		}
	})
	return all
}

// lastBefore is the last delivery that does not surely come after d: where attempts began again,
// those after d have lower numbers, too.
func lastBefore(ds []*delivery, d *delivery) *delivery {
	for _, x := range slices.Backward(ds) {
		if x.lo < d.at {
			return x
		}
	}
	return nil
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
	since := l.publishedAt(ds)
	return l.within(since, ds[0].lo, func(f *fault) bool { return f.kind == "kill-node" && f.from >= since })
}

// lastMoments reports whether one of the deliveries came in the last moments of a server that was
// killed, or from one that led the group while it was apart. The next leader may not know of it.
// The hub that had it knows; another hub does not.
func (l *ledger) lastMoments(ds []*delivery) bool {
	return slices.ContainsFunc(ds, func(d *delivery) bool {
		return l.within(d.lo, d.at+justBefore, func(f *fault) bool {
			return (f.rewinds || f.deposes && l.set.Cluster) && f.during(d.lo, d.at+justBefore)
		})
	})
}

// missed counts the deliveries that hubs may have had unseen when they were lost: one for each
// loss, and one more for each AckWait for which the hub, or its way to NATS, was not there.
func (l *ledger) missed(from, to time.Duration) int {
	n := 0
	for _, f := range l.faults {
		if f.skips && f.from <= to && f.to >= from && f.counts(l.set) {
			n += 1 + int((min(f.to, to)-max(f.from, from))/l.set.ackWait())
		}
	}
	return n
}

// notedLate reports whether a hub with members of the group may have noted late what it had unseen
// since the event was published. Another hub counts that until it gives the event away, and a
// further hub then shows the same number. So the number that is shown twice is never below that of
// the deliveries that clients had. The note comes at the latest when the hub has its connections
// again, or the notes their leader.
func (l *ledger) notedLate(g *group, from, to time.Duration) bool {
	return l.within(from-reconnected, to, func(f *fault) bool {
		return f.notesLate && (f.target[0] != 'n' || l.set.Cluster) && f.length() >= mostOfMargin(l.set) && g.memberAt(f)
	})
}

// memberAt reports whether the group may have had members on the hub of the fault when it began, or
// on any hub, if the fault is that of a node.
func (g *group) memberAt(f *fault) bool {
	return slices.ContainsFunc(g.starts, func(q *frame) bool {
		return (q.conn.hub == f.target || f.target[0] == 'n') && !q.refused() && q.sent <= f.to && q.sub.gone() >= f.from-noticed
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
