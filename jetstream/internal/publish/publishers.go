package jetstream

import (
	"context"
	"strconv"
	"sync/atomic"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/quota"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// publishing stores events: at once, later, and as dead letters. It has the rations of those who
// publish.
type publishing struct {
	*core
	streams *streams.Streams
	schemas *schemas.Registry
	hooks   publishHooks

	publisher *Publisher    // of the bus itself; nil until begin
	clients   atomic.Uint64 // numbers the clients without a name
	schedules *schedules

	newKeys   *quota.Set // keys of compacted topics, by the client that made them
	keyShares *quota.Set // the same over shareTime
	// newDerived counts keys that projections make from events, by the client that published these.
	newDerived *quota.Set
	keyLooks   *quota.Set // look-ups of keys that would be refused, by client

	byteRations *byteRations
}

// publishHooks are called by publishing, for what it does not do itself. They are set before the
// bus connects.
type publishHooks struct {
	// EachKey calls f for the keys in the bucket of a topic, and says of each whether it is
	// removed.
	EachKey func(ctx context.Context, t *streams.Topic, f func(key string, removed bool)) error
	// HasKey reports whether a topic has a value of a key, asked at the leader.
	HasKey func(ctx context.Context, t *streams.Topic, key string) bool
	// EachID calls f for the ids of the events of a topic since a time, for at most most of them.
	EachID func(ctx context.Context, t *streams.Topic, since time.Time, most int, f func(id string)) error
	// StoredIDs reports which of some ids a topic has since a time. It is not complete where the
	// topic has dropped events, or has too many.
	StoredIDs func(ctx context.Context, topic string, ids []string, since time.Time) (found map[string]bool, complete bool, err error)

	// AdmitLetter takes a dead letter that a client publishes itself from the rations of the
	// client, or returns the refusal. RefundLetter gives that back.
	AdmitLetter  func(client string, size int) error
	RefundLetter func(client string, size int)
	// Bury stores the dead letter of a delayed event that its topic refuses.
	Bury func(ctx context.Context, original *event.Event, reason string, attempts int, id string) error
}

func newPublishing(c *core, s *streams.Streams, m *schemas.Registry) *publishing {
	l := c.limits
	p := &publishing{
		core: c, streams: s, schemas: m,
		newKeys:     quota.New(float64(l.KeyRate), l.KeysPerClient, l.Topics, nil),
		keyShares:   quota.New(float64(l.KeyShare)/shareTime.Seconds(), l.KeyShare, l.Topics, nil),
		newDerived:  quota.New(float64(l.DerivedKeyRate), l.DerivedKeysPerClient, l.Topics, nil),
		keyLooks:    quota.New(keyLooks, keyLooks, l.Topics, nil),
		byteRations: newByteRations(c, s.Headrooms),
	}
	p.schedules = newSchedules(p)
	return p
}

// begin takes one of the connections, which are there, for what the bus itself publishes.
func (p *publishing) begin() {
	p.byteRations.begin()
	p.publisher = p.newPublisher("")
}

// gates are what the events of a topic pass before they are stored. Each may be nil.
type gates struct {
	keys    *keySet // of the bucket
	derived *derivedKeys
	schema  *schemas.Gate
}

// newGates makes the gates of a topic whose bucket, if it has one, has so many entries.
func (p *publishing) newGates(ctx context.Context, t *streams.Topic, rule *topics.Rule, entries uint64) any {
	g := &gates{derived: p.derivedKeysOf(t.Name), schema: p.schemas.Gate(t.Name, rule)}
	if t.Bucket != nil {
		g.keys = p.newKeySet(ctx, t, rule, entries)
	}
	return g
}

var noGates gates

// gatesOf returns the gates of a topic. One that was met by a read has none.
func gatesOf(t *streams.Topic) *gates {
	if g, ok := t.Gates.(*gates); ok {
		return g
	}
	return &noGates
}

// unnamed is a name for a client that nobody named.
func (p *publishing) unnamed() string {
	return conn.OwnClient + strconv.FormatUint(p.clients.Add(1), 36)
}
