package ordered

import "slices"

// maxWhole is how many events of one key that wait behind another keep what they hold. Of those
// beyond, Arrive says that only the place is to be kept.
const maxWhole = 1_000

// NoSlot is the slot of events without a key.
const NoSlot = -1

// Item is an event that a Locks knows. Its fields belong to the Locks; Body is the caller's.
type Item[T any] struct {
	// Body is what Arrive was given last.
	Body T
	// Shed says that the caller was told to keep only the place of the event.
	Shed bool

	pos    uint64
	key    *lane[T]
	state  state
	member *holder[T] // who has it
	had    bool       // a member has it, or has had it
}

// Pos is the place of the event in the order of its key.
func (i *Item[T]) Pos() uint64 { return i.pos }

// Slot is the slot of the event's key, or NoSlot.
func (i *Item[T]) Slot() int { return i.key.slot }

// Key is the event's key, or "".
func (i *Item[T]) Key() string { return i.key.name }

// Member is the member that has the event, or "".
func (i *Item[T]) Member() string {
	if i.member == nil {
		return ""
	}
	return i.member.name
}

// state is what an event does.
type state uint8

const (
	parked  state = iota // it is here, and waits
	taken                // a member has it
	blocked              // it is here, and is not to be handed out
	awaited              // it is to arrive again
	gone                 // it is settled
)

// lane is the queue of one key, in order. Only its first event may be taken.
type lane[T any] struct {
	name   string
	slot   int
	items  []*Item[T]
	whole  int  // items that are not shed
	queued bool // in the queue of its slot
}

// ready reports whether the first event may be taken.
func (l *lane[T]) ready() bool { return len(l.items) > 0 && l.items[0].state == parked }

// holder is a member.
type holder[T any] struct {
	name  string
	work  []*slot[T] // those of its slots that have keys to take from
	turns int
	tell  bool // its slots have changed
}

// slot has the keys of a slot, and the member that gets them.
type slot[T any] struct {
	number int
	owner  *holder[T] // nil: none
	next   string     // the member that it is to go to; "" for none
	taken  int        // events of it that a member has
	ready  []*lane[T]
	queued bool // in the work of its owner
}

// moving reports whether the slot waits for its last lease to end.
func (s *slot[T]) moving() bool { return s.owner != nil && s.owner.name != s.next }

// Locks are the keys of one ordered group, and the events that wait for them: of each key, one
// event at a time is taken, in the order of places, by the member that has the slot of the key.
// Events without a key are anybody's. A Locks is not safe for concurrent use.
type Locks[T any] struct {
	slots   []slot[T]
	members map[string]*holder[T]
	lanes   map[string]*lane[T]
	items   map[uint64]*Item[T]
	free    []*lane[T] // events without a key, which have a lane each
	waiting int        // items in state awaited
	changed bool       // the slots of a member have changed
}

// New returns Locks without events and members.
func New[T any](slots int) *Locks[T] {
	l := &Locks[T]{slots: make([]slot[T], slots), members: make(map[string]*holder[T]), lanes: make(map[string]*lane[T]), items: make(map[uint64]*Item[T])}
	for i := range l.slots {
		l.slots[i].number = i
	}
	return l
}

// Len is the number of events, those that are to arrive again included.
func (l *Locks[T]) Len() int { return len(l.items) }

// Awaited is the number of events that are to arrive again.
func (l *Locks[T]) Awaited() int { return l.waiting }

// Find returns the event at a place, or nil.
func (l *Locks[T]) Find(pos uint64) *Item[T] { return l.items[pos] }

// Each calls f with all events, in no order. f must not change the Locks.
func (l *Locks[T]) Each(f func(*Item[T])) {
	for _, item := range l.items {
		f(item)
	}
}

// Longest returns the key with the most events, and how many these are.
func (l *Locks[T]) Longest() (key string, events int) {
	for name, lane := range l.lanes {
		if len(lane.items) > events {
			key, events = name, len(lane.items)
		}
	}
	return key, events
}

