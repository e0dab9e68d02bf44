//go:build unix

package model

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"
)

// noSlot is that of events without event.partition.
const noSlot = -1

// defaultSlots are those of a group whose first member gives no number.
const defaultSlots = 64

// ownerAlone is how long a hub gives out the events of an ordered group without a member of its
// own, before it hands over and takes back what members have: 10 s, and not earlier.
const ownerAlone = 10 * time.Second

// assignment is an ASSIGN frame.
type assignment struct {
	line   int
	sub    *sub
	group  *group
	slots  []int
	epoch  uint64
	lo, at time.Duration // it was written between these
}

func (a *assignment) has(slot int) bool { return slices.Contains(a.slots, slot) }

func (a *assignment) String() string {
	return fmt.Sprintf("the ASSIGN with epoch %d to c%d on %s at %v", a.epoch, a.sub.conn.number, a.sub.conn.hub, short(a.at))
}

// assigned takes an ASSIGN frame.
func (l *ledger) assigned(line int, c *connection, e entry, w *wireFrame) {
	complain := func(format string, args ...any) {
		l.odd = append(l.odd, violation{rule: "frames", topic: w.Topic, group: w.Group, msg: fmt.Sprintf("c%d: ", c.number) + fmt.Sprintf(format, args...), from: e.at, to: e.at})
	}
	// It names the topic of the slots, which may be another one of the subscription.
	var s *sub
	for _, one := range c.current {
		if one.key.group == w.Group && slices.Contains(one.topics, w.Topic) {
			s = one
		}
	}
	switch {
	case s == nil:
		complain("an ASSIGN without, or before, the OK of a SUBSCRIBE")
		return
	case s.stop != nil && s.stop.ok():
		complain("an ASSIGN after the OK of its UNSUBSCRIBE")
		return
	case s.start.Opts == nil || s.start.Opts.Ordered == "":
		complain("an ASSIGN to a member of a group that is not ordered")
		return
	}
	lo := s.start.sent
	if !c.small {
		lo = max(lo, e.lo)
	}
	a := &assignment{line: line, sub: s, group: l.group(groupKey{w.Topic, w.Group}), slots: w.Slots, epoch: w.Epoch, lo: lo, at: e.at}
	if s.assigns == nil {
		s.assigns = map[string][]*assignment{}
	}
	s.assigns[w.Topic] = append(s.assigns[w.Topic], a)
	a.group.assigns = append(a.group.assigns, a)
}

// slotOf is the jump hash of the 64-bit FNV-1a hash of a key, as protocol.md has it. It is not the
// hub's own code.
func slotOf(key string, slots int) int {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	seed, at, next := h.Sum64(), int64(0), int64(0)
	for next < int64(slots) {
		at = next
		seed = seed*2862933555777941757 + 1
		next = int64(float64(at+1) * (float64(int64(1)<<31) / float64(seed>>33+1)))
	}
	return int(at)
}

// slotCounts are the numbers of slots that the group may have been made with.
func (g *group) slotCounts() []int {
	made, _ := g.creators(0)
	var counts []int
	for _, f := range made {
		n := defaultSlots
		if f.Opts != nil && f.Opts.Slots > 0 {
			n = f.Opts.Slots
		}
		if !slices.Contains(counts, n) {
			counts = append(counts, n)
		}
	}
	return counts
}

// takenBack is when the leases of d may have ended because the hub that gave out the group's events
// lost them or handed over; never where nothing of that happened. Nobody sees which hub that is. It
// is one that had a member, and it takes back what the members of all hubs have.
func (l *ledger) takenBack(d *delivery) time.Duration {
	if !d.group.ordered {
		return never
	}
	at := never
	for hub, with := range d.group.presences() {
		if with.since > d.at {
			continue // it had no member yet
		}
		at = min(at, l.voidedAt(hub, d.lo, never))
		gaps := []span{{with.since, never}}
		for _, s := range with.surely {
			gaps = without(gaps, s)
		}
		for _, gap := range gaps {
			from, to := gap.from+ownerAlone, with.goneBy(gap.from)+ownerAlone+l.set.tolerance()
			if from < gap.to && to >= d.lo {
				at = min(at, max(from, d.lo))
			}
		}
	}
	return at
}

// presence is when a hub had members of a group.
type presence struct {
	since  time.Duration // perhaps
	surely []span
	subs   []*sub
}

