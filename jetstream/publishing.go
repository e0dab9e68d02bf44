package jetstream

import (
	"sync/atomic"

	"eventhub/jetstream/quota"
)

// publishing stores events: at once, later, and as dead letters. It has the rations of those who
// publish.
type publishing struct {
	*core
	streams *streams
	reads   *reads
	schemas *schemas

	publisher *Publisher    // of the bus itself; nil until begin
	clients   atomic.Uint64 // numbers the clients without a name
	schedules *schedules

	newKeys   *quota.Set // keys of compacted topics, by the client that made them
	keyShares *quota.Set // the same over shareTime
	// newDerived counts keys that projections make from events, by the client that published these.
	newDerived *quota.Set
	keyLooks   *quota.Set // look-ups of keys that would be refused, by client

	letterRations *letterRations
	firstLetters  firstLetters
}

func newPublishing(c *core, s *streams, r *reads, m *schemas) *publishing {
	l := c.limits
	p := &publishing{
		core: c, streams: s, reads: r, schemas: m,
		newKeys:       quota.New(float64(l.KeyRate), l.KeysPerClient, l.Topics, nil),
		keyShares:     quota.New(float64(l.KeyShare)/shareTime.Seconds(), l.KeyShare, l.Topics, nil),
		newDerived:    quota.New(float64(l.DerivedKeyRate), l.DerivedKeysPerClient, l.Topics, nil),
		keyLooks:      quota.New(keyLooks, keyLooks, l.Topics, nil),
		letterRations: newLetterRations(c),
	}
	p.schedules = newSchedules(p)
	return p
}

// begin takes one of the connections, which are there, for what the bus itself publishes.
func (p *publishing) begin() { p.publisher = p.newPublisher("") }
