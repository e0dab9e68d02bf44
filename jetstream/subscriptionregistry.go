package jetstream

import (
	"sync"
	"sync/atomic"
)

// subscriptionRegistry has the open subscriptions of the hub, and counts what they hold. Its
// methods may be called concurrently.
type subscriptionRegistry struct {
	*core
	streams *streams

	mu    sync.Mutex
	all   map[*Subscription]struct{} // nil once the bus closes
	count atomic.Int64
	held  atomic.Int64 // bytes that all subscriptions hold
}

func newSubscriptionRegistry(c *core, s *streams) *subscriptionRegistry {
	return &subscriptionRegistry{core: c, streams: s, all: make(map[*Subscription]struct{})}
}
