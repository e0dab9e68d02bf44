package facade

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MaxConnectionsListed is the maximum number of connections that Connections returns.
const MaxConnectionsListed = 1000

// Connection describes an open WebSocket connection to operators.
type Connection struct {
	// ID identifies the connection, also among those of other hubs.
	ID string
	// Principal is the Key of whoever is authenticated, or "" before AUTH succeeded.
	Principal string
	// Remote is the address of the peer.
	Remote string
	// Since is when the connection was made.
	Since time.Time
	// QueuedBytes is how many bytes wait to be sent. Each waiting event counts 512 bytes besides
	// its payload.
	QueuedBytes int
	// Subscriptions are sorted by topic and group.
	Subscriptions []ConnectionSubscription
}

// Outbound is what waits to be sent to the clients of a Server.
type Outbound struct {
	// Bytes and Frames are of all connections together. Each waiting event counts 512 bytes besides
	// its payload.
	Bytes, Frames int
	// MaxBytes is what waits for the connection with the most bytes.
	MaxBytes int
}

// Outbound adds up what waits to be sent.
func (s *Server) Outbound() Outbound {
	s.mu.Lock()
	sessions := slices.Collect(maps.Keys(s.sessions))
	s.mu.Unlock()
	var sum Outbound
	for _, n := range sessions {
		waiting := n.out.queued()
		sum.Bytes += waiting.bytes
		sum.Frames += waiting.frames
		sum.MaxBytes = max(sum.MaxBytes, waiting.bytes)
	}
	return sum
}

// ConnectionSubscription is one subscription of a connection.
type ConnectionSubscription struct {
	Topic, Group string
	// MaxInFlight is the most events that may be leased to the subscription, and InFlight is how
	// many are.
	MaxInFlight, InFlight int
	// Paused says that the client has paused the subscription.
	Paused bool
}

// Connections returns up to limit open connections of this Server in the order in which they were
// made, and at most MaxConnectionsListed. It starts behind the connection with the id after, or at
// the oldest if after is "". more says that there are further ones.
func (s *Server) Connections(after string, limit int) (list []Connection, more bool) {
	limit = min(max(limit, 1), MaxConnectionsListed)
	number, _ := s.connectionNumber(after)
	var sessions []*session
	s.mu.Lock()
	for n := range s.sessions {
		if n.number > number {
			sessions = append(sessions, n)
		}
	}
	s.mu.Unlock()
	slices.SortFunc(sessions, func(a, b *session) int { return cmp.Compare(a.number, b.number) })
	if len(sessions) > limit {
		sessions, more = sessions[:limit], true
	}
	list = make([]Connection, len(sessions))
	for i, n := range sessions {
		list[i] = n.describe()
	}
	return list, more
}

// CloseConnection closes a connection with the close code for operators, and reports whether the
// connection was open. Queued replies are sent first. The client's leases are given back, and count
// as failed attempts if their events were sent.
func (s *Server) CloseConnection(id string) bool {
	number, ok := s.connectionNumber(id)
	if !ok {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range s.sessions {
		if n.number == number {
			return n.out.shut(closeByOperator)
		}
	}
	return false
}

// connectionNumber returns the number of a connection of this Server.
func (s *Server) connectionNumber(id string) (number uint64, ok bool) {
	text, ok := strings.CutPrefix(id, s.name+"-")
	if !ok {
		return 0, false
	}
	number, err := strconv.ParseUint(text, 10, 64)
	return number, err == nil
}

// newServerName returns a random name.
func newServerName() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

func (s *session) describe() Connection {
	c := Connection{ID: s.srv.name + "-" + strconv.FormatUint(s.number, 10), Remote: s.remote, Since: s.since, QueuedBytes: s.out.queued().bytes}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Principal = s.counted
	c.Subscriptions = make([]ConnectionSubscription, 0, len(s.subs))
	for _, sub := range s.subs {
		credit := sub.bus.Credit()
		c.Subscriptions = append(c.Subscriptions, ConnectionSubscription{sub.topic, sub.group, credit.MaxInFlight, credit.InFlight, credit.Paused})
	}
	slices.SortFunc(c.Subscriptions, func(a, b ConnectionSubscription) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), strings.Compare(a.Group, b.Group))
	})
	return c
}
