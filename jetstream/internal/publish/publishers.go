package publish

import (
	"context"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// ShareTime is the time for which Limits.KeyShare holds, and shares of other things like it.
const ShareTime = 30 * 24 * time.Hour

// wrapperMargin is what Options.Wrapper may add to the limit of payloads.
const wrapperMargin = 16 << 10

// Publishers stores events: at once, and later. It has what all Publishers share: the rations of
// those who publish, the gates of topics, and the stream of delayed events. Its methods may be
// called concurrently.
type Publishers struct {
	Config
	Hooks Hooks

	own       *Publisher    // of the bus itself; nil until Begin
	clients   atomic.Uint64 // numbers the clients without a name
	schedules *schedules

	newKeys   *quota.Set // keys of compacted topics, by the client that made them
	keyShares *quota.Set // the same over ShareTime
	// newDerived counts keys that projections make from events, by the client that published these.
	newDerived *quota.Set
	keyLooks   *quota.Set // look-ups of keys that would be refused, by client

	byteRations *byteRations
}

// Config is what a Publishers is given.
type Config struct {
	Conn    *conn.Pool
	Streams *streams.Streams
	Schemas *schemas.Registry
	Rules   topics.Rules
	Derived []DerivedKeys
	// Embedded says that the server is in this process.
	Embedded bool
	// Replicas and Memory are those of the stream of delayed events.
	Replicas int
	Memory   bool
	// AckWait is after which time the server gives a delayed event that is due to another hub.
	AckWait time.Duration
	// DueRetry is how long a delayed event waits that could not be stored, doubled with each
	// attempt up to a minute.
	DueRetry time.Duration
	Limits   Limits

	Log    *slog.Logger
	Often  *pacedlog.Log
	Obs    event.Observer
	Clock  *conn.Clock
	Tracer event.Tracer // nil: none
}

// Limits are those of the bus with the same names.
type Limits struct {
	Topics, SessionInFlight, PublishInFlight int
	KeysPerClient, KeyRate, KeyShare         int
	DerivedKeysPerClient, DerivedKeyRate     int
	PublishRate, PublishBurst, StorageShare  int
	Delayed, DelayedPerClient                int
	MaxDelay                                 time.Duration
}

// Hooks are called by Publishers, for what these do not do themselves. They are set before the
// bus connects.
type Hooks struct {
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

// New returns the Publishers of a bus that is not connected yet.
func New(cfg Config) *Publishers {
	l := cfg.Limits
	p := &Publishers{
		Config:     cfg,
		newKeys:    quota.New(float64(l.KeyRate), l.KeysPerClient, l.Topics, nil),
		keyShares:  quota.New(float64(l.KeyShare)/ShareTime.Seconds(), l.KeyShare, l.Topics, nil),
		newDerived: quota.New(float64(l.DerivedKeyRate), l.DerivedKeysPerClient, l.Topics, nil),
		keyLooks:   quota.New(keyLooks, keyLooks, l.Topics, nil),
	}
	p.byteRations = newByteRations(p)
	p.schedules = newSchedules(p)
	return p
}

// Begin takes one of the connections, which are there, for what the bus itself publishes.
func (p *Publishers) Begin() {
	p.byteRations.begin()
	p.own = p.newPublisher("")
}

// StoreDue begins to store delayed events that are due, until the bus closes.
func (p *Publishers) StoreDue() {
	p.schedules.out = p.newPublisher("")
	p.Conn.Start(p.schedules.run)
}

// Own returns the Publisher of the bus itself, whose topics count for nobody.
func (p *Publishers) Own() *Publisher { return p.own }

// MaxMessage returns the largest message that Store may send, in bytes: the server to which its
// connection leads may have another limit than the others.
func (p *Publishers) MaxMessage() int { return int(p.own.link.NC.MaxPayload()) }

// Publisher returns a new Publisher, for a client that nobody has named.
func (p *Publishers) Publisher() *Publisher {
	return p.newPublisher(conn.OwnClient + strconv.FormatUint(p.clients.Add(1), 36))
}

// gates are what the events of a topic pass before they are stored. Each may be nil.
type gates struct {
	keys    *keySet // of the bucket
	derived *derivedKeys
	schema  *schemas.Gate
}

// Gates makes the gates of a topic whose bucket, if it has one, has so many entries.
func (p *Publishers) Gates(ctx context.Context, t *streams.Topic, rule *topics.Rule, entries uint64) any {
	g := &gates{derived: p.derivedKeysOf(t.Name), schema: p.Schemas.Gate(t.Name, rule)}
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

// KeysLooked tells how many entries the bucket of a topic has. It returns how many keys of them are
// removed.
func (p *Publishers) KeysLooked(t *streams.Topic, entries uint64) (removed int) {
	if keys := gatesOf(t).keys; keys != nil {
		return keys.looked(entries)
	}
	return 0
}

// KnownKeys returns how many keys this hub takes a compacted topic to have, removed ones included.
func (p *Publishers) KnownKeys(t *streams.Topic) int {
	k := gatesOf(t).keys
	if k == nil {
		return 0
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.present + k.since
}
