package jetstream

import "sync"

// settledKnown ("settled_known") is how many settlements by handle a hub remembers, so that one may
// be repeated. After that, a repetition gets ErrNotLeased.
const settledKnown = 1 << 16

// leaseTable has the leases of this hub that clients know by a handle. It is bounded by the leases
// that there are, and settledKnown. Its methods may be called concurrently.
type leaseTable struct {
	// settling is held while a delivery is settled, so that a repetition at the same moment learns
	// how that went. It is locked before the locks of subscriptions.
	settling sync.Mutex

	mu      sync.Mutex // locked after those
	live    map[uint64]*Delivery
	settled map[uint64]SettleOp
	order   []uint64 // of settled, as a ring
	next    int
}

// add files a lease that has begun.
func (t *leaseTable) add(d *Delivery) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.live[d.handle] = d
}

// drop removes a lease that has ended.
func (t *leaseTable) drop(handle uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.live, handle)
}

// find returns the lease of a handle, or nil and how it was settled, if that is known.
func (t *leaseTable) find(handle uint64) (*Delivery, SettleOp) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.live[handle], t.settled[handle]
}

// remember notes how a lease was settled.
func (t *leaseTable) remember(handle uint64, op SettleOp) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.order) < settledKnown {
		t.order = append(t.order, handle)
	} else {
		delete(t.settled, t.order[t.next])
		t.order[t.next] = handle
		t.next = (t.next + 1) % settledKnown
	}
	t.settled[handle] = op
}

// settle settles a lease of this hub by the rules of its Delivery. It reports false when there is
// no such lease, and it was not settled in this way before.
func (t *leaseTable) settle(handle uint64, what Settlement) bool {
	t.settling.Lock()
	defer t.settling.Unlock()
	d, before := t.find(handle)
	if d == nil {
		return before == what.Op && before != SettleExtend
	}
	ok := false
	switch what.Op {
	case SettleAck:
		ok = d.Ack() == nil
	case SettleNack:
		ok = d.Nack(what.Reason, what.Delay) == nil
	case SettleExtend:
		return d.Extend(what.Extend) == nil
	}
	if ok {
		t.remember(handle, what.Op)
	}
	return ok
}
