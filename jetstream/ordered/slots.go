// Package ordered decides who may have which event of an ordered group: the slots of keys, the
// member of each slot, and the lock of each key. It holds state and nothing else: no clock, no
// goroutine and no connection.
package ordered

import (
	"cmp"
	"slices"
)

// DefaultSlots is the number of slots of a group that does not say otherwise, and MaxSlots the
// largest number.
const (
	DefaultSlots = 64
	MaxSlots     = 1024
)

// Slot returns the slot of a key, 0 to slots-1: the jump hash of Lamping and Veach over the 64-bit
// FNV-1a hash of the key. One slot more moves one key in slots+1.
func Slot(key string, slots int) int {
	return jump(fnv1a(key), slots)
}

// fnv1a is the 64-bit FNV-1a hash; that of hash/fnv allocates.
func fnv1a(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

func jump(key uint64, buckets int) int {
	b, j := int64(-1), int64(0)
	for j < int64(buckets) {
		b = j
		key = key*2862933555777941757 + 1
		j = int64(float64(b+1) * (float64(int64(1)<<31) / float64((key>>33)+1)))
	}
	return int(b)
}

// weight is the weight of a slot at a member, for rendezvous hashing.
func weight(member string, slot int) uint64 {
	x := fnv1a(member) ^ uint64(slot)*0x9e3779b97f4a7c15 //nolint:gosec // a slot is not negative
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Assign returns the member of each slot. now is the member of each slot until then, "" for none;
// members that are not in members have left. All members get the same number of slots, or one more.
//
// Slots stay where they are as far as that allows. So one member more or less moves at most
// ceil(slots/members) slots, with the larger number of members. Of the slots that have to find a
// member, or that one has too many of, the weights of rendezvous hashing decide.
func Assign(now, members []string) []string {
	to := make([]string, len(now))
	if len(members) == 0 {
		return to
	}
	members = slices.Clone(members)
	slices.Sort(members)
	members = slices.Compact(members)
	held := make(map[string][]int, len(members))
	for _, m := range members {
		held[m] = nil
	}
	for slot, m := range now {
		if _, there := held[m]; there {
			held[m] = append(held[m], slot)
		}
	}
	// Those who have the most keep the one slot more.
	byHeld := slices.Clone(members)
	slices.SortStableFunc(byHeld, func(a, b string) int { return cmp.Compare(len(held[b]), len(held[a])) })
	share, more := len(now)/len(members), len(now)%len(members)
	room := make(map[string]int, len(members))
	for i, m := range byHeld {
		room[m] = share
		if i < more {
			room[m]++
		}
		mine := held[m]
		slices.SortFunc(mine, func(a, b int) int { return cmp.Compare(weight(m, b), weight(m, a)) })
		for _, slot := range mine[:min(len(mine), room[m])] {
			to[slot] = m
		}
		room[m] -= min(len(mine), room[m])
	}
	for slot := range to {
		if to[slot] != "" {
			continue
		}
		best, most := "", uint64(0)
		for _, m := range members {
			if w := weight(m, slot); room[m] > 0 && (best == "" || w > most) {
				best, most = m, w
			}
		}
		to[slot] = best
		room[best]--
	}
	return to
}
