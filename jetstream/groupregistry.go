package jetstream

import "sync"

// groupRegistry has the groups of which the hub has members, or inboxes that linger. Its methods
// may be called concurrently.
type groupRegistry struct {
	*core

	mu    sync.Mutex
	byKey map[string]*group // by stream and consumer
	// keeping counts the paths of groups for which something is kept; bounded by what is kept
	keeping map[*group]int
	resting restingGroups // whose last member here has left
}

func newGroupRegistry(c *core) *groupRegistry {
	return &groupRegistry{core: c, byKey: make(map[string]*group), keeping: make(map[*group]int)}
}
