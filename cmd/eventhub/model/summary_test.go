//go:build unix

package model

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// effect is what clients of a run saw of one kind of fault. The durations have one entry for each
// fault that showed them.
type effect struct {
	times   int
	answers []time.Duration // the longest wait for an answer
	// how long after the fault began the last event came again that its hub had leased, or after
	// its delivery that of a silent member
	again []time.Duration
	codes map[string]int
	ends  map[string]int // how the fault ended connections to its hub
}

// summary is over all seeds of a run.
type summary struct {
	mu                                                 sync.Mutex
	seeds, conns, frames, events, deliveries, nletters int
	made                                               map[string]int
	broken                                             map[string]int
	effects                                            map[string]*effect
}

var sum = &summary{made: map[string]int{}, broken: map[string]int{}, effects: map[string]*effect{}}

// silentKind is the kind of the fault "silent", which is a connection and excuses nothing.
const silentKind = "silent"

// shown are the rows of docs/operations.md, "What clients see of faults", by kind.
var shown = []struct{ kind, row string }{
	{"kill-hub", "a hub is killed"},
	{"stop-hub", "a hub is stopped, restarted or upgraded"},
	{"freeze-hub", "a hub stands still"},
	{"jump-hub", "the clock of a hub jumps"},
	{"hold-link", "a hub is cut off from NATS"},
	{"hold-one-link", "a hub is cut off from one server"},
	{"hold-link-oneway", "a hub is cut off from NATS in one direction"},
	{"delay-link", "the links of a hub to NATS are slow"},
	{"kill-node", "a server is killed"},
	{"stop-node", "a server is stopped, restarted or upgraded"},
	{"freeze-node", "a server stands still"},
	{"pulse-node", "a server is slow, such as its disk"},
	{"delay-route", "the links between servers are slow"},
	{"part-node", "a server is cut off from the others"},
	{"part-node-oneway", "a server is cut off in one direction"},
	{"fill-disk", "the disk of a server is full"},
	{"lose-disk", "a server loses its disk"},
	{"stepdown", "the leader of a stream or a group steps down"},
	{"stepdown-meta", "the leader of the cluster steps down"},
	{silentKind, "a member falls silent"},
}

// faults counts those that were made.
func (s *summary) faults(made map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for kind, n := range made {
		s.made[kind] += n
	}
}

// ownFaults are codes that clients of the model earn at any time.
var ownFaults = []string{"already_subscribed", "not_subscribed", "unknown_id", "bad_frame"}

// aftermath is for how long after a fault its effects on clients are counted as its own.
const aftermath = 2 * time.Second

// add counts a history.
func (s *summary) add(l *ledger, events, deliveries int, byRule map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seeds++
	s.conns += len(l.order)
	s.frames += len(l.frames)
	s.events += events
	s.deliveries += deliveries
	s.nletters += len(l.letter)
	for rule, n := range byRule {
		s.broken[rule] += n
	}
	for _, f := range l.faults {
		s.effect(f.kind).of(l, f)
	}
	for _, c := range l.order {
		if c.silent {
			s.effect(silentKind).ofSilent(l, c)
		}
	}
}

func (s *summary) effect(kind string) *effect {
	e := s.effects[kind]
	if e == nil {
		e = &effect{codes: map[string]int{}, ends: map[string]int{}}
		s.effects[kind] = e
	}
	return e
}

// of counts one fault.
func (e *effect) of(l *ledger, f *fault) {
	e.times++
	to := min(f.to, l.end) + aftermath
	longest := time.Duration(0)
	for _, q := range l.frames {
		reads := !slices.ContainsFunc(q.conn.deaf, func(s span) bool { return s.from <= q.answered && s.to+noticed >= q.sent })
		if q.reply == nil || q.answered < f.from || q.sent > to || !reads || q.conn.small || q.conn.silent {
			continue
		}
		longest = max(longest, q.answered-q.sent)
		if q.reply.Op == "ERR" && !slices.Contains(ownFaults, q.reply.Code) {
			e.codes[q.reply.Code]++
		}
	}
	if longest > 0 {
		e.answers = append(e.answers, longest)
	}
	for _, c := range l.order {
		if c.endAt >= f.from && c.endAt <= to && c.closeAt > c.endAt && f.target == c.hub {
			e.ends[howEnded(c)]++
		}
	}
	if again := l.cameAgain(f); again > 0 {
		e.again = append(e.again, again)
	}
}

