//go:build unix

package model

import (
	"slices"
	"time"
)

// creators are the SUBSCRIBEs that may have made the group, and since when it surely is.
func (g *group) creators(after time.Duration) (made []*frame, since time.Duration) {
	since = never
	for _, f := range g.starts {
		if f.ok() && f.sent >= after {
			since = min(since, f.answered)
		}
	}
	for _, f := range g.starts {
		if f.sent < after || f.sent > since {
			continue
		}
		if f.refused() {
			switch f.reply.Code {
			case "subscribe_failed", "internal", "overloaded": // who knows how far it came
			default:
				continue
			}
		}
		made = append(made, f)
	}
	return made, since
}

// wants reports whether an event is surely in the group's range, and whether it surely is not.
func (l *ledger) wants(g *group, s *stored) (surely, surelyNot bool) {
	p := l.sentN[s.n]
	if p == nil {
		return false, false
	}
	after := time.Duration(0)
	for _, v := range l.vanishings(g) {
		after = max(after, v.from)
	}
	made, since := g.creators(after)
	if since == never || len(made) == 0 {
		return false, false
	}
	surely, surelyNot = true, after == 0
	for _, f := range made {
		from := ""
		if f.Opts != nil {
			from = f.Opts.From
		}
		switch from {
		case "", "latest":
			surely = surely && p.sent > since
			surelyNot = surelyNot && p.ok() && p.answered < f.sent
		case "earliest":
			surelyNot = false
		case "ts":
			surely = surely && s.ms >= f.Opts.TS
			surelyNot = surelyNot && s.ms < f.Opts.TS
		case "afterId":
			after := l.byID[[2]string{f.Topic, f.Opts.AfterID}]
			known := after != nil && f.Topic == g.topic
			surely = surely && known && s.seq > after.seq
			surelyNot = surelyNot && known && s.seq <= after.seq
		}
	}
	if after > 0 {
		surely = surely && p.sent > since
	}
	return surely, surelyNot
}

// reset reports whether a member was told that the group had to start anew.
func (l *ledger) reset(g *group) bool {
	for _, c := range l.order {
		for k := range c.resets {
			if k.group == g.group && k.topic == g.topic {
				return true
			}
		}
	}
	return false
}

// lost wants everything in the range of a group to be settled by who may.
func lost(l *ledger) []violation {
	if !l.set.Drained {
		return nil
	}
	buried := l.buried()
	var all []violation
	for _, g := range l.sortedGroups() {
		if g.left > 0 {
			all = append(all, g.broken("", 0, 0, "%d events are unsettled at the end, and do not come", g.left))
			continue
		}
		if l.reset(g) {
			continue
		}
		for _, s := range l.stored[g.topic] {
			if surely, _ := l.wants(g, s); !surely || buried[g.groupKey][s.id] {
				continue
			}
			e := g.events[s.id]
			if e == nil {
				p := l.sentN[s.n]
				all = append(all, g.broken(s.id, p.sent-time.Second, p.sent+10*time.Second, "number %d of the stream never came", s.seq))
				continue
			}
			if !e.settled(g, never) {
				last := e.deliveries[len(e.deliveries)-1]
				_, hi := last.deadline()
				all = append(all, g.broken(s.id, last.lo, hi+time.Second, "it came %d times, is settled, and nobody acknowledged it while it was leased; the last is %v", len(e.deliveries), last))
			}
		}
	}
	return all
}

// buried are the events that have a dead letter, by group.
func (l *ledger) buried() map[groupKey]map[string]bool {
	buried := map[groupKey]map[string]bool{}
	for _, d := range l.letter {
		k := groupKey{d.Topic, d.Group}
		if buried[k] == nil {
			buried[k] = map[string]bool{}
		}
		buried[k][d.Original.ID] = true
	}
	return buried
}

// settled reports whether some ACK that was sent by then may have settled the event.
func (e *event) settled(g *group, by time.Duration) bool {
	for _, d := range e.deliveries {
		_, hi := d.deadline()
		for _, f := range d.may("ACK") {
			if f.sent <= by && (hi == never || f.sent <= hi+noticed) {
				return true
			}
		}
	}
	for _, b := range g.blind() { // it may have come once more, unseen
		for _, f := range b.sub.about(e.id) {
			if f.Op == "ACK" && f.answered >= b.from && f.sent <= by {
				return true
			}
		}
	}
	return false
}

// outOfRange wants nothing that was stored before the group's start.
func outOfRange(l *ledger) []violation {
	var all []violation
	l.eachEvent(func(g *group, e *event) {
		s := l.byID[[2]string{g.topic, e.id}]
		if s == nil {
			return
		}
		if _, not := l.wants(g, s); not {
			d := e.deliveries[0]
			all = append(all, g.broken(e.id, d.lo, d.at, "%v, number %d of the stream, is from before the group's start", d, s.seq))
		}
	})
	return all
}

