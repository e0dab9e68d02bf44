package facade

import "sync"

// share is memory that principals share, of which none has more than its own part. It knows only
// principals that hold some. Its methods may be called concurrently.
type share struct {
	all, own int

	mu    sync.Mutex
	used  int
	byKey map[string]int
}

func newShare(all, own int) *share {
	if own == NoLimit {
		own = all
	}
	return &share{all: all, own: min(own, all), byKey: make(map[string]int)}
}

// take reports whether there are n bytes more for the principal, and counts them if so. mine
// reports that the principal's own part is what is used up.
func (s *share) take(key string, n int) (ok, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.byKey[key]+n > s.own:
		return false, true
	case s.used+n > s.all:
		return false, false
	}
	s.used += n
	s.byKey[key] += n
	return true, false
}

// give returns n bytes that take counted.
func (s *share) give(key string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
	if s.byKey[key] -= n; s.byKey[key] == 0 {
		delete(s.byKey, key)
	}
}
