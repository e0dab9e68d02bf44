//go:build unix

package model

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// effect is what clients of a run saw of each kind of fault.
type effect struct {
	times   int
	longest time.Duration // the longest wait for an answer
	codes   map[string]int
	ended   int // connections of clients that the hub's end, or the fault's, closed
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
		s.effects[f.kind] = s.effects[f.kind].and(l, f)
	}
}

func (e *effect) and(l *ledger, f *fault) *effect {
	if e == nil {
		e = &effect{codes: map[string]int{}}
	}
	e.times++
	to := min(f.to, l.end) + aftermath
	for _, q := range l.frames {
		reads := !slices.ContainsFunc(q.conn.deaf, func(s span) bool { return s.from <= q.answered && s.to+noticed >= q.sent })
		if q.reply == nil || q.answered < f.from || q.sent > to || !reads || q.conn.small {
			continue
		}
		e.longest = max(e.longest, q.answered-q.sent)
		if q.reply.Op == "ERR" && !slices.Contains(ownFaults, q.reply.Code) {
			e.codes[q.reply.Code]++
		}
	}
	for _, c := range l.order {
		if c.endAt >= f.from && c.endAt <= to && c.closeAt > c.endAt && (f.target == c.hub || f.target[0] != 'h') {
			e.ended++
		}
	}
	return e
}

// print writes tables as RELIABILITY.md has them.
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
	fmt.Fprintf(&b, " %d in all\n\n| what happened | times | longest answer | codes | connections ended |\n|---|---|---|---|---|\n", total)
	for _, kind := range slices.Sorted(maps.Keys(s.effects)) {
		e := s.effects[kind]
		var codes []string
		for _, code := range slices.Sorted(maps.Keys(e.codes)) {
			codes = append(codes, fmt.Sprintf("%s %d", code, e.codes[code]))
		}
		fmt.Fprintf(&b, "| %s | %d | %.1f s | %s | %d |\n", kind, e.times, e.longest.Seconds(), strings.Join(codes, ", "), e.ended)
	}
	tb.Log("\n" + b.String())
}
