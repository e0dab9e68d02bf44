package jetstream

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// fewUnread is how many events a subscription that has none may ask for, unless its Holder has
	// twice the events that it may.
	fewUnread = 100
	// wakePause is how long a Holder rests for each subscription that it wakes, so that a client
	// that settles one event at a time does not have thousands of subscriptions woken for each.
	wakePause = 10 * time.Microsecond
)

// HolderLimits are the limits of a Holder. 0 is no limit.
type HolderLimits struct {
	// Held is the most events that are handed out: from when the event is handed to the subscriber
	// until it is settled or given back. At the limit, events wait in the stream or go to
	// other members, and a subscription goes on when the Holder has a place again.
	Held int
	// Unread is the most events that are fetched and that no subscriber has begun, those that are
	// being given back included. At the limit, subscriptions that have some fetch no more. Others
	// may exceed the limit by up to 100 events each, and at twice the limit by one event each.
	Unread int
}

// Holder limits how many events several subscriptions hold together: those of one client, for
// example. NewHolder makes one; it must not be copied.
type Holder struct {
	limits   HolderLimits
	reached  func(limit string)
	held     atomic.Int64
	unread   atomic.Int64
	reserved atomic.Int64 // asked for beyond fewUnread, and not arrived
	waiters  atomic.Int64 // len(waiting)
	returns  returns

	mu      sync.Mutex
	waiting map[*Subscription]struct{} // for a place
	waking  bool
}

// Names of the limits of a Holder, as it reports them.
const (
	LimitHeld   = "principal_held"
	LimitUnread = "principal_unread"
)

// NewHolder makes a Holder. reached, if not nil, is called with LimitHeld when an event has to
// wait, and with LimitUnread when a subscription fetches no more. It is called with locks held and
// must not block.
func NewHolder(limits HolderLimits, reached func(limit string)) *Holder {
	if reached == nil {
		reached = func(string) {}
	}
	h := &Holder{limits: limits, reached: reached, waiting: make(map[*Subscription]struct{})}
	h.returns.rate = 2 * limits.Unread // all that is held is given back within a second
	return h
}

// take takes a place for an event of s. If there is none, s is woken when there is one.
func (h *Holder) take(s *Subscription) bool {
	if h == nil || h.try() {
		return true
	}
	h.await(s)
	if h.try() { // a place may have become free before s was known to wait
		return true
	}
	h.reached(LimitHeld)
	return false
}

func (h *Holder) try() bool {
	if h.limits.Held == 0 {
		return true
	}
	for {
		n := h.held.Load()
		if n >= int64(h.limits.Held) {
			return false
		}
		if h.held.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// room returns how many of n events have a place. If there is none, s is woken when there is one.
func (h *Holder) room(s *Subscription, n int) int {
	if h == nil || h.limits.Held == 0 {
		return n
	}
	left := h.limits.Held - int(h.held.Load())
	if left <= 0 {
		h.await(s)
		left = h.limits.Held - int(h.held.Load())
	}
	return min(n, left)
}

// full reports whether subscriptions that have something may fetch no more. A subscription that has
// nothing always fetches a little, so that subscribers that take nothing stop no others.
func (h *Holder) full() bool {
	if h == nil || h.limits.Unread == 0 || h.unread.Load() < int64(h.limits.Unread) {
		return false
	}
	h.reached(LimitUnread)
	return true
}

// fetchable returns how many of n events a subscription may ask for that has asked for some: one at
// least, so that each of its topics has its turn.
func (h *Holder) fetchable(n, asked int) int {
	if h == nil || h.limits.Unread == 0 {
		return n
	}
	unread, few := int(h.unread.Load()), fewUnread-asked
	if unread >= 2*h.limits.Unread {
		few = 1
	}
	// Half of what is left: others may want to ask, too.
	left := (h.limits.Unread - unread - int(h.reserved.Load())) / 2
	return min(n, max(left, few, 1))
}

// reserve notes how many events s has asked for. s.mu is held.
func (h *Holder) reserve(s *Subscription) {
	if h == nil {
		return
	}
	if n := max(s.requested-fewUnread, 0); n != s.reserved {
		h.reserved.Add(int64(n - s.reserved))
		s.reserved = n
	}
}

// occupy takes n places for events that are being given back, or returns them with less than 0.
func (h *Holder) occupy(n int) {
	if h != nil {
		h.held.Add(int64(n))
	}
}

// queue is where events are given back.
func (h *Holder) queue(b *Bus) *returns {
	if h == nil {
		return &b.returns
	}
	return &h.returns
}

// Idle reports whether the Holder holds nothing and gives nothing back.
func (h *Holder) Idle() bool { return h.held.Load() == 0 && h.unread.Load() == 0 }

// count counts events that are not begun.
func (h *Holder) count(n int) {
	if h != nil {
		h.unread.Add(int64(n))
	}
}

func (h *Holder) await(s *Subscription) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting[s] = struct{}{}
	h.waiters.Store(int64(len(h.waiting)))
}

// leave ends the wait of a subscription that ends.
func (h *Holder) leave(s *Subscription) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.waiting, s)
	h.waiters.Store(int64(len(h.waiting)))
}

// release gives a place back, and wakes those that wait for one. It does not block.
func (h *Holder) release(b *Bus) {
	if h == nil || h.limits.Held == 0 {
		return
	}
	h.held.Add(-1)
	if h.waiters.Load() == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.waking || len(h.waiting) == 0 {
		return
	}
	pause := time.Duration(len(h.waiting)) * wakePause
	// The caller holds the lock of a subscription, so that others are woken apart.
	h.waking = b.conn.Start(func() { h.wake(b, pause) })
}

// wake wakes all that wait, after a pause.
func (h *Holder) wake(b *Bus, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-b.conn.Ctx.Done():
	}
	h.mu.Lock()
	waiting := h.waiting
	h.waiting = make(map[*Subscription]struct{})
	h.waiters.Store(0)
	h.waking = false
	h.mu.Unlock()
	for s := range waiting {
		s.mu.Lock()
		s.refill()
		s.mu.Unlock()
		s.advance()
	}
}
