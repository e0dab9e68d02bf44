//go:build unix

package model

import (
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

// ackedAgain wants nothing to come that was acknowledged. A client may acknowledge an event that
// another has by then, because of what was held up on its way to NATS.
func ackedAgain(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		for _, x := range e.deliveries {
			if len(e.deliveries) == 1 {
				continue
			}
			f := l.acked(x)
			for _, y := range e.deliveries {
				if f != nil && x != y && l.before(x, y) && !l.forgot(g, x.lo, y.at) && (y.at > f.sent || !l.settledLate(e, x, y)) {
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
