package jetstream

import (
	"sync"
	"sync/atomic"
)

// Holder limits how many events several subscriptions hold together: those of one client, for
// example. An event counts from when it is handed to the subscriber until it is settled, given back
// or lost. At the limit, events wait in the stream or go to other members, and a subscription goes
// on when the Holder has a place again. NewHolder makes one; it must not be copied.
type Holder struct {
	limit   int64
	reached func()
	held    atomic.Int64
	waiters atomic.Int64 // len(waiting)

	mu      sync.Mutex
	waiting map[*Subscription]struct{} // for a place
}

// NewHolder makes a Holder for limit events, which must be above 0. reached, if not nil, is called
// when an event has to wait. It is called with locks held and must not block.
func NewHolder(limit int, reached func()) *Holder {
	return &Holder{limit: int64(limit), reached: reached, waiting: make(map[*Subscription]struct{})}
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
	if h.reached != nil {
		h.reached()
	}
	return false
}

func (h *Holder) try() bool {
	for {
		n := h.held.Load()
		if n >= h.limit {
			return false
		}
		if h.held.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// room returns how many of n events have a place. If there is none, s is woken when there is one.
func (h *Holder) room(s *Subscription, n int) int {
	if h == nil {
		return n
	}
	left := h.limit - h.held.Load()
	if left <= 0 {
		h.await(s)
		left = h.limit - h.held.Load()
	}
	return int(min(int64(n), left))
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
	if h == nil {
		return
	}
	h.held.Add(-1)
	if h.waiters.Load() == 0 {
		return
	}
	h.mu.Lock()
	waiting := h.waiting
	h.waiting = make(map[*Subscription]struct{})
	h.waiters.Store(0)
	h.mu.Unlock()
	// not here: the caller holds the lock of a subscription
	b.wg.Go(func() {
		for s := range waiting {
			s.mu.Lock()
			s.refill()
			s.mu.Unlock()
			s.advance()
		}
	})
}
