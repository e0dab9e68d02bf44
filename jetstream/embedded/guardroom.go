package embedded

import (
	"container/list"
	"net/netip"
	"time"
)

// Names of the limits of the guard, for Config.LimitReached.
const (
	limitClients   = "native_connections"
	limitStrangers = "native_strangers"
	limitMessages  = "native_messages"
	limitRequests  = "native_requests"
	limitSettles   = "native_settles"
	limitBytes     = "native_bytes"
)

// addressPart is which part of the strangers may come from one address, as a divisor.
const addressPart = 4

// fairWait is how long a stranger may wait in a full room before a new one may replace it. Honest
// clients need less.
const fairWait = time.Second

// guardRoom counts the connections of a guard. Strangers are those whose CONNECT has not come. One
// more than may be there, in all or of one address (of IPv6, of one /64), closes the oldest if that
// has waited for fairWait, and else is closed itself: strangers displace one another only. Behind
// CONNECT, a connection is the server's, which ends those that are not admitted in time. It is not
// safe for concurrent use.
type guardRoom struct {
	clients, strangers int // limits
	fair               time.Duration

	all       int
	order     *list.List                  // of the strangers, oldest first
	addresses map[netip.Prefix]*list.List // the same by address
	owners    map[string]int              // clients that were admitted, by principal
}

// guardPlace is where a connection is in the room.
type guardPlace struct {
	since     time.Time
	from      netip.Prefix
	order     *list.Element // nil when CONNECT has come
	ofAddress *list.Element
	admitted  bool
	owner     string // of one that was admitted
	left      bool
}

func newGuardRoom(clients, strangers int) guardRoom {
	return guardRoom{
		clients: clients, strangers: strangers, fair: fairWait,
		order: list.New(), addresses: make(map[netip.Prefix]*list.List), owners: make(map[string]int),
	}
}

// enter takes a stranger in. It returns the connection to close for it, if any, which may be the
// new one, and the limit.
func (r *guardRoom) enter(c *guarded, now time.Time) (over *guarded, limit string) {
	address, _ := netip.ParseAddr(c.address) // the zero Addr is an address, too
	address = address.Unmap().WithZone("")
	bits := 64
	if address.Is4() {
		bits = 32
	}
	c.place.since = now
	c.place.from, _ = address.Prefix(bits)
	same := r.addresses[c.place.from]
	switch {
	case same != nil && same.Len() >= max(r.strangers/addressPart, 1):
		over, limit = oldestOf(same), limitStrangers
	case r.order.Len() >= r.strangers:
		over, limit = oldestOf(r.order), limitStrangers
	case r.all < r.clients:
	case r.order.Len() > 0:
		over, limit = oldestOf(r.order), limitClients
	default:
		return c, limitClients
	}
	if over != nil {
		if now.Sub(over.place.since) < r.fair {
			return c, limit
		}
		r.leave(over)
	}
	if same = r.addresses[c.place.from]; same == nil {
		same = list.New()
		r.addresses[c.place.from] = same
	}
	r.all++
	c.place.order, c.place.ofAddress = r.order.PushBack(c), same.PushBack(c)
	return over, limit
}

func oldestOf(l *list.List) *guarded {
	c, _ := l.Front().Value.(*guarded)
	return c
}

// connected ends the counting of a connection among the strangers: its CONNECT has come.
func (r *guardRoom) connected(c *guarded) {
	if c.place.order == nil {
		return
	}
	r.order.Remove(c.place.order)
	same := r.addresses[c.place.from]
	if same.Remove(c.place.ofAddress); same.Len() == 0 {
		delete(r.addresses, c.place.from)
	}
	c.place.order, c.place.ofAddress = nil, nil
}

// admit makes a connection that of a principal. It reports false beyond three quarters of all
// clients.
func (r *guardRoom) admit(c *guarded, owner string) bool {
	if c.place.left || r.owners[owner] >= (3*r.clients+3)/4 {
		return false
	}
	c.place.admitted, c.place.owner = true, owner
	r.owners[owner]++
	return true
}

// leave ends the counting of a connection. It may be called again.
func (r *guardRoom) leave(c *guarded) {
	if c.place.left {
		return
	}
	r.connected(c)
	c.place.left = true
	r.all--
	if owner := c.place.owner; c.place.admitted {
		if r.owners[owner]--; r.owners[owner] == 0 {
			delete(r.owners, owner)
		}
	}
}
