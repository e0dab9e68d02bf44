package jetstream

import (
	"maps"
	"slices"
	"sync"

	"eventhub/jetstream/internal/streams"
)

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

// share returns the group that the hub's members of this consumer have in common. Each call is one
// use, which unshare ends.
func (r *groupRegistry) share(g *group) *group {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.byKey[g.key()]; known != nil && known.created.Equal(g.created) && known.topic.Stream.Created.Equal(g.topic.Stream.Created) {
		known.users++
		known.revision.Store(max(known.revision.Load(), g.revision.Load()))
		if g.ttl.Load() == 0 {
			known.ttl.Store(0)
		}
		return known
	}
	now := r.clock.Now()
	for i := range g.paths {
		g.paths[i].group = g
		g.paths[i].Reset(now)
	}
	g.users, g.members = 1, make(map[*Subscription]struct{})
	r.resting.wake(g)
	if g.slots > 0 && g.ordering == nil {
		g.ordering = newOrderedGroup(g)
	}
	r.byKey[g.key()] = g
	return g
}

// liveGroup is the group on a consumer of that name that has members here; nil if there is none.
func (r *groupRegistry) liveGroup(t *streams.Topic, consumer string) *group {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.byKey[t.Stream.Name+"."+consumer]
	if g == nil || len(g.members) == 0 || !g.topic.Stream.Created.Equal(t.Stream.Created) {
		return nil
	}
	return g
}

// addMember makes a subscription known as a member of the group.
func (r *groupRegistry) addMember(g *group, s *Subscription) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g.members[s] = struct{}{}
}

// countMembers returns how many members of a group with this consumer the hub has.
func (r *groupRegistry) countMembers(t *streams.Topic, consumer string) int {
	if live := r.liveGroup(t, consumer); live != nil {
		return len(r.membersOf(live))
	}
	return 0
}

// membersOf returns the members of the group on this hub.
func (r *groupRegistry) membersOf(g *group) []*Subscription {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(g.members))
}

// reshare adds a use of a group that is in use.
func (r *groupRegistry) reshare(g *group) {
	r.mu.Lock()
	defer r.mu.Unlock()
	g.users++
}

// unshare ends one use of the group, that of member s if it had entered.
func (r *groupRegistry) unshare(g *group, s *Subscription) {
	r.mu.Lock()
	delete(g.members, s)
	left := len(g.members) == 0
	g.users--
	over := g.users == 0 && r.byKey[g.key()] == g
	if over {
		delete(r.byKey, g.key())
	}
	r.mu.Unlock()
	if over {
		r.resting.keep(g)
	}
	if left {
		g.flows("its members have left this consumer")
	}
}

// eachGroup calls f for the groups that have members here, or inboxes that linger, without holding
// the lock.
func (r *groupRegistry) eachGroup(f func(*group)) {
	r.mu.Lock()
	groups := make([]*group, 0, len(r.byKey))
	for _, g := range r.byKey {
		groups = append(groups, g)
	}
	r.mu.Unlock()
	for _, g := range groups {
		f(g)
	}
}

// eachKeeping calls f for the groups that something is kept for, without holding the lock: their
// last member may have ended.
func (r *groupRegistry) eachKeeping(f func(*group)) {
	r.mu.Lock()
	groups := slices.Collect(maps.Keys(r.keeping))
	r.mu.Unlock()
	for _, g := range groups {
		f(g)
	}
}

// keeps counts the paths of a group for which something is kept.
func (r *groupRegistry) keeps(g *group, paths int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keeping[g] += paths; r.keeping[g] == 0 {
		delete(r.keeping, g)
	}
}
