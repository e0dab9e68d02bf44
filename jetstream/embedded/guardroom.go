package embedded

import (
	"container/list"
	"net/netip"
)

// Names of the limits of the guard, for Config.LimitReached.
const (
	limitClients   = "native_connections"
	limitStrangers = "native_strangers"
)

// addressPart is which part of the strangers may come from one address, as a divisor.
const addressPart = 4

// guardRoom counts the connections of a guard. Strangers are those that have not been admitted. One
// more than may be there, in all or of one address (of IPv6, of one /64), closes the oldest, so
// that strangers displace one another only. It is not safe for concurrent use.
type guardRoom struct {
	clients, strangers int // limits

	all       int
	order     *list.List                  // of the strangers, oldest first
	addresses map[netip.Prefix]*list.List // the same by address
}

// guardPlace is where a connection is in the room.
type guardPlace struct {
	from      netip.Prefix
	order     *list.Element // nil when admitted
	ofAddress *list.Element
	left      bool
}

func newGuardRoom(clients, strangers int) guardRoom {
	return guardRoom{clients: clients, strangers: strangers, order: list.New(), addresses: make(map[netip.Prefix]*list.List)}
}

// enter takes a stranger in. It returns the connection to close for it, if any, which is the new
// one when all clients have been admitted, and the limit.
func (r *guardRoom) enter(c *guarded) (over *guarded, limit string) {
	address, _ := netip.ParseAddr(c.address) // the zero Addr is an address, too
	address = address.Unmap().WithZone("")
	bits := 64
	if address.Is4() {
		bits = 32
	}
	c.place.from, _ = address.Prefix(bits)
	same := r.addresses[c.place.from]
	switch {
	case same != nil && same.Len() >= max(r.strangers/addressPart, 1):
		over, limit = oldestOf(same), limitStrangers
	case r.order.Len() >= r.strangers:
		over, limit = oldestOf(r.order), limitStrangers
	case r.all >= r.clients && r.order.Len() > 0:
		over, limit = oldestOf(r.order), limitClients
	case r.all >= r.clients:
		return c, limitClients
	}
	if over != nil {
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

// admit makes a stranger a client.
func (r *guardRoom) admit(c *guarded) {
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

// leave ends the counting of a connection. It may be called again.
func (r *guardRoom) leave(c *guarded) {
	if c.place.left {
		return
	}
	r.admit(c)
	c.place.left = true
	r.all--
}
