//go:build unix

package model

import (
	"fmt"
	"time"
)

// notStored reports whether an answer says that the event is not in the stream. After
// publish_failed nobody knows.
func (f *frame) notStored() bool {
	return f.refused() && f.reply.Code != "publish_failed" && (!f.conn.confused || f.Corr != nil)
}

// given is the id that the publisher gave.
func (f *frame) given() string {
	if f.Opts == nil {
		return ""
	}
	return f.Opts.ID
}

// stored1 compares what was published with what is stored.
func stored1(l *ledger) []violation {
	if !l.set.Drained {
		return nil
	}
	var all []violation
	for _, v := range l.odd {
		if v.rule == "stored" {
			all = append(all, v)
		}
	}
	complain := func(f *frame, id, format string, args ...any) {
		all = append(all, violation{topic: f.Topic, id: id, msg: fmt.Sprintf(format, args...), from: f.sent, to: f.sent})
	}
	byID := map[[2]string][]*frame{}
	for _, f := range l.frames {
		if f.Op != "PUBLISH" {
			continue
		}
		n := f.number()
		at := l.byN[n]
		switch {
		case f.given() != "":
			k := [2]string{f.Topic, f.given()}
			byID[k] = append(byID[k], f)
			if f.ok() && f.reply.ID != f.given() {
				complain(f, f.given(), "the OK of a PUBLISH with this id names another, %s", f.reply.ID)
			}
		case f.ok() && at == nil:
			complain(f, f.reply.ID, "PUBLISH %d was answered OK at %v and is not in the stream", n, short(f.answered))
		case f.ok() && at.id != f.reply.ID:
			complain(f, f.reply.ID, "PUBLISH %d is stored under another id than it was answered with, %s", n, at.id)
		}
		if at != nil && f.notStored() {
			complain(f, at.id, "PUBLISH %d was refused (%s), and is in the stream", n, f.reply.Code)
		}
	}
	for k, fs := range byID {
		kept, confirmed, seen := 0, false, map[int]bool{}
		for _, f := range fs {
			if n := f.number(); l.byN[n] != nil && !seen[n] { // a client library sends it again
				seen[n] = true
				kept++
			}
			confirmed = confirmed || f.ok()
		}
		if kept > 1 || kept == 0 && confirmed {
			complain(fs[0], k[1], "it was published %d times, and is in the stream %d times", len(fs), kept)
		}
	}
	for topic, events := range l.stored {
		last := map[string]uint64{}
		for _, s := range events {
			f := l.sentN[s.n]
			wrong := func(format string, args ...any) {
				all = append(all, violation{topic: topic, id: s.id, msg: fmt.Sprintf(format, args...)})
			}
			switch {
			case s.n == 0 || f == nil:
				wrong("nobody published what is at %d: %s", s.seq, s.payload)
			case f.Topic != topic:
				wrong("what is at %d was published to %s", s.seq, f.Topic)
			case string(f.Payload) != s.payload:
				wrong("what is at %d is not what was published: %s, not %s", s.seq, s.payload, f.Payload)
			}
			if was, ok := last[s.id]; ok {
				wrong("the id is in the stream twice, at %d and %d", was, s.seq)
			}
			last[s.id] = s.seq
		}
	}
	return all
}

// order looks at publishes of one connection, and at first deliveries to a member that is alone.
func order(l *ledger) []violation {
	var all []violation
	for _, c := range l.order {
		last := map[string]*stored{} // of the run of OKs, by topic
		for _, f := range c.frames {
			if f.Op != "PUBLISH" {
				continue
			}
			if !f.ok() {
				delete(last, f.Topic) // an error, or no answer, ends the run
				continue
			}
			if l.sentN[f.number()] != f {
				continue // sent again after an error: perhaps it was stored the first time
			}
			s := l.byN[f.number()]
			if s == nil {
				continue // its id was there before; or the rule about what is stored says more
			}
			if was := last[f.Topic]; was != nil && was.seq > s.seq {
				all = append(all, violation{
					topic: f.Topic, id: s.id, from: f.sent, to: f.answered,
					msg: fmt.Sprintf("c%d published %d after %d, both were answered OK, and they are stored at %d and %d", c.number, s.n, was.n, s.seq, was.seq),
				})
			}
			last[f.Topic] = s
		}
	}
	if l.set.Disturbed {
		return all
	}
	for _, g := range l.sortedGroups() {
		alone := g.alone()
		if alone == nil || g.ordered { // the events of an ordered group are in the order of keys
			continue
		}
		last := &stored{}
		for _, d := range alone.delivered {
			if d.group != g || d.attempt != 1 {
				continue
			}
			s := l.byID[[2]string{g.topic, d.id}]
			if s == nil {
				continue
			}
			if s.seq < last.seq {
				all = append(all, g.broken(d.id, d.at-time.Second, d.at, "the only member got %d for the first time after %d, which is stored behind it", s.seq, last.seq))
			}
			last = s
		}
	}
	return all
}

// alone is the subscription that was the group's only member while it lasted, and gave nothing back
// meanwhile; or nil.
func (g *group) alone() *sub {
	if len(g.subs) == 0 || g.subs[0].start != g.starts[0] {
		return nil
	}
	s := g.subs[0]
	if len(s.pauses) > 0 || len(g.starts) > 1 && g.starts[1].sent <= s.over() {
		return nil
	}
	return s
}
