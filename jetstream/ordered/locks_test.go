package ordered_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"eventhub/jetstream/ordered"
)

// reference is what the locks are to do, said as simply as possible.
type reference struct {
	t       *testing.T
	locks   *ordered.Locks[int]
	slots   int
	keys    map[string][]uint64 // unsettled, in order
	key     map[uint64]string
	taken   map[uint64]string // by whom
	blocked map[uint64]bool   // not to be taken, but here
	awaited map[uint64]bool   // to arrive again
	told    map[string][]int
	members []string // that get slots
	there   map[string]bool
	settled map[string]uint64 // the last place of each key
}

func (r *reference) tell() {
	for _, c := range r.locks.Changes() {
		r.told[c.Member] = c.Slots
	}
	by := make(map[int]string)
	for m, slots := range r.told {
		for _, s := range slots {
			if other, held := by[s]; held {
				r.t.Fatalf("slot %d is %s's and %s's", s, m, other)
			}
			by[s] = m
		}
	}
	// a slot goes to nobody while another member has an event of it
	for pos, m := range r.taken {
		if s := r.slot(pos); s != ordered.NoSlot && !slices.Contains(r.told[m], s) {
			r.t.Fatalf("%s holds an event of slot %d, which it has not", m, s)
		}
	}
}

func (r *reference) slot(pos uint64) int {
	if key := r.key[pos]; key != "" {
		return ordered.Slot(key, r.slots)
	}
	return ordered.NoSlot
}

// free reports whether some event could be taken by the member.
func (r *reference) free(member string) bool {
	for key, places := range r.keys {
		first := places[0]
		if r.taken[first] == "" && !r.blocked[first] && !r.awaited[first] {
			if s := ordered.Slot(key, r.slots); key != "" && slices.Contains(r.told[member], s) && !r.leaves(s, member) {
				return true
			}
		}
	}
	return false
}

// leaves reports whether the slot is on its way to another member.
func (r *reference) leaves(slot int, member string) bool {
	for pos, m := range r.taken {
		if m == member && r.slot(pos) == slot {
			return true // it may be; what is settled next decides
		}
	}
	return false
}

func (r *reference) take(member string) bool {
	item := r.locks.Take(member)
	r.tell()
	if item == nil {
		if r.free(member) {
			r.t.Fatalf("%s is given nothing, and a key of its slots is free", member)
		}
		return false
	}
	key := r.key[item.Pos()]
	switch {
	case item.Key() != key || item.Body != int(item.Pos()):
		r.t.Fatalf("event %d of %q with body %d, want key %q", item.Pos(), item.Key(), item.Body, key)
	case key != "" && r.keys[key][0] != item.Pos():
		r.t.Fatalf("%q: took %d before %d", key, item.Pos(), r.keys[key][0])
	case r.taken[item.Pos()] != "" || r.blocked[item.Pos()] || r.awaited[item.Pos()]:
		r.t.Fatalf("%q: took %d, which is not free", key, item.Pos())
	case key != "" && !slices.Contains(r.told[member], item.Slot()):
		r.t.Fatalf("%s took an event of slot %d before it was told of it", member, item.Slot())
	}
	r.taken[item.Pos()] = member
	return true
}

func (r *reference) settle(pos uint64) {
	r.locks.Settle(r.locks.Find(pos))
	key := r.key[pos]
	if key != "" {
		if pos < r.settled[key] {
			r.t.Fatalf("%q: %d ended after %d", key, pos, r.settled[key])
		}
		r.settled[key] = pos
		if r.keys[key] = slices.DeleteFunc(r.keys[key], func(p uint64) bool { return p == pos }); len(r.keys[key]) == 0 {
			delete(r.keys, key)
		}
	}
	delete(r.taken, pos)
	delete(r.key, pos)
}