// goneBy is the latest time at which the last of the members may have gone that were over by then.
func (p *presence) goneBy(then time.Duration) time.Duration {
	last := then
	for _, s := range p.subs {
		if gone := s.gone(); s.over() <= then && gone < never {
			last = max(last, gone)
		}
	}
	return last
}

// presences are those of all hubs that may have had members.
func (g *group) presences() map[string]*presence {
	all := map[string]*presence{}
	for _, f := range g.starts {
		if f.refused() {
			continue
		}
		p := all[f.conn.hub]
		if p == nil {
			p = &presence{since: f.sent}
			all[f.conn.hub] = p
		}
		p.since, p.subs = min(p.since, f.sent), append(p.subs, f.sub)
		if f.ok() {
			p.surely = append(p.surely, span{f.answered, f.sub.over()})
		}
	}
	return all
}

// settledAt is when an event may have been settled, at the earliest; never if nobody did.
func (l *ledger) settledAt(g *group, id string) time.Duration {
	e, at := g.events[id], never
	if e == nil {
		e = &event{id: id}
	}
	for _, d := range e.deliveries {
		_, hi := d.deadline()
		for _, f := range d.may("ACK") {
			if hi == never || f.sent <= hi+noticed {
				at = min(at, max(f.sent, d.lo))
			}
		}
		if l.letterOf(g, id) != nil && d.attempt == l.letterOf(g, id).Attempts {
			at = min(at, l.leaseEnd(d, nil))
		}
	}
	for _, b := range g.blind() { // it may have come once more, unseen
		for _, f := range b.sub.about(id) {
			if f.Op == "ACK" && f.answered >= b.from {
				at = min(at, f.sent)
			}
		}
		if x := l.letterOf(g, id); x != nil && b.sub.maxAttempts() > 0 && x.Attempts >= b.sub.maxAttempts() {
			at = min(at, b.from)
		}
	}
	return at
}

// letterOf is the first dead letter of an event, or nil.
func (l *ledger) letterOf(g *group, id string) *letter {
	for _, x := range l.letter {
		if x.Topic == g.topic && x.Group == g.group && x.Original.ID == id {
			return x
		}
	}
	return nil
}

// keysInOrder wants the events of a key one after the other: none is given out while another one is
// leased, nor before those that are stored before it are settled.
func keysInOrder(l *ledger) []violation {
	var all []violation
	for _, g := range l.sortedGroups() {
		if g.ordered {
			all = append(all, l.oneAtATime(g)...)
			all = append(all, l.keptOrder(g)...)
		}
	}
	return all
}

