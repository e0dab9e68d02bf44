package facade

import (
	"context"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
	"eventhub/jetstream/topics"
)

// Bus is the part of the event bus that a Server needs. JetStream adapts a *jetstream.Bus, which
// documents the methods. All methods, and those of the values that they return, may be called
// concurrently, except those of a Publisher.
type Bus interface {
	Subscribe(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (Subscription, error)
	NewPublisher() Publisher
	Keys(topic string) Keys
	History(topic string) History
	Rule(topic string) topics.Rule
	Handles() Handles
	Hubs() Hubs
	Schemas() Schemas
	// MaxPayload returns the largest payload in bytes that a Publisher takes.
	MaxPayload() int
}

// Publisher publishes for one client in order. *jetstream.Publisher implements it. Only Flush and
// Cancel may be called concurrently.
type Publisher interface {
	CountFor(client string)
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
	PublishAsync(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions, done func(jetstream.Receipt, error)) error
	Flush(ctx context.Context) error
	Cancel(ctx context.Context, topic, id string) error
}

// Subscription is a member of a group. Its deliveries are settled by the ids of their events.
// *jetstream.Subscription implements it.
type Subscription interface {
	Ack(id string) bool
	Nack(id, reason string, delay time.Duration) bool
	Extend(id string, dur time.Duration) bool
	Pause(ctx context.Context) error
	Resume()
	Stop(ctx context.Context) error
	Drain(ctx context.Context) error
	Disconnect(ctx context.Context) error
	Credit() jetstream.Credit
}

// Keys reads the newest event of each key of a topic. jetstream.Keys implements it.
type Keys interface {
	Get(ctx context.Context, key string) (*jetstream.Event, error)
	GetMany(ctx context.Context, keys []string) (map[string]*jetstream.Event, error)
	GetConsistent(ctx context.Context, keys []string) (map[string]*jetstream.Event, error)
	Page(ctx context.Context, offset, limit int) ([]*jetstream.Event, error)
	List(ctx context.Context, opts jetstream.ListOptions) (jetstream.Listing, error)
	Snapshot(ctx context.Context, f func(*jetstream.Event) error) (upTo uint64, err error)
}

// History reads the stored events of a topic. jetstream.History implements it.
type History interface {
	Range(ctx context.Context, opts jetstream.ReadOptions) (*jetstream.Range, error)
	Place(ctx context.Context, client string) (jetstream.Place, error)
	Back(ctx context.Context, place jetstream.Place, n int) (uint64, error)
	Tail(ctx context.Context, stream string, after uint64, f func(*jetstream.Event) error) error
}

// Handles settles deliveries by their handles. jetstream.Handles implements it.
type Handles interface {
	Read(ctx context.Context, texts []string) ([]jetstream.Handle, []error)
	Settle(ctx context.Context, handles []jetstream.Handle, what jetstream.Settlement) []error
}

// Hubs carries what hubs tell one another. jetstream.Hubs implements it.
type Hubs interface {
	Tell(message []byte) error
	Listen(f func(message []byte)) (stop func(), err error)
}

// Schemas is the registry of schemas. *schemas.Registry implements it.
type Schemas interface {
	Topics(ctx context.Context) ([]string, error)
	List(ctx context.Context, topic string) ([]*schemas.Version, error)
	Check(ctx context.Context, topic string, d schemas.Draft) (*schemas.Report, error)
	Register(ctx context.Context, topic string, d schemas.Draft) (*schemas.Version, *schemas.Report, error)
	View(ctx context.Context, topic string, version int) (*schemas.View, error)
}

// JetStream returns the Bus on NATS JetStream. The caller closes bus after the Server.
func JetStream(bus *jetstream.Bus) Bus {
	if bus == nil {
		return nil
	}
	return onJetStream{bus}
}

type onJetStream struct{ *jetstream.Bus }

func (b onJetStream) Subscribe(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (Subscription, error) {
	s, err := b.Bus.Subscribe(ctx, topic, group, opts, handler)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (b onJetStream) NewPublisher() Publisher { return b.Bus.NewPublisher() }

func (b onJetStream) Keys(topic string) Keys { return b.Bus.Keys(topic) }

func (b onJetStream) History(topic string) History { return b.Bus.History(topic) }

func (b onJetStream) Rule(topic string) topics.Rule { return jetstream.RuleOf(b.Bus, topic) }

func (b onJetStream) Hubs() Hubs { return jetstream.HubsOf(b.Bus) }

func (b onJetStream) Schemas() Schemas { return b.Bus.Schemas() }

func (b onJetStream) Handles() Handles { return jetstream.HandlesOf(b.Bus) }
