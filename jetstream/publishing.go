package jetstream

import (
	"context"
	"strconv"
	"sync/atomic"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
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
	reads   *reading.Reads
	schemas *schemas.Registry

	publisher *Publisher    // of the bus itself; nil until begin
	clients   atomic.Uint64 // numbers the clients without a name
	schedules *schedules

	newKeys   *quota.Set // keys of compacted topics, by the client that made them
	keyShares *quota.Set // the same over shareTime
	// newDerived counts keys that projections make from events, by the client that published these.
	newDerived *quota.Set
	keyLooks   *quota.Set // look-ups of keys that would be refused, by client

	byteRations   *byteRations
	letterRations *letterRations
	firstLetters  firstLetters
}

func newPublishing(c *core, s *streams.Streams, r *reading.Reads, m *schemas.Registry) *publishing {
	l := c.limits
	p := &publishing{
		core: c, streams: s, reads: r, schemas: m,
		newKeys:       quota.New(float64(l.KeyRate), l.KeysPerClient, l.Topics, nil),
		keyShares:     quota.New(float64(l.KeyShare)/shareTime.Seconds(), l.KeyShare, l.Topics, nil),
		newDerived:    quota.New(float64(l.DerivedKeyRate), l.DerivedKeysPerClient, l.Topics, nil),
		keyLooks:      quota.New(keyLooks, keyLooks, l.Topics, nil),
		byteRations:   newByteRations(c, s.Headrooms),
		letterRations: newLetterRations(c),
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
