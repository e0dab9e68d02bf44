package facade

import (
	"container/list"
	"sync"
)

// strangers are the sessions without a successful AUTH, in the order in which they became so. There are at most most of
// them: one more ends the oldest, so that those who never authenticate shut nobody out. Its methods may be called
// concurrently.
type strangers struct {
	most int

	mu    sync.Mutex
	all   list.List
	known map[*session]*list.Element
}

func newStrangers(most int) *strangers {
	return &strangers{most: most, known: make(map[*session]*list.Element)}
}

// add takes a session in, and returns the one that has to go for it, or nil.
func (s *strangers) add(n *session) (oldest *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known[n] != nil {
		return nil
	}
	if s.all.Len() >= s.most {
		oldest, _ = s.all.Remove(s.all.Front()).(*session)
		delete(s.known, oldest)
	}
	s.known[n] = s.all.PushBack(n)
	return oldest
}

// remove forgets a session that authenticated, or ended.
func (s *strangers) remove(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.known[n]; e != nil {
		s.all.Remove(e)
		delete(s.known, n)
	}
}
