//go:build unix

package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// event takes an EVENT frame.
func (l *ledger) event(line int, c *connection, e entry, w *wireFrame) {
	complain := func(format string, args ...any) {
		v := violation{rule: "frames", topic: w.Topic, group: w.Group, msg: fmt.Sprintf("c%d: ", c.number) + fmt.Sprintf(format, args...), from: e.at, to: e.at}
		if w.Event != nil {
			v.id = w.Event.ID
		}
		l.odd = append(l.odd, v)
	}
	s := c.current[groupKey{w.Topic, w.Group}]
	switch {
	case w.Event == nil || w.Ctx == nil:
		complain("an EVENT without event or ctx: %s", e.text)
		return
	case s == nil:
		complain("an EVENT without, or before, the OK of a SUBSCRIBE")
		return
	case s.stop != nil && s.stop.ok():
		complain("an EVENT after the OK of its UNSUBSCRIBE")
		return
	case !slices.Contains(s.topics, w.Event.Topic):
		complain("an event of topic %s, which is not subscribed to", w.Event.Topic)
		return
	}
	if s.paused() {
		complain("an EVENT after the OK of PAUSE, and before RESUME")
	}
	if got, want := time.Duration(w.Ctx.AckDeadlineMS)*time.Millisecond, s.leased(); got != want {
		complain("ack_deadline_ms is %v, not %v", got, want)
	}
	n := numberIn(w.Event.Payload, w.Event.ID)
	p := l.sentN[n]
	switch {
	case p == nil:
		complain("an event that nobody published: %s", e.text)
		return
	case string(p.Payload) != string(w.Event.Payload):
		complain("the payload %s is not the one published, %s", w.Event.Payload, p.Payload)
	case p.Topic != w.Event.Topic:
		complain("event %d was published to %s", n, p.Topic)
	case p.Opts != nil && p.Opts.ID != "" && p.Opts.ID != w.Event.ID, p.ok() && p.reply.ID != w.Event.ID:
		complain("event %d was published with another id", n)
	case p.Opts != nil && p.Opts.Key != w.Event.Key, p.Opts == nil && w.Event.Key != "":
		complain("event %d was published with another key than %q", n, w.Event.Key)
	}
	g := l.group(groupKey{w.Event.Topic, w.Group})
	ev := g.events[w.Event.ID]
	if ev == nil {
		ev = &event{id: w.Event.ID}
		g.events[w.Event.ID] = ev
	}
	lo := max(p.sent, s.start.sent)
	if !c.small {
		lo = max(lo, e.lo)
	}
	d := &delivery{line: line, sub: s, group: g, id: w.Event.ID, topic: w.Event.Topic, attempt: w.Ctx.Attempt, lo: lo, at: e.at, key: w.Event.Key, slot: noSlot}
	if w.Event.Partition != nil {
		d.slot = *w.Event.Partition
	}
	ev.deliveries = append(ev.deliveries, d)
	s.delivered = append(s.delivered, d)
}

// paused reports whether its last PAUSE was answered and no RESUME was sent since.
func (s *sub) paused() bool {
	if len(s.pauses) == 0 {
		return false
	}
	last := s.pauses[len(s.pauses)-1]
	return last.ok() && (len(s.resumes) == 0 || s.resumes[len(s.resumes)-1].line < last.line)
}

// takeStored takes what a stream holds at the end.
func (l *ledger) takeStored(e entry) error {
	if e.kind != kindStored {
		return nil
	}
	parts := strings.SplitN(e.text, " ", 5)
	if len(parts) < 5 {
		return fmt.Errorf("%d fields", len(parts))
	}
	s := &stored{topic: parts[0], id: parts[2], payload: parts[4]}
	s.seq, _ = strconv.ParseUint(parts[1], 10, 64)
	s.ms, _ = strconv.ParseInt(parts[3], 10, 64)
	s.n = numberIn([]byte(s.payload), s.id)
	l.store(s)
	return nil
}

func (l *ledger) store(s *stored) {
	l.stored[s.topic] = append(l.stored[s.topic], s)
	if s.n > 0 {
		if other := l.byN[s.n]; other != nil {
			l.odd = append(l.odd, violation{rule: "stored", topic: s.topic, id: s.id, msg: fmt.Sprintf("payload %d is stored twice: %s at %d, %s at %d", s.n, other.topic, other.seq, s.topic, s.seq)})
		}
		l.byN[s.n] = s
	}
	l.byID[[2]string{s.topic, s.id}] = s
}