// Arrive takes an event in. An event that is known is not taken twice: it gets the body, unless a
// member has it, or it is blocked; then kept is false. shed says that the caller is to keep no more
// than the place of the event.
func (l *Locks[T]) Arrive(pos uint64, key string, body T) (item *Item[T], kept, shed bool) {
	if item := l.items[pos]; item != nil {
		switch item.state {
		case taken, blocked:
			return item, false, false
		case awaited:
			l.waiting--
			item.state = parked
		case parked, gone:
		}
		item.Body = body
		if item.Shed {
			item.Shed = false
			item.key.whole++
		}
		l.offer(item.key)
		return item, true, false
	}
	lane := l.lane(key)
	item = &Item[T]{Body: body, pos: pos, key: lane}
	l.items[pos] = item
	// A first event that a member has, or has had and that is to come again, keeps the key. One
	// that no member has had is in order, also while it is to come again: the server delivers the
	// events of a new owner in any order, and may have to deliver some twice.
	from := 0
	if len(lane.items) > 0 && lane.items[0].had && lane.items[0].state != parked {
		from = 1
	}
	at, _ := slices.BinarySearchFunc(lane.items[from:], pos, func(i *Item[T], pos uint64) int {
		if i.pos < pos {
			return -1
		}
		return 1
	})
	at += from
	lane.items = slices.Insert(lane.items, at, item)
	if at > 0 && lane.whole >= maxWhole {
		item.Shed = true
	} else {
		lane.whole++
	}
	l.offer(lane)
	return item, true, item.Shed
}

func (l *Locks[T]) lane(key string) *lane[T] {
	if key == "" {
		return &lane[T]{slot: NoSlot}
	}
	known := l.lanes[key]
	if known == nil {
		known = &lane[T]{name: key, slot: Slot(key, len(l.slots))}
		l.lanes[key] = known
	}
	return known
}

// offer queues the lane where its next event is taken from.
func (l *Locks[T]) offer(lane *lane[T]) {
	if lane.queued || !lane.ready() {
		return
	}
	lane.queued = true
	if lane.slot == NoSlot {
		l.free = append(l.free, lane)
		return
	}
	s := &l.slots[lane.slot]
	s.ready = append(s.ready, lane)
	s.offer()
}

// offer queues the slot at its owner.
func (s *slot[T]) offer() {
	if s.queued || len(s.ready) == 0 || s.owner == nil || s.moving() {
		return
	}
	s.queued = true
	s.owner.work = append(s.owner.work, s)
}

// Take gives the member its next event, or nil. Its keys take turns, slot by slot, and so do events
// without a key.
func (l *Locks[T]) Take(member string) *Item[T] {
	m := l.members[member]
	if m == nil {
		return nil
	}
	m.turns++
	if m.turns%2 == 0 {
		if item := l.takeFree(m); item != nil {
			return item
		}
		return l.takeOwn(m)
	}
	if item := l.takeOwn(m); item != nil {
		return item
	}
	return l.takeFree(m)
}

func (l *Locks[T]) takeFree(m *holder[T]) *Item[T] {
	for len(l.free) > 0 {
		lane := l.free[0]
		l.free = l.free[1:]
		lane.queued = false
		if lane.ready() {
			return l.take(m, lane)
		}
	}
	return nil
}

func (l *Locks[T]) takeOwn(m *holder[T]) *Item[T] {
	for len(m.work) > 0 {
		s := m.work[0]
		m.work = m.work[1:]
		s.queued = false
		if s.owner != m || s.moving() {
			continue
		}
		for len(s.ready) > 0 {
			lane := s.ready[0]
			s.ready = s.ready[1:]
			lane.queued = false
			if lane.ready() {
				s.offer()
				return l.take(m, lane)
			}
		}
	}
	return nil
}

func (l *Locks[T]) take(m *holder[T], lane *lane[T]) *Item[T] {
	item := lane.items[0]
	item.state, item.member, item.had = taken, m, true
	if lane.slot != NoSlot {
		l.slots[lane.slot].taken++
	}
	return item
}

// release ends a member's hold.
func (l *Locks[T]) release(item *Item[T]) {
	if item.state == taken {
		item.member = nil
		if item.key.slot != NoSlot {
			s := &l.slots[item.key.slot]
			s.taken--
			l.drained(s)
		}
	}
	if item.state == awaited {
		l.waiting--
	}
}

// Settle ends an event: the next one of its key may be taken.
func (l *Locks[T]) Settle(item *Item[T]) {
	if item.state == gone {
		return
	}
	l.release(item)
	item.state = gone
	delete(l.items, item.pos)
	lane := item.key
	if lane.items[0] == item {
		lane.items[0] = nil
		lane.items = lane.items[1:]
	} else {
		at := slices.Index(lane.items, item)
		lane.items = slices.Delete(lane.items, at, at+1)
	}
	if !item.Shed {
		lane.whole--
	}
	if len(lane.items) == 0 && lane.slot != NoSlot {
		delete(l.lanes, lane.name)
	}
	l.offer(lane)
}

