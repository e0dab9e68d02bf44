package facade

import (
	"maps"
	"sync"

	"eventhub/acl"
	"eventhub/jetstream"
)

// holders has a jetstream.Holder for each principal that has a subscription, so that each principal
// holds so many events and no more. A nil holders has no limit. Its methods may be called
// concurrently.
type holders struct {
	limits  jetstream.HolderLimits
	reached func(limit string)

	mu    sync.Mutex
	byKey map[string]*holding
	// those of them without a subscription, until all is given back; bounded by what was held
	resting map[string]*holding
}

// holding is the Holder of one principal.
type holding struct {
	*jetstream.Holder
	users int // subscriptions
}

func newHolders(l *Limits, reached func(limit string)) *holders {
	if l.PrincipalHeld == NoLimit && l.PrincipalUnread == NoLimit {
		return nil
	}
	limits := jetstream.HolderLimits{Held: max(l.PrincipalHeld, 0), Unread: max(l.PrincipalUnread, 0)}
	return &holders{limits: limits, reached: reached, byKey: make(map[string]*holding), resting: make(map[string]*holding)}
}

// enter returns the Holder of the principal for one subscription, and what ends its use, once.
func (h *holders) enter(key string) (_ *jetstream.Holder, leave func()) {
	if h == nil {
		return nil, func() {}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.resting, func(key string, own *holding) bool {
		over := own.users == 0 && own.Idle()
		if over {
			delete(h.byKey, key)
		}
		return over || own.users > 0
	})
	own := h.byKey[key]
	if own == nil {
		own = &holding{Holder: jetstream.NewHolder(h.limits, h.reached)}
		h.byKey[key] = own
	}
	own.users++
	return own.Holder, sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if own.users--; own.users == 0 {
			h.resting[key] = own
		}
	})
}

// freeGroups reports whether the groups that the principal makes do not count.
func (s *Server) freeGroups(p Principal) bool {
	id, ok := p.(*acl.Identity)
	return ok && !id.Limited() && !s.cfg.Limits.CountOwnToken
}
