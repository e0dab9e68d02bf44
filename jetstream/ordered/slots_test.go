package ordered_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"eventhub/jetstream/ordered"
)

// TestSlot pins the slots of some keys: other languages, and keys that were hashed by an older hub,
// depend on them.
func TestSlot(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]int{"a": 31, "local:stt:1234": 8, "é": 19} {
		if got := ordered.Slot(key, 64); got != want {
			t.Errorf("slot of %q: %d, want %d", key, got, want)
		}
	}
}

// TestSlotSpread checks that slots have about as many keys each, and that one slot more moves no
// key between the others.
func TestSlotSpread(t *testing.T) {
	t.Parallel()
	const keys = 64_000
	count := make([]int, 64)
	for i := range keys {
		key := fmt.Sprintf("key-%d", i)
		slot := ordered.Slot(key, 64)
		count[slot]++
		if more := ordered.Slot(key, 65); more != slot && more != 64 {
			t.Fatalf("%s moved from slot %d to %d, want 64", key, slot, more)
		}
	}
	for slot, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("slot %d has %d of %d keys", slot, n, keys)
		}
	}
}

// TestAssign changes the members at random. All slots have a member, no member has two slots more
// than another, and a member more or less moves no more slots than its share.
func TestAssign(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		slots := 1 + r.IntN(128)
		now := make([]string, slots)
		var members []string
		for step := range 40 {
			before := len(members)
			if before > 0 && r.IntN(3) == 0 {
				i := r.IntN(before)
				members = slices.Delete(members, i, i+1)
			} else {
				members = append(members, fmt.Sprintf("member-%d-%d", seed, step))
			}
			to := ordered.Assign(now, members)
			if len(members) > 0 {
				check(t, to, members)
			}
			moved := 0
			for i := range to {
				if to[i] != now[i] {
					moved++
				}
			}
			if n := max(before, len(members)); min(before, len(members)) > 0 && moved > (slots+n-1)/n {
				t.Fatalf("seed %d: %d to %d members moved %d of %d slots", seed, before, len(members), moved, slots)
			}
			now = to
		}
	}
}

func check(t *testing.T, to, members []string) {
	t.Helper()
	count := make(map[string]int)
	for slot, m := range to {
		if !slices.Contains(members, m) {
			t.Fatalf("slot %d has the member %q", slot, m)
		}
		count[m]++
	}
	least, most := len(to), 0
	for _, m := range members {
		least, most = min(least, count[m]), max(most, count[m])
	}
	if most-least > 1 {
		t.Fatalf("members have %d to %d slots", least, most)
	}
}

// TestNinthMember is the case of the protocol: 8 of 64 slots at most.
func TestNinthMember(t *testing.T) {
	t.Parallel()
	members := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	before := ordered.Assign(make([]string, 64), members)
	after := ordered.Assign(before, append(members, "i"))
	moved := 0
	for i := range after {
		if after[i] != before[i] {
			moved++
			if after[i] != "i" {
				t.Errorf("slot %d moved from %s to %s", i, before[i], after[i])
			}
		}
	}
	if moved == 0 || moved > 8 {
		t.Errorf("%d slots moved, want 1 to 8", moved)
	}
}
