package facade

import "sync"

// share is memory, or places, that principals share, of which none has more than its own part.
// Where less than a quarter of all is free, none has more than is free, so that several together
// leave something to the others: n principals that take what they get have a part of n + 1 each. A
// share whose own part is all of it has no such rule. It knows only principals that hold some. Its
// methods may be called concurrently.
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

// take reports whether there is n more for the principal, and counts n if so. mine reports that the
// principal's own part is what is used up.
func (s *share) take(key string, n int) (ok, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	own, free := s.byKey[key]+n, s.all-s.used-n
	switch {
	case own > s.own:
		return false, true
	case free < 0:
		return false, false
	case s.own < s.all && 4*free < s.all && own > max(free, 1):
		return false, true
	}
	s.used += n
	s.byKey[key] = own
	return true, false
}

// give returns n that take counted.
func (s *share) give(key string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.used -= n
	if s.byKey[key] -= n; s.byKey[key] == 0 {
		delete(s.byKey, key)
	}
}