// letters wants a dead letter for each last failure, and for nothing else.
func letters(l *ledger) []violation {
	if !l.set.Drained {
		return nil
	}
	var all []violation
	count := map[groupKey]map[string][]*letter{}
	for _, x := range l.letter {
		k := groupKey{x.Topic, x.Group}
		if count[k] == nil {
			count[k] = map[string][]*letter{}
		}
		count[k][x.Original.ID] = append(count[k][x.Original.ID], x)
		g := l.groups[k]
		s := l.byID[[2]string{x.Topic, x.Original.ID}]
		if g == nil || s == nil {
			all = append(all, violation{topic: x.Topic, group: x.Group, id: x.Original.ID, msg: "a dead letter of an unknown group or event"})
			continue
		}
		if string(x.Original.Payload) != s.payload {
			all = append(all, g.broken(s.id, 0, 0, "the dead letter has the payload %s, not %s", x.Original.Payload, s.payload))
		}
		if why := l.unfounded(g, x); why != "" {
			all = append(all, g.broken(s.id, 0, 0, "a dead letter (attempts %d, %q): %s", x.Attempts, x.Err, why))
		}
	}
	l.eachEvent(func(g *group, e *event) {
		xs := count[g.groupKey][e.id]
		if len(xs) > 1 && !l.rewound(g, 0, l.end) {
			all = append(all, g.broken(e.id, 0, 0, "there are %d dead letters", len(xs)))
		}
		for _, d := range e.deliveries {
			at, reason := l.failed(d)
			if at == never {
				continue
			}
			if len(xs) == 0 {
				all = append(all, g.broken(e.id, d.lo, at, "%v failed for good (%s) at %v, and there is no dead letter", d, reason, short(at)))
				return
			}
			for _, y := range e.deliveries {
				if y != d && l.before(d, y) && !l.forgot(g, d.lo, y.at) {
					all = append(all, g.broken(e.id, d.lo, y.at, "%v came although %v failed for good (%s) at %v", y, d, reason, short(at)))
					return
				}
			}
		}
	})
	return all
}

// unfounded says why no delivery's failure accounts for a letter; "" if one may.
func (l *ledger) unfounded(g *group, x *letter) string {
	e := g.events[x.Original.ID]
	why := "no delivery has that attempt"
	if e != nil {
		for _, d := range e.deliveries {
			if d.attempt != x.Attempts {
				continue
			}
			if m := d.sub.maxAttempts(); m == 0 || d.attempt < m {
				why = "maxAttempts was not reached"
				continue
			}
			if l.mayFail(d, x.Err) {
				return ""
			}
			why = "the delivery did not fail in that way"
		}
	}
	// a NACK is about the newest delivery, which the client may not have read
	for _, b := range g.blind() {
		refused := slices.ContainsFunc(b.sub.about(x.Original.ID), func(f *frame) bool { return f.Op == "NACK" && !f.refused() })
		if m := b.sub.maxAttempts(); refused && m > 0 && x.Attempts >= m {
			return ""
		}
	}
	if x.Err == "connection lost" || x.Err == "lease expired" {
		// It may have been written to a connection that was cut off with bytes unread, or was lost
		// with its hub.
		for _, b := range g.blind() {
			if m := b.sub.maxAttempts(); m > 0 && x.Attempts >= m {
				return ""
			}
		}
		for _, f := range g.starts {
			c := f.conn
			if m := f.sub.maxAttempts(); m > 0 && x.Attempts >= m && !f.refused() && c.endAt < never && c.closeAt == never {
				return ""
			}
		}
	}
	return why
}

// mayFail reports whether a delivery may have failed for that reason.
func (l *ledger) mayFail(d *delivery, reason string) bool {
	lo, hi := d.deadline()
	c := d.sub.conn
	switch reason {
	case "lease expired":
		for _, f := range d.may("ACK", "NACK") {
			if d.surely(f) && f.answered < lo {
				return false
			}
		}
		return d.sub.gone() > lo
	case "connection lost":
		return c.over() < never && (hi == never || c.over() <= hi+noticed)
	}
	for _, f := range d.may("NACK") {
		if f.Reason == reason || f.Reason == "" && reason == "refused" {
			return true
		}
	}
	return false
}

// failed is when a delivery surely failed for the last time, at the latest, and why; never if it
// did not, or may not have.
func (l *ledger) failed(d *delivery) (time.Duration, string) {
	if m := d.sub.maxAttempts(); m == 0 || d.attempt < m || len(d.may("ACK")) > 0 {
		return never, ""
	}
	lo, hi := d.deadline()
	disturbed := func(to time.Duration) bool {
		// The letter may go over another connection, which is not back yet; then the event is
		// delivered once more.
		return l.within(d.lo-reconnected, to+justBefore, func(f *fault) bool { return f.voids || f.losesAcks })
	}
	nacks := d.may("NACK")
	c := d.sub.conn
	switch {
	case len(nacks) > 0:
		f := nacks[0]
		if !d.surely(f) || l.leaseEnd(d, f) <= f.answered || len(nacks) > 1 && nacks[1].sent < f.answered || disturbed(f.answered) {
			return never, ""
		}
		reason := f.Reason
		if reason == "" {
			reason = "refused"
		}
		return f.answered, reason
	case hi < never && d.sub.over() > hi+noticed:
		if disturbed(hi + noticed) {
			return never, ""
		}
		return hi + noticed, "lease expired"
	case d.sub.stop == nil && c.closeAt < never && c.closeAt < lo-noticed && d.at < c.closeAt:
		if disturbed(c.closeAt + noticed) {
			return never, ""
		}
		return c.closeAt + noticed, "connection lost"
	}
	return never, ""
}
