package facade

import "sync"

// headcount counts the connections of each principal, or its requests. It knows no more principals
// than there are of those. Its methods may be called concurrently.
type headcount struct {
	mu    sync.Mutex
	byKey map[string]int
}

// move counts a connection for the principal to instead of from; "" is nobody. It changes nothing and reports false when
// to has most already.
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

// remove ends what move began.
func (h *headcount) remove(from string) { h.move(from, "", NoLimit) }
