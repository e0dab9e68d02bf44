package facade

import (
	"sync"

	"eventhub/acl"
	"eventhub/jetstream"
)

// holders has a jetstream.Holder for each principal that has a subscription, so that each principal
// holds so many events and no more. A nil holders has no limit. Its methods may be called
// concurrently.
type holders struct {
	limit   int
	reached func()

	mu    sync.Mutex
	byKey map[string]*holding
}

// holding is the Holder of one principal.
type holding struct {
	*jetstream.Holder
	users int // subscriptions
}

func newHolders(limit int, reached func()) *holders {
	if limit == NoLimit {
		return nil
	}
	return &holders{limit: limit, reached: reached, byKey: make(map[string]*holding)}
}

// enter returns the Holder of the principal for one subscription, and what ends its use, once.
func (h *holders) enter(key string) (_ *jetstream.Holder, leave func()) {
	if h == nil {
		return nil, func() {}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	own := h.byKey[key]
	if own == nil {
		own = &holding{Holder: jetstream.NewHolder(h.limit, h.reached)}
		h.byKey[key] = own
	}
	own.users++
	return own.Holder, sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(h.byKey, key)
		}
	})
}

// freeGroups reports whether the groups that the principal makes do not count.
func (s *Server) freeGroups(p Principal) bool {
	id, ok := p.(*acl.Identity)
	return ok && !id.Limited() && !s.cfg.Limits.CountOwnToken
}