// oneAtATime looks at the leases of each key, and at those of each slot: a slot goes to another
// member when the last lease has ended.
func (l *ledger) oneAtATime(g *group) []violation {
	var all []violation
	byKey, bySlot := map[string][]*delivery{}, map[int][]*delivery{}
	ends := map[*delivery]time.Duration{}
	for _, e := range g.events {
		for _, d := range e.deliveries {
			if d.key != "" {
				byKey[d.key] = append(byKey[d.key], d)
				bySlot[d.slot] = append(bySlot[d.slot], d)
				ends[d] = l.leaseEnd(d, nil)
			}
		}
	}
	look := func(ds []*delivery, about func(x, y *delivery) bool, what string) {
		slices.SortFunc(ds, func(a, b *delivery) int { return cmp.Or(cmp.Compare(a.at, b.at), a.line-b.line) })
		for i, y := range ds {
			for _, x := range ds[:i] {
				if about(x, y) && x.at <= y.lo && y.at < ends[x] && !l.settledLate(g.events[x.id], x, y) {
					all = append(all, g.broken(y.id, x.lo, y.at, "%v came although %s of the same %s was leased, until %v at least: %v", y, x.id, what, short(ends[x]), x))
					return
				}
			}
		}
	}
	for _, key := range sortedKeys(byKey) {
		look(byKey[key], func(x, y *delivery) bool { return x.id != y.id }, "key")
	}
	for _, slot := range sortedKeys(bySlot) {
		look(bySlot[slot], func(x, y *delivery) bool { return x.sub != y.sub && x.key != y.key }, "slot, of another member,")
	}
	return all
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// keptOrder wants an event not to come before all that are stored before it with its key, and are
// the group's, may have been settled.
func (l *ledger) keptOrder(g *group) []violation {
	var all []violation
	type settled struct {
		s  *stored
		at time.Duration
	}
	worst := map[string]settled{} // of each key, the one that was settled last
	for _, s := range l.stored[g.topic] {
		p := l.sentN[s.n]
		if p == nil || p.Opts == nil || p.Opts.Key == "" {
			continue
		}
		key, e := p.Opts.Key, g.events[s.id]
		if e != nil {
			first := slices.MinFunc(e.deliveries, func(a, b *delivery) int { return cmp.Compare(a.at, b.at) })
			if was, ok := worst[key]; ok && first.at < was.at {
				until := "nobody settled that"
				if was.at < never {
					until = fmt.Sprintf("that was not settled before %v", short(was.at))
				}
				all = append(all, g.broken(s.id, first.lo-3*time.Second, min(was.at, first.at+3*time.Second), "%v, number %d of the stream, came although %s, number %d, has the same key, and %s", first, s.seq, was.s.id, was.s.seq, until))
				return all
			}
		}
		if surely, _ := l.wants(g, s); !surely && e == nil {
			continue
		}
		if at := l.settledAt(g, s.id); at > worst[key].at {
			worst[key] = settled{s, at}
		}
	}
	return all
}

// slots wants each event in the slot of its key, at the member that was told of the slot, and the
// slots to be in one hand each.
func slots(l *ledger) []violation {
	var all []violation
	for _, g := range l.sortedGroups() {
		if !g.ordered {
			l.eachOf(g, func(d *delivery) bool {
				if d.slot != noSlot {
					all = append(all, g.broken(d.id, d.lo, d.at, "%v has partition %d, and the group is not ordered", d, d.slot))
				}
				return d.slot == noSlot
			})
			continue
		}
		all = append(all, l.partitions(g)...)
		all = append(all, l.epochs(g)...)
		all = append(all, l.oneHand(g)...)
	}
	return all
}

// eachOf calls f for the deliveries to a group's members in the order of receipt, until it returns
// false.
func (l *ledger) eachOf(g *group, f func(*delivery) bool) {
	for _, s := range g.subs {
		for _, d := range s.delivered {
			if d.group == g && !f(d) {
				return
			}
		}
	}
}

func (l *ledger) partitions(g *group) []violation {
	var all []violation
	counts := g.slotCounts()
	l.eachOf(g, func(d *delivery) bool {
		wrong := func(format string, args ...any) bool {
			all = append(all, g.broken(d.id, d.lo, d.at, "%v: "+format, append([]any{d}, args...)...))
			return false
		}
		if d.key == "" {
			return d.slot == noSlot || wrong("it has no key, and partition %d", d.slot)
		}
		if d.slot == noSlot {
			return wrong("it has the key %s, and no partition", d.key)
		}
		fit := slices.DeleteFunc(slices.Clone(counts), func(n int) bool { return slotOf(d.key, n) != d.slot })
		if len(fit) == 0 {
			return wrong("its partition is %d, which is not the slot of %s with %v slots", d.slot, d.key, counts)
		}
		counts = fit // all events have to agree
		var last *assignment
		for _, a := range d.sub.assigns[g.topic] {
			if a.line < d.line {
				last = a
			}
		}
		switch {
		case last == nil:
			return wrong("no ASSIGN came before it")
		case !last.has(d.slot):
			return wrong("its slot %d is not among those of %v", d.slot, last)
		}
		return true
	})
	return all
}

// epochs wants those that a member is told to rise, and no slot to be two members' in one epoch.
func (l *ledger) epochs(g *group) []violation {
	var all []violation
	last, owner := map[*sub]*assignment{}, map[uint64]map[int]*assignment{}
	for _, a := range g.assigns {
		if was := last[a.sub]; was != nil && was.epoch >= a.epoch {
			all = append(all, g.broken("", was.lo, a.at, "%v follows %v", a, was))
			return all
		}
		last[a.sub] = a
		if owner[a.epoch] == nil {
			owner[a.epoch] = map[int]*assignment{}
		}
		for _, slot := range a.slots {
			if was := owner[a.epoch][slot]; was != nil {
				all = append(all, g.broken("", was.lo, a.at, "slot %d is in both %v and %v", slot, was, a))
				return all
			}
			owner[a.epoch][slot] = a
		}
	}
	return all
}

// oneHand wants a slot not to be two members' for longer than the news may take to one of them.
func (l *ledger) oneHand(g *group) []violation {
	type claim struct {
		span

		a *assignment
	}
	claims := map[int][]claim{}
	for _, s := range g.subs {
		told := s.assigns[g.topic]
		for i, a := range told {
			for _, slot := range a.slots {
				to := min(s.over(), l.voidedOf(a))
				for _, later := range told[i+1:] {
					if !later.has(slot) {
						to = min(to, later.lo)
						break
					}
				}
				if i > 0 && told[i-1].has(slot) {
					continue // it has the slot for longer
				}
				for _, d := range s.conn.deaf { // it is told, and does not read that
					if d.to > a.at {
						to = min(to, max(d.from, a.at))
					}
				}
				claims[slot] = append(claims[slot], claim{span{a.at, to}, a})
			}
		}
	}
	for _, slot := range sortedKeys(claims) {
		cs := claims[slot]
		for i, x := range cs {
			for _, y := range cs[i+1:] {
				from, to := max(x.from, y.from), min(x.to, y.to, l.end)
				if x.a.sub != y.a.sub && to-from > l.set.tolerance() && !l.within(from, to, func(f *fault) bool { return f.kind == "stall-harness" }) {
					return []violation{g.broken("", from, to, "slot %d is in two hands from %v to %v: %v and %v", slot, short(from), short(to), x.a, y.a)}
				}
			}
		}
	}
	return nil
}

// voidedOf is when a member may have lost its slots by a fault, or by a new hub that gives out the
// group's events, without being told: when that hub, or its own, was lost.
func (l *ledger) voidedOf(a *assignment) time.Duration {
	return l.takenBack(&delivery{sub: a.sub, group: a.group, lo: a.lo, at: a.at})
}

// queued returns the slot of an event of an ordered group, and when its turn surely came, for all
// before it with its key were settled. turn has that of each key so far.
func (l *ledger) queued(g *group, s *stored, turn map[string]time.Duration) (slot int, due time.Duration) {
	p := l.sentN[s.n]
	if !g.ordered || p == nil || p.Opts == nil || p.Opts.Key == "" {
		return noSlot, 0
	}
	key, e := p.Opts.Key, g.events[s.id]
	due = turn[key]
	settled := never
	if e != nil {
		for _, d := range e.deliveries {
			if f := l.acked(d); f != nil {
				settled = min(settled, f.answered)
			}
		}
	}
	if _, not := l.wants(g, s); not && e == nil {
		settled = 0
	}
	turn[key] = max(due, settled)
	counts := g.slotCounts()
	return slotOf(key, counts[0]), due
}

// withoutUse leaves out the times in which another event of the slot may be leased: a slot that is
// to move gives no further events until that has ended.
func (l *ledger) withoutUse(g *group, w idleEvent, free []span) []span {
	for id, e := range g.events {
		if id == w.id || e.deliveries[0].slot != w.slot {
			continue
		}
		for _, d := range e.deliveries {
			ended, _ := l.released(d)
			free = without(free, span{d.lo, ended})
		}
	}
	return free
}

// withoutOwners leaves out the times in which a hub that gave out the events of an ordered group
// may have died, or may have lost its right to until the end of a fault, and the others wait for
// 10 s and then for AckWait.
func (l *ledger) withoutOwners(g *group, free []span) []span {
	if !g.ordered {
		return free
	}
	for _, f := range l.faults {
		if (f.voids || f.leaderless) && f.kind != "stop-hub" && f.counts(l.set) {
			lost := f.from
			if f.to < never && f.kind != "kill-hub" {
				lost = f.to
			}
			free = without(free, span{f.from, lost + ownerAlone + l.set.ackWait() + l.set.tolerance()})
		}
	}
	return free
}

// withoutRestarts leaves out the times in which the member's hub, which was killed and started
// again, waits for the lease of its own past to end: that may be the only hub with members.
func (l *ledger) withoutRestarts(g *group, s *sub, room []span) []span {
	if !g.ordered {
		return room
	}
	for _, f := range l.faults {
		if f.kind == "kill-hub" && f.target == s.conn.hub && f.to < never {
			room = without(room, span{f.from, f.to + ownerAlone + l.set.ackWait() + l.set.tolerance()})
		}
	}
	return room
}

// owning are the parts of room in which the member surely had the slot.
func (s *sub) owning(g *group, slot int, room []span) []span {
	lost := []span{{0, never}}
	told := s.assigns[g.topic]
	for i, a := range told {
		if !a.has(slot) {
			continue
		}
		until := never
		if i+1 < len(told) {
			until = told[i+1].lo
		}
		lost = without(lost, span{a.at, until})
	}
	for _, b := range lost {
		room = without(room, b)
	}
	return room
}