// ofSilent counts a member that fell silent: what it had comes again when its leases are over.
func (e *effect) ofSilent(l *ledger, c *connection) {
	e.times++
	last := time.Duration(0)
	for _, s := range l.subs {
		if s.conn != c {
			continue
		}
		for _, d := range s.delivered {
			if at := d.after(d.at); at < never {
				last = max(last, at-d.at)
			}
		}
	}
	if last > 0 {
		e.again = append(e.again, last)
	}
	if c.closeAt > c.endAt {
		e.ends[howEnded(c)]++
	}
}

// cameAgain is how long after a fault of a hub began the last event came again that the hub had
// leased to members; 0 for none.
func (l *ledger) cameAgain(f *fault) time.Duration {
	if f.target[0] != 'h' {
		return 0
	}
	last := time.Duration(0)
	for _, s := range l.subs {
		if s.conn.hub != f.target || s.conn.silent {
			continue
		}
		for _, d := range s.delivered {
			lo, _ := d.deadline()
			said := slices.ContainsFunc(d.may("ACK", "NACK"), func(q *frame) bool { return q.sent < f.from })
			if d.at > f.from || lo < f.from || s.over() < f.from || said {
				continue
			}
			if at := d.after(f.from); at < never {
				last = max(last, at-f.from)
			}
		}
	}
	return last
}

// after is when the event came again to its group after a time, at the earliest.
func (d *delivery) after(from time.Duration) time.Duration {
	at := never
	for _, o := range d.group.events[d.id].deliveries {
		if o != d && o.at > from && o.attempt > d.attempt {
			at = min(at, o.at)
		}
	}
	return at
}

func howEnded(c *connection) string {
	if code, by := strings.CutPrefix(c.why, errPeerClosed.Error()+": "); by {
		code, _, _ = strings.Cut(code, " retry_after_ms=")
		return code
	}
	return "no close frame"
}

// middle is the median and the longest, as tables have them.
func middle(all []time.Duration) string {
	if len(all) == 0 {
		return "–"
	}
	all = slices.Sorted(slices.Values(all))
	return fmt.Sprintf("%.1f s, %.1f s (%d)", all[len(all)/2].Seconds(), all[len(all)-1].Seconds(), len(all))
}

func counted(n map[string]int) string {
	names := slices.SortedFunc(maps.Keys(n), func(a, b string) int { return cmp.Or(n[b]-n[a], strings.Compare(a, b)) })
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, n[name])
	}
	return strings.Join(names, ", ")
}

// print writes tables as RELIABILITY.md and docs/operations.md have them.
func (s *summary) print(tb testing.TB) {
	tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "%d seeds: %d connections, %d frames, %d events, %d deliveries, %d dead letters\nviolations: %v\nfaults:",
		s.seeds, s.conns, s.frames, s.events, s.deliveries, s.nletters, s.broken)
	total := 0
	for _, kind := range slices.Sorted(maps.Keys(s.made)) {
		fmt.Fprintf(&b, " %s %d,", kind, s.made[kind])
		total += s.made[kind]
	}
	fmt.Fprintf(&b, " %d in all\n\nmedian, longest (of how many)\n| fault | times | answers after | events come again after | codes | connections end by |\n|---|---|---|---|---|---|\n", total)
	for _, row := range shown {
		e := s.effect(row.kind)
		fmt.Fprintf(&b, "| %s | %d | %s | %s | %s | %s |\n", row.row, e.times, middle(e.answers), middle(e.again), counted(e.codes), counted(e.ends))
	}
	tb.Log("\n" + b.String())
}
