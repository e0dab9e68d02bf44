package facade

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"time"
)

// MaxConnectionsListed is the maximum number of connections that Connections returns.
const MaxConnectionsListed = 1000

// ConnectionKind says how a client is connected.
type ConnectionKind string

// The kinds of connections.
const (
	KindWebSocket ConnectionKind = "websocket"
	// KindStream is a stream of server-sent events (GET /subscribe).
	KindStream ConnectionKind = "stream"
	// KindPull is a pull that waits for events, or whose events are not all settled: its client
	// need not be connected any more.
	KindPull ConnectionKind = "pull"
)

// Connection describes an open WebSocket connection, a stream or a pull to operators.
type Connection struct {
	// ID identifies the connection, also among those of other hubs.
	ID   string
	Kind ConnectionKind
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

// connected is a client as operators see it: a session, or a consumer.
type connected interface {
	// place is its number among the connections of the server.
	place() uint64
	// subscribes reports whether a filter selects it.
	subscribes(filter ConnectionFilter) bool
	// queued returns what waits to be sent to it.
	queued() backlog
	describe() Connection
	// closeNow ends it for an operator, and reports whether it was open. It does not block.
	closeNow() bool
}

var (
	_ connected = (*session)(nil)
	_ connected = (*consumer)(nil)
)

// connectedLocked returns all clients behind a number. mu is held.
func (s *Server) connectedLocked(number uint64) []connected {
	all := make([]connected, 0, len(s.sessions)+len(s.consumers))
	for n := range s.sessions {
		if n.number > number {
			all = append(all, n)
		}
	}
	for c := range s.consumers {
		if c.number > number {
			all = append(all, c)
		}
	}
	return all
}

// Outbound adds up what waits to be sent.
func (s *Server) Outbound() Outbound {
	s.mu.Lock()
	all := s.connectedLocked(0)
	s.mu.Unlock()
	var sum Outbound
	for _, n := range all {
		waiting := n.queued()
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

// ConnectionFilter selects the connections with a subscription of a topic and of a group; "" stands
// for any.
type ConnectionFilter struct{ Topic, Group string }

// Connections returns up to limit open connections, streams and pulls of this Server in the order
// in which they were made, and at most MaxConnectionsListed. It starts behind the one with the id
// after, or at the oldest if after is "". more says that there are further ones.
func (s *Server) Connections(after string, limit int, filter ConnectionFilter) (list []Connection, more bool) {
	limit = min(max(limit, 1), MaxConnectionsListed)
	number, _ := s.connectionNumber(after)
	s.mu.Lock()
	all := s.connectedLocked(number)
	s.mu.Unlock()
	slices.SortFunc(all, func(a, b connected) int { return cmp.Compare(a.place(), b.place()) })
	for _, n := range all {
		if !n.subscribes(filter) {
			continue
		}
		if len(list) == limit {
			return list, true
		}
		list = append(list, n.describe())
	}
	return list, false
}

// CloseConnection closes a connection with the close code for operators, and reports whether the
// connection was open. Queued replies are sent first. The client's leases are given back, and count
// as failed attempts if their events were sent. The last message of a stream has the code, and a
// pull that waits gets overloaded.
func (s *Server) CloseConnection(id string) bool {
	number, ok := s.connectionNumber(id)
	if !ok {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.connectedLocked(max(number, 1) - 1) {
		if n.place() == number {
			return n.closeNow()
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

// selects reports whether a subscription is one of those that are asked for.
func (filter ConnectionFilter) selects(sub *subscription) bool {
	return (filter.Topic == "" || sub.topic == filter.Topic) && (filter.Group == "" || sub.group == filter.Group)
}

// describe describes a subscription that was made.
func (sub *subscription) describe() ConnectionSubscription {
	credit := sub.bus.Credit()
	return ConnectionSubscription{sub.topic, sub.group, credit.MaxInFlight, credit.InFlight, credit.Paused}
}

// connectionID is what operators call a connection.
func (s *Server) connectionID(number uint64) string {
	return s.name + "-" + strconv.FormatUint(number, 10)
}

func (c *consumer) place() uint64 { return c.number }

func (c *consumer) subscribes(filter ConnectionFilter) bool {
	if filter == (ConnectionFilter{}) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.joined && filter.selects(c.sub)
}

func (c *consumer) describe() Connection {
	d := Connection{
		ID: c.srv.connectionID(c.number), Kind: ConnectionKind(c.kind), Principal: c.who.Key(), Remote: c.remote, Since: c.since,
		QueuedBytes: c.queued().bytes, Subscriptions: []ConnectionSubscription{},
	}
	c.mu.Lock()
	joined := c.joined
	c.mu.Unlock()
	if joined {
		d.Subscriptions = append(d.Subscriptions, c.sub.describe())
	}
	return d
}

func (c *consumer) closeNow() bool {
	c.mu.Lock()
	joined, ended := c.joined, c.ended
	c.mu.Unlock()
	if ended {
		return false
	}
	c.end(closeByOperator)
	if c.kind == consumerPull && joined { // a stream does so after its last message
		c.srv.wg.Go(func() { c.stop(c.srv.ctx, Subscription.Disconnect) })
	}
	return true
}

func (s *session) place() uint64 { return s.number }

func (s *session) queued() backlog { return s.out.queued() }

func (s *session) closeNow() bool { return s.out.shut(closeByOperator) }

func (s *session) subscribes(filter ConnectionFilter) bool {
	if filter == (ConnectionFilter{}) {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sub := range s.subs {
		if filter.selects(sub) {
			return true
		}
	}
	return false
}

func (s *session) describe() Connection {
	c := Connection{
		ID: s.srv.connectionID(s.number), Kind: KindWebSocket, Remote: s.remote, Since: s.since, QueuedBytes: s.out.queued().bytes,
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Principal = s.counted
	c.Subscriptions = make([]ConnectionSubscription, 0, len(s.subs))
	for _, sub := range s.subs {
		c.Subscriptions = append(c.Subscriptions, sub.describe())
	}
	slices.SortFunc(c.Subscriptions, func(a, b ConnectionSubscription) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), strings.Compare(a.Group, b.Group))
	})
	return c
}
