package facade

import "sync"

// headcount counts the connections of each principal. It knows no more principals than there are of
// those. Its methods may be called concurrently.
type headcount struct {
	mu    sync.Mutex
	byKey map[string]int
}

// move counts a connection for the principal to instead of for from; "" is no principal. It changes
// nothing and returns false when to has reached limit.
func (h *headcount) move(from, to string, limit int) bool {
	if from == to {
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if to != "" {
		if limit != NoLimit && h.byKey[to] >= limit {
			return false
		}
		h.byKey[to]++
	}
	if from != "" {
		if h.byKey[from]--; h.byKey[from] == 0 {
			delete(h.byKey, from)
		}
	}
	return true
}

// remove stops counting a connection for the principal from.
func (h *headcount) remove(from string) { h.move(from, "", NoLimit) }