// TestLocks does at random what an owner of a group does, and compares it with the reference: no
// key is held by two, the order of each key is kept, other keys go on, and a slot has one member.
func TestLocks(t *testing.T) {
	t.Parallel()
	for seed := range uint64(60) {
		random := rand.New(rand.NewPCG(seed, 7))
		slots := 1 + random.IntN(16)
		r := &reference{
			t: t, slots: slots, locks: ordered.New[int](slots), keys: make(map[string][]uint64), key: make(map[uint64]string), taken: make(map[uint64]string),
			blocked: make(map[uint64]bool), awaited: make(map[uint64]bool), told: make(map[string][]int), settled: make(map[string]uint64), there: make(map[string]bool),
		}
		next := uint64(0)
		pick := func(m map[uint64]bool) (uint64, bool) {
			list := make([]uint64, 0, len(m))
			for pos := range m {
				list = append(list, pos)
			}
			slices.Sort(list)
			if len(list) == 0 {
				return 0, false
			}
			return list[random.IntN(len(list))], true
		}
		anyTaken := func() (uint64, bool) {
			m := make(map[uint64]bool)
			for pos := range r.taken {
				m[pos] = true
			}
			return pick(m)
		}
		for range 600 {
			switch random.IntN(12) {
			case 0, 1, 2:
				next++
				key := ""
				if random.IntN(6) > 0 {
					key = fmt.Sprintf("k%d", random.IntN(10))
					r.keys[key] = append(r.keys[key], next)
				}
				r.key[next] = key
				r.locks.Arrive(next, key, int(next))
			case 3, 4, 5:
				if len(r.members) > 0 {
					r.take(r.members[random.IntN(len(r.members))])
				}
			case 6, 7:
				if pos, ok := anyTaken(); ok {
					r.settle(pos)
				}
			case 8:
				if pos, ok := anyTaken(); ok {
					item := r.locks.Find(pos)
					delete(r.taken, pos)
					switch random.IntN(3) {
					case 0:
						r.locks.Back(item)
					case 1:
						r.locks.Block(item)
						r.blocked[pos] = true
					default:
						r.locks.Await(item)
						r.awaited[pos] = true
					}
				}
			case 9:
				if pos, ok := pick(r.blocked); ok {
					delete(r.blocked, pos)
					r.locks.Await(r.locks.Find(pos))
					r.awaited[pos] = true
				}
			case 10:
				if pos, ok := pick(r.awaited); ok {
					delete(r.awaited, pos)
					if _, kept, _ := r.locks.Arrive(pos, r.key[pos], int(pos)); !kept {
						t.Fatal("an awaited event was not kept")
					}
				}
			default:
				if n := len(r.members); n > 8 || n > 0 && random.IntN(2) == 0 {
					r.members = slices.Delete(r.members, 0, 1)
				} else {
					r.members = append(r.members, fmt.Sprintf("m%d", next)+string(rune('a'+random.IntN(26))))
					slices.Sort(r.members)
					r.members = slices.Compact(r.members)
				}
				r.locks.SetMembers(r.members)
			}
			r.tell()
			if r.locks.Awaited() != len(r.awaited) || r.locks.Len() != len(r.key) {
				t.Fatalf("seed %d: %d events, %d awaited; want %d and %d", seed, r.locks.Len(), r.locks.Awaited(), len(r.key), len(r.awaited))
			}
		}
		// at the end, all goes on and ends
		for pos := range r.blocked {
			r.locks.Back(r.locks.Find(pos))
		}
		for pos := range r.awaited {
			r.locks.Arrive(pos, r.key[pos], int(pos))
		}
		clear(r.blocked)
		clear(r.awaited)
		r.members = append(r.members, "last")
		r.locks.SetMembers(r.members)
		r.tell()
		for r.locks.Len() > 0 {
			before := r.locks.Len()
			for _, m := range r.members {
				for r.take(m) {
				}
			}
			for pos := range r.taken {
				r.settle(pos)
			}
			r.tell()
			if r.locks.Len() == before {
				t.Fatalf("seed %d: %d events are left that nobody is given", seed, before)
			}
		}
	}
}

