package jetstream

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
)

// subscriptionRegistry has the open subscriptions of the hub, and counts what they hold. Its
// methods may be called concurrently.
type subscriptionRegistry struct {
	*core
	streams *streams.Streams

	mu    sync.Mutex
	all   map[*Subscription]struct{} // nil once the bus closes
	count atomic.Int64
	held  atomic.Int64 // bytes that all subscriptions hold
}

func newSubscriptionRegistry(c *core, s *streams.Streams) *subscriptionRegistry {
	return &subscriptionRegistry{core: c, streams: s, all: make(map[*Subscription]struct{})}
}

// reserve refuses a subscription before anything is made for it. register looks again.
func (r *subscriptionRegistry) reserve() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.checkSubscriptionLimit()
}

func (r *subscriptionRegistry) checkSubscriptionLimit() error {
	if r.all == nil {
		return event.ErrClosed
	}
	if len(r.all) >= r.limits.Subscriptions {
		r.obs.LimitReached("subscriptions")
		return &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("this hub has %d subscriptions open, which is its limit", r.limits.Subscriptions)}
	}
	return nil
}

// register makes a finished subscription known to those who end and restart subscriptions.
func (r *subscriptionRegistry) register(s *Subscription) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.checkSubscriptionLimit(); err != nil {
		return err
	}
	r.all[s] = struct{}{}
	r.count.Add(1)
	r.obs.Gauge(event.GaugeSubscriptions, float64(len(r.all)))
	return nil
}

func (r *subscriptionRegistry) unregister(s *Subscription) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, s)
	r.count.Add(-1)
	r.obs.Gauge(event.GaugeSubscriptions, float64(len(r.all)))
}

// eachSubscription calls f for those open now, without holding the lock.
func (r *subscriptionRegistry) eachSubscription(f func(*Subscription)) {
	r.mu.Lock()
	subs := make([]*Subscription, 0, len(r.all))
	for s := range r.all {
		subs = append(subs, s)
	}
	r.mu.Unlock()
	for _, s := range subs {
		f(s)
	}
}

// lastSubscriptions returns those open now and lets no other begin.
func (r *subscriptionRegistry) lastSubscriptions() []*Subscription {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := make([]*Subscription, 0, len(r.all))
	for s := range r.all {
		if s.keeper == nil { // those end with their ordering
			last = append(last, s)
		}
	}
	r.all = nil
	return last
}

// topicDeleted has this hub forget a stream that is deleted, and its members look.
func (r *subscriptionRegistry) topicDeleted(name string, created time.Time) {
	s := r.streams.Stream(name)
	if s != nil && s.Created.Equal(created) {
		r.streams.Forget(s)
	}
	r.eachSubscription(func(s *Subscription) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, m := range s.members {
			if at := m.group.topic.Stream; at.Name == name && at.Created.Equal(created) {
				at.Deleted.Store(true)
				m.reattach(true)
			}
		}
	})
}

// groupMoved tells this hub's members of a group that the group was moved.
func (r *subscriptionRegistry) groupMoved(key string, g *records.Generation) {
	r.eachSubscription(func(s *Subscription) { s.moved(key, g) })
}

// pullBytes is the most that one pull may bring: a subscription's share of what the hub may hold.
func (r *subscriptionRegistry) pullBytes() int {
	share := r.limits.HeldTotal / int(max(r.count.Load(), 1))
	return min(max(share, minPull), r.limits.HeldBytes)
}
