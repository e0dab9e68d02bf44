package eventhub

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
)

func castOfNumber(n int, key string, snapshot bool, size int) castItem {
	pos := strconv.Itoa(n)
	return castItem{kind: castEvent, size: size, before: strconv.Itoa(n - 1), pos: pos, event: &BroadcastEvent{Event: Event{Key: key}, Pos: pos, Snapshot: snapshot}}
}

// drained are the items of a queue, in short.
func drained(q *castQueue) (all []string) {
	for item, ok := q.pop(); ok; item, ok = q.pop() {
		switch item.kind {
		case castEvent:
			all = append(all, item.pos)
		case castGap:
			all = append(all, fmt.Sprint(item.gap))
		case castReset:
			all = append(all, item.reset.Reason)
		case castSnapshot:
			all = append(all, "end "+item.pos)
		case castPresence:
			all = append(all, strconv.Itoa(item.presence.Count))
		}
	}
	if q.waiting != 0 || q.size != 0 || q.snapped != 0 || q.snapSize != 0 || len(q.byKey) != 0 || q.attendance != nil {
		all = append(all, fmt.Sprintf("an empty queue counts %+v", q))
	}
	return all
}

func TestTheQueueOfABroadcastKeepsItsBoundsAndAccountsForWhatItLeavesOut(t *testing.T) {
	t.Parallel()
	want := func(q *castQueue, all ...string) {
		t.Helper()
		if got := drained(q); !slices.Equal(got, all) {
			t.Errorf("got %q, want %q", got, all)
		}
	}
	q := &castQueue{events: 3, bytes: 100, keys: 2}
	added := []bool{
		q.add(castOfNumber(1, "", true, 1)), q.add(castOfNumber(2, "", true, 1)), !q.add(castOfNumber(3, "", true, 1)),
		q.add(castItem{kind: castPresence, presence: Presence{Count: 1}}), q.add(castItem{kind: castPresence, presence: Presence{Count: 2}}),
		q.add(castItem{kind: castReset, reset: Reset{Reason: "a"}}), q.add(castItem{kind: castReset, reset: Reset{Reason: "b"}}),
		q.add(castOfNumber(4, "", false, 1)), !q.add(castOfNumber(5, "", false, 1)),
	}
	if slices.Contains(added, false) {
		t.Error(added)
	}
	q.skip()
	q.addGap(Gap{From: "4", To: "9", Missed: 5})
	want(q, "1", "2", "2", "b", "{3 9 6}")

	// What nobody knows stays unknown, and gaps that alternate with resets do not pile up.
	q.addGap(Gap{From: "1", To: "2"})
	q.addGap(Gap{From: "2", To: "4", Missed: 2})
	want(q, "{1 4 0}")
	for i := range 100 {
		q.add(castItem{kind: castReset, reset: Reset{Reason: strconv.Itoa(i)}})
		q.addGap(Gap{From: strconv.Itoa(i), To: strconv.Itoa(i + 1), Missed: 1})
		if q.items.Len() > 4 {
			t.Fatalf("%d items", q.items.Len())
		}
	}
	missed := uint64(0)
	for item, ok := q.pop(); ok; item, ok = q.pop() {
		missed += item.gap.Missed
	}
	if missed != 100 {
		t.Errorf("the gaps have %d events, want 100", missed)
	}

	// Bytes count, but a single event always fits. A newer event of a key takes its place.
	q = &castQueue{events: 10, bytes: 100, keys: 2, conflate: true}
	if !q.add(castOfNumber(1, "", false, 1000)) || q.add(castOfNumber(2, "", false, 1)) {
		t.Error("the bytes do not count")
	}
	q.clear()
	if !q.add(castOfNumber(1, "k", false, 60)) || !q.add(castOfNumber(2, "j", false, 10)) || !q.add(castOfNumber(3, "k", false, 60)) {
		t.Error("an event does not make room for the next of its key")
	}
	want(q, "2", "3")
	q.add(castOfNumber(1, "k", true, 1))
	q.add(castItem{kind: castSnapshot, pos: "1"})
	q.add(castOfNumber(2, "k", false, 1))
	want(q, "1", "end 1", "2") // the snapshot keeps its events
	q.add(castOfNumber(1, "k", false, 1))
	q.add(castItem{kind: castPresence, presence: Presence{Count: 7}})
	q.forget()
	want(q, "7")
}