// TestOlderEventsComeFirst has an event arrive, and be lost or wait for a delay before any member
// had it. Events before it that arrive meanwhile come first. Behind one that a member had, they
// wait.
func TestOlderEventsComeFirst(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		had  bool // a member had it
		then func(l *ordered.Locks[int], item *ordered.Item[int])
		back func(l *ordered.Locks[int], item *ordered.Item[int])
		want []uint64
	}{
		{"lost", false, (*ordered.Locks[int]).Await, arriveAgain, []uint64{5, 7, 8, 9}},
		{"delayed", false, (*ordered.Locks[int]).Block, (*ordered.Locks[int]).Back, []uint64{5, 7, 8, 9}},
		{"refused", true, (*ordered.Locks[int]).Await, arriveAgain, []uint64{8, 5, 7, 9}},
		{"refused with a delay", true, (*ordered.Locks[int]).Block, (*ordered.Locks[int]).Back, []uint64{8, 5, 7, 9}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := ordered.New[int](4)
			l.SetMembers([]string{"m"})
			l.Changes()
			item, _, _ := l.Arrive(8, "k", 8)
			if c.had && l.Take("m") != item {
				t.Fatal("nothing was taken")
			}
			c.then(l, item)
			for _, pos := range []uint64{9, 5, 7} {
				l.Arrive(pos, "k", int(pos))
			}
			c.back(l, item)
			var got []uint64
			for item := l.Take("m"); item != nil; item = l.Take("m") {
				got = append(got, item.Pos())
				l.Settle(item)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %d, want %d", got, c.want)
			}
		})
	}
}

func arriveAgain(l *ordered.Locks[int], item *ordered.Item[int]) {
	l.Arrive(item.Pos(), item.Key(), int(item.Pos()))
}

// TestShed has more events of one key wait than are kept whole.
func TestShed(t *testing.T) {
	t.Parallel()
	l := ordered.New[string](4)
	l.SetMembers([]string{"m"})
	shed := 0
	for pos := range uint64(3_000) {
		if _, kept, s := l.Arrive(pos+1, "hot", "body"); !kept {
			t.Fatal("not kept")
		} else if s {
			shed++
		}
	}
	if shed != 2_000 {
		t.Errorf("%d of 3000 were shed, want 2000", shed)
	}
	for want := uint64(1); want <= 3_000; want++ {
		item := l.Take("m")
		if item == nil || item.Pos() != want || item.Shed != (want > 1_000) {
			t.Fatalf("event %d: %+v", want, item)
		}
		if l.Take("m") != nil {
			t.Fatal("two events of one key")
		}
		l.Restored(item)
		l.Settle(item)
	}
	if _, n := l.Longest(); n != 0 || l.Len() != 0 {
		t.Errorf("%d events of a key are left, %d in all", n, l.Len())
	}
}

// TestPrefer gives members back the slots that they had at the owner before.
func TestPrefer(t *testing.T) {
	t.Parallel()
	l := ordered.New[int](4)
	l.Prefer("b", []int{0, 2})
	l.Prefer("a", []int{1, 2, 3, 9, -1})
	l.SetMembers([]string{"a", "b"})
	got := fmt.Sprint(l.Changes())
	if want := "[{a [1 3]} {b [0 2]}]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestMove lets a slot drain before it moves, and stay when the other member leaves first.
func TestMove(t *testing.T) {
	t.Parallel()
	l := ordered.New[int](1)
	l.SetMembers([]string{"a"})
	l.Changes()
	l.Arrive(1, "k", 1)
	l.Arrive(2, "k", 2)
	held := l.Take("a")
	l.SetMembers([]string{"b"})
	if c := fmt.Sprint(l.Changes()); c != "[{b []}]" {
		t.Errorf("before the last lease has ended: %s", c)
	}
	if l.Take("b") != nil {
		t.Error("b took an event of a slot that is still a's")
	}
	l.Settle(held)
	if c := fmt.Sprint(l.Changes()); c != "[{a []} {b [0]}]" {
		t.Errorf("after the last lease: %s", c)
	}
	if l.Take("a") != nil {
		t.Error("a took an event of a slot that it has lost")
	}
	item := l.Take("b")
	if item == nil || item.Pos() != 2 {
		t.Fatalf("b was given %v", item)
	}
	l.SetMembers([]string{"a"})
	l.SetMembers([]string{"b"})
	l.Settle(item)
	if c := l.Changes(); len(c) != 0 {
		t.Errorf("a slot that stays after all: %v", c)
	}
	l.Leave("b")
	l.SetMembers([]string{"a"})
	if c := fmt.Sprint(l.Changes()); c != "[{a [0]}]" {
		t.Errorf("after b has left: %s", c)
	}
}
