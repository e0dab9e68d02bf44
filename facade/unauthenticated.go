package facade

import (
	"container/list"
	"sync"
)

// unauthenticated are the sessions without a successful AUTH, in the order in which they became
// unauthenticated. There are at most max of them. One more evicts the oldest, so that clients that
// never authenticate lock nobody out. Its methods may be called concurrently.
type unauthenticated struct {
	max int

	mu    sync.Mutex
	all   list.List
	known map[*session]*list.Element
}

func newUnauthenticated(limit int) *unauthenticated {
	return &unauthenticated{max: limit, known: make(map[*session]*list.Element)}
}

// add adds a session. It returns the session that is evicted for it, or nil.
func (s *unauthenticated) add(n *session) (oldest *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.known[n] != nil {
		return nil
	}
	if s.all.Len() >= s.max {
		oldest, _ = s.all.Remove(s.all.Front()).(*session)
		delete(s.known, oldest)
	}
	s.known[n] = s.all.PushBack(n)
	return oldest
}

// remove removes a session that authenticated or ended.
func (s *unauthenticated) remove(n *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.known[n]; e != nil {
		s.all.Remove(e)
		delete(s.known, n)
	}
}
