package eventhub

import "container/list"

// castKind is what an item of a broadcast's queue is.
type castKind int

const (
	castEvent castKind = iota
	castGap
	castReset
	castSnapshot // a snapshot has ended
	castPresence
)

type castItem struct {
	kind castKind

	event       *BroadcastEvent
	size        int
	before, pos string // the places around the event; pos is that of a castSnapshot, too

	gap      Gap
	reset    Reset
	presence Presence
}

// castQueue holds what waits for the handler of a broadcast, in order. The zero value has no room.
type castQueue struct {
	events, bytes int  // the most of them, besides a snapshot
	keys          int  // the most events of a snapshot
	conflate      bool // an event replaces one of its key

	items      list.List // of castItem
	waiting    int       // items besides those of a snapshot
	size       int       // bytes of them
	snapped    int       // events of a snapshot
	snapSize   int
	byKey      map[string]*list.Element // events, if conflate
	attendance *list.Element            // the castPresence that waits
}

// add appends an item. It returns false if there is no room for an event.
func (q *castQueue) add(item castItem) bool {
	if item.kind == castEvent {
		return q.addEvent(item)
	}
	if item.kind == castPresence && q.attendance != nil {
		q.remove(q.attendance) // the newest one counts
	}
	if last := q.items.Back(); last != nil && item.kind == castReset && castOf(last).kind == castReset {
		q.remove(last)
	}
	e := q.push(item)
	if item.kind == castPresence {
		q.attendance = e
	}
	return true
}

func (q *castQueue) addEvent(item castItem) bool {
	if item.event.Snapshot {
		if q.snapped >= q.keys || q.snapSize+item.size > maxSnapshotBytes {
			return false
		}
		q.push(item)
		return true
	}
	key := item.event.Key
	if q.conflate && key != "" {
		if old := q.byKey[key]; old != nil {
			q.remove(old)
		}
	}
	if q.waiting >= q.events || q.waiting > 0 && q.size+item.size > q.bytes {
		return false
	}
	e := q.push(item)
	if q.conflate && key != "" {
		if q.byKey == nil {
			q.byKey = make(map[string]*list.Element)
		}
		q.byKey[key] = e
	}
	return true
}

// addGap appends a gap, or makes the last one longer.
func (q *castQueue) addGap(g Gap) {
	if last := q.items.Back(); last != nil && castOf(last).kind == castGap {
		before := castOf(last).gap
		q.remove(last)
		g = Gap{From: before.From, To: g.To, Missed: sumMissed(before.Missed, g.Missed)}
	}
	q.push(castItem{kind: castGap, gap: g})
	if q.waiting > q.events {
		q.skip()
	}
}

// sumMissed adds numbers of which 0 is not known.
func sumMissed(a, b uint64) uint64 {
	if a == 0 || b == 0 {
		return 0
	}
	return a + b
}

// skip puts one gap in the place of all events and gaps besides those of a snapshot, and leaves the
// last reset.
func (q *castQueue) skip() {
	var whole *Gap
	var reset *list.Element
	for e := q.items.Front(); e != nil; {
		item, next := castOf(e), e.Next()
		part := item.gap
		if item.kind == castEvent {
			part = Gap{From: item.before, To: item.pos, Missed: 1}
		}
		switch {
		case item.kind == castReset:
			if reset != nil {
				q.remove(reset)
			}
			reset = e
		case item.kind == castGap, item.kind == castEvent && !item.event.Snapshot:
			if whole == nil {
				whole = &part
			} else {
				whole.To, whole.Missed = part.To, sumMissed(whole.Missed, part.Missed)
			}
			q.remove(e)
		}
		e = next
	}
	if whole != nil {
		q.push(castItem{kind: castGap, gap: *whole})
	}
}

// forget drops all but the presence.
func (q *castQueue) forget() {
	for e := q.items.Front(); e != nil; {
		next := e.Next()
		if castOf(e).kind != castPresence {
			q.remove(e)
		}
		e = next
	}
}

func (q *castQueue) clear() {
	for q.items.Len() > 0 {
		q.remove(q.items.Front())
	}
}

// pop takes the first item.
func (q *castQueue) pop() (castItem, bool) {
	first := q.items.Front()
	if first == nil {
		return castItem{}, false
	}
	item := *castOf(first)
	q.remove(first)
	return item, true
}

func castOf(e *list.Element) *castItem {
	item, _ := e.Value.(*castItem) // nothing else is put there
	return item
}

func (q *castQueue) push(item castItem) *list.Element {
	q.count(&item, 1)
	return q.items.PushBack(&item)
}

func (q *castQueue) remove(e *list.Element) {
	item := castOf(e)
	q.count(item, -1)
	q.items.Remove(e)
	if e == q.attendance {
		q.attendance = nil
	}
	if item.kind == castEvent && q.byKey[item.event.Key] == e {
		delete(q.byKey, item.event.Key)
	}
}

func (q *castQueue) count(item *castItem, by int) {
	if item.kind == castEvent && item.event.Snapshot {
		q.snapped += by
		q.snapSize += by * item.size
		return
	}
	q.waiting += by
	q.size += by * item.size
}
