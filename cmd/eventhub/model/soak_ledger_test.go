//go:build unix

package model

import (
	"fmt"
	"sync"
	"testing"
)

// soakWindow is how far a publisher may be ahead of its slowest group, in events. It bounds the
// memory of a soakLedger.
const soakWindow = 1 << 17

// track knows which numbers were seen: all below base, and some of the soakWindow from there on.
type track struct {
	base  int64
	bits  [soakWindow / 64]uint64 // a ring
	again int64                   // how often a number was seen that had been seen before
}

// see takes down a number. One beyond the window is ignored: it counts as not seen.
func (t *track) see(n int64) {
	if n >= t.base+soakWindow {
		return
	}
	word, bit := &t.bits[n%soakWindow/64], uint64(1)<<(n%64)
	if n < t.base || *word&bit != 0 {
		t.again++
		return
	}
	*word |= bit
	for {
		word, bit := &t.bits[t.base%soakWindow/64], uint64(1)<<(t.base%64)
		if *word&bit == 0 {
			return
		}
		*word &^= bit
		t.base++
	}
}

// soakLane is what one publisher publishes to its topic: numbers from 0 on.
type soakLane struct {
	topic     string
	next      int64 // the number of the next event
	confirmed track
	groups    map[string]*track
}

// behind is how many of the first n events a group has not seen, at most.
func (l *soakLane) behind(n int64) int64 {
	most := int64(0)
	for _, t := range l.groups {
		most = max(most, n-t.base)
	}
	return most
}

// soakLedger knows which events were published, confirmed and delivered. Its memory is bounded.
type soakLedger struct {
	mu         sync.Mutex
	lanes      []*soakLane
	deliveries int64
	wrong      []string // what must not happen; the first mostWrong
}

const mostWrong = 20

func newSoakLedger(topics, groups []string, publishers int) *soakLedger {
	l := &soakLedger{}
	for i := range publishers {
		lane := &soakLane{topic: topics[i%len(topics)], groups: map[string]*track{}}
		for _, g := range groups {
			lane.groups[g] = &track{}
		}
		l.lanes = append(l.lanes, lane)
	}
	return l
}

// faulty takes down what must not happen. mu is held.
func (l *soakLedger) faulty(format string, args ...any) {
	if len(l.wrong) < mostWrong {
		l.wrong = append(l.wrong, fmt.Sprintf(format, args...))
	}
}

// begin returns the number of the next event of a lane. It reports false while the groups are ahead
// by less than most events.
func (l *soakLedger) begin(lane int, most int64) (n int64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.lanes[lane]
	if p.behind(p.next) >= most || p.next-p.confirmed.base >= most {
		return 0, false
	}
	p.next++
	return p.next - 1, true
}

// confirm notes that an event was answered OK.
func (l *soakLedger) confirm(lane int, n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lanes[lane].confirmed.see(n) // within the window, or begin had not begun it
}

// deliver notes that a group was given an event.
func (l *soakLedger) deliver(topic, group string, lane int, n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deliveries++
	if lane < 0 || lane >= len(l.lanes) || l.lanes[lane].topic != topic || n < 0 || n >= l.lanes[lane].next || l.lanes[lane].groups[group] == nil {
		l.faulty("group %s was given event %d of lane %d on %s, which nobody published", group, n, lane, topic)
		return
	}
	l.lanes[lane].groups[group].see(n)
}

// soakPosition has, for each lane, before which number all events were confirmed.
type soakPosition []int64

func (l *soakLedger) position() soakPosition {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := make(soakPosition, len(l.lanes))
	for i, lane := range l.lanes {
		at[i] = lane.confirmed.base
	}
	return at
}

// reached reports whether all groups were given all events before a position.
func (l *soakLedger) reached(at soakPosition) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, lane := range l.lanes {
		if lane.behind(at[i]) > 0 {
			return false
		}
	}
	return true
}

// begun reports whether each group was given an event of each publisher, and each publisher had a
// confirmation.
func (l *soakLedger) begun() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lane := range l.lanes {
		if lane.confirmed.base == 0 {
			return false
		}
		for _, t := range lane.groups {
			if t.base == 0 {
				return false
			}
		}
	}
	return true
}

// missing names events before a position that groups were not given.
func (l *soakLedger) missing(at soakPosition) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for i, lane := range l.lanes {
		for name, t := range lane.groups {
			if t.base < at[i] {
				all = append(all, fmt.Sprintf("group %s was not given event %d of lane %d on %s, which was confirmed; it is %d events behind at most", name, t.base, i, lane.topic, at[i]-t.base))
			}
		}
	}
	return all
}

// soakTotals are the figures of a ledger.
type soakTotals struct{ published, confirmed, deliveries, again int64 }

func (l *soakLedger) totals() soakTotals {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := soakTotals{deliveries: l.deliveries}
	for _, lane := range l.lanes {
		s.published += lane.next
		s.confirmed += lane.confirmed.base
		for _, t := range lane.groups {
			s.again += t.again
		}
	}
	return s
}

// The ledger of the soak finds what was confirmed and not delivered, and what nobody published.
func TestSoakLedger(t *testing.T) {
	t.Parallel()
	l := newSoakLedger([]string{"t0"}, []string{"g0", "g1"}, 1)
	for range 3 * soakWindow { // the ring is used again
		n, ok := l.begin(0, soakWindow)
		if !ok {
			t.Fatal("the lane is full, although all events were delivered")
		}
		l.confirm(0, n)
		l.deliver("t0", "g0", 0, n)
		l.deliver("t0", "g1", 0, n)
	}
	if at := l.position(); !l.reached(at) || at[0] != 3*soakWindow || len(l.missing(at)) > 0 {
		t.Errorf("all were delivered: at %v, missing %v", at, l.missing(at))
	}
	for range 3 {
		n, _ := l.begin(0, soakWindow)
		l.confirm(0, n)
		l.deliver("t0", "g0", 0, n)
		if n%3 != 1 {
			l.deliver("t0", "g1", 0, n)
			l.deliver("t0", "g1", 0, n)
		}
	}
	at := l.position()
	if got := l.missing(at); l.reached(at) || len(got) != 1 || got[0] != fmt.Sprintf("group g1 was not given event %d of lane 0 on t0, which was confirmed; it is 2 events behind at most", 3*soakWindow+1) {
		t.Errorf("missing %v", got)
	}
	if got := l.totals(); got.again != 2 || got.published != 3*soakWindow+3 || got.confirmed != got.published || got.deliveries != 6*soakWindow+7 {
		t.Errorf("totals %+v", got)
	}
	if _, ok := l.begin(0, 2); ok {
		t.Error("an event beyond the window began")
	}
	l.deliver("t0", "g0", 0, 3*soakWindow+3)
	l.deliver("t1", "g0", 0, 1)
	if len(l.wrong) != 2 {
		t.Errorf("two deliveries were of nothing: %v", l.wrong)
	}
}