// Back ends a member's hold, or a block: the event may be taken again.
func (l *Locks[T]) Back(item *Item[T]) { l.change(item, parked) }

// Block ends a member's hold, and keeps the key: until Back, Await or Settle, no event of it is
// taken.
func (l *Locks[T]) Block(item *Item[T]) { l.change(item, blocked) }

// Await ends a member's hold. The event was given back, and keeps the key until it arrives again.
func (l *Locks[T]) Await(item *Item[T]) {
	l.change(item, awaited)
	var none T
	item.Body = none
}

func (l *Locks[T]) change(item *Item[T], to state) {
	if item.state == gone {
		return
	}
	l.release(item)
	item.state = to
	if to == awaited {
		l.waiting++
	}
	l.offer(item.key)
}

// Restored says that the caller has read again what it did not keep of an event.
func (l *Locks[T]) Restored(item *Item[T]) {
	if item.Shed && item.state != gone {
		item.Shed = false
		item.key.whole++
	}
}

// Shed says that the caller keeps no more than the place of the event.
func (l *Locks[T]) Shed(item *Item[T]) {
	if !item.Shed && item.state != gone {
		item.Shed = true
		item.key.whole--
	}
}

// Owners returns the slots of each member.
func (l *Locks[T]) Owners() map[string][]int {
	slots := make(map[string][]int)
	for i := range l.slots {
		if name := l.slots[i].next; name != "" {
			slots[name] = append(slots[name], i)
		}
	}
	return slots
}

// Has reports whether the member has the event.
func (l *Locks[T]) Has(item *Item[T], member string) bool {
	return item.state == taken && item.member.name == member
}

// A Change is what a member is to be told: all slots that it has from now on.
type Change struct {
	Member string
	Slots  []int
}

// SetMembers sets who may have slots. A member that has left keeps what it has taken, but its slots
// wait for that no longer than others do: see Changes.
func (l *Locks[T]) SetMembers(names []string) {
	for _, name := range names {
		if l.members[name] == nil {
			l.members[name] = &holder[T]{name: name, tell: true}
			l.changed = true
		}
	}
	now := make([]string, len(l.slots))
	for i := range l.slots {
		// a slot that moves is where it goes to already
		now[i] = l.slots[i].next
	}
	for i, to := range Assign(now, names) {
		s := &l.slots[i]
		s.next = to
		l.drained(s)
		s.offer() // it may stay after all
	}
}

// Prefer makes a member the one that has had a slot, when no member has it: of what a member knows
// from before, as little as possible moves.
func (l *Locks[T]) Prefer(member string, slots []int) {
	for _, i := range slots {
		if i >= 0 && i < len(l.slots) && l.slots[i].next == "" && l.slots[i].owner == nil {
			l.slots[i].next = member
		}
	}
}

// Leave forgets a member that holds nothing any more.
func (l *Locks[T]) Leave(member string) {
	m := l.members[member]
	if m == nil {
		return
	}
	delete(l.members, member)
	for i := range l.slots {
		s := &l.slots[i]
		if s.next == member {
			s.next = ""
		}
		if s.owner == m {
			s.owner, s.queued = nil, false
			l.drained(s)
		}
	}
}

// drained moves a slot on when no member has an event of it.
func (l *Locks[T]) drained(s *slot[T]) {
	if s.taken > 0 || s.owner != nil && !s.moving() {
		return
	}
	to := l.members[s.next]
	if s.owner == to {
		return
	}
	l.changed = true
	if s.owner != nil {
		s.owner.tell = true
	}
	s.owner, s.queued = to, false
	if to != nil {
		to.tell = true
		s.offer()
	}
}

// Changes returns the members whose slots have changed since the last call, by name. They are to be
// told before they are given what they take afterwards.
func (l *Locks[T]) Changes() []Change {
	if !l.changed {
		return nil
	}
	l.changed = false
	var told []Change
	for _, m := range l.members {
		if !m.tell {
			continue
		}
		m.tell = false
		c := Change{Member: m.name, Slots: []int{}}
		for i := range l.slots {
			if l.slots[i].owner == m {
				c.Slots = append(c.Slots, i)
			}
		}
		told = append(told, c)
	}
	slices.SortFunc(told, func(a, b Change) int {
		if a.Member < b.Member {
			return -1
		}
		return 1
	})
	return told
}
