// Package projections derives state from events: projections that keep a state for each key up to
// date (Projection), copies of compacted topics in memory (Mirror) and in SQL tables (Changelog),
// copies of topics in other versions of their schemas (DualWrite), and snapshots (Compactor).
// Package process has the states of processes on top of it.
package projections

import (
	"context"
	"time"

	"eventhub/jetstream"
)

// Bus is the event bus that projections use; see jetstream.Bus for the methods. JetStream returns
// the implementation for a *jetstream.Bus. Its methods, and those of the values that they return,
// may be called concurrently, except those of Publisher.
type Bus interface {
	Subscribe(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (Subscription, error)
	Consume(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(context.Context, *jetstream.Delivery) error) (Subscription, error)
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
	NewPublisher() Publisher
	Group(topic, name string) Group
	Keys(topic string) Keys
	History(topic string) History
	Collections() Collections
	SchemaView(ctx context.Context, topic string, version int) (SchemaView, error)
}

// Subscription is a member of a group. *jetstream.Subscription implements it.
type Subscription interface {
	Done() <-chan struct{}
	Stop(ctx context.Context) error
}

// Publisher publishes in order. Its method must not be called concurrently. *jetstream.Publisher
// implements it.
type Publisher interface {
	PublishAsync(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions, done func(jetstream.Receipt, error)) error
}

// Group is a group of a topic. jetstream.Group implements it.
type Group interface {
	Cursor(ctx context.Context) (jetstream.Cursor, error)
	Backlog(ctx context.Context) (jetstream.Backlog, error)
	DeadLetter(ctx context.Context, e *jetstream.Event, reason string, attempts int) error
	Delete(ctx context.Context) error
}

// Keys gives access to the newest event of each key of a topic. jetstream.Keys implements it.
type Keys interface {
	Get(ctx context.Context, key string) (*jetstream.Event, error)
	GetMany(ctx context.Context, keys []string) (map[string]*jetstream.Event, error)
	Each(ctx context.Context, f func(*jetstream.Event) error) error
	EachSince(ctx context.Context, since jetstream.BucketPosition, f func(*jetstream.Event) error) (jetstream.BucketPosition, error)
	Watch(ctx context.Context, keys []string, f func(*jetstream.Event) error) error
}

// History gives access to the events that a topic holds. jetstream.History implements it.
type History interface {
	Scan(ctx context.Context, opts jetstream.ScanOptions, f func(*jetstream.Event) error) error
	Tail(ctx context.Context, stream string, after uint64, f func(*jetstream.Event) error) error
	Bounds(ctx context.Context) (first, last uint64, err error)
	NextOfKey(ctx context.Context, key string, after uint64) (*jetstream.Event, error)
	ByID(ctx context.Context, id, client string) (*jetstream.Event, error)
	FindIDs(ctx context.Context, s jetstream.IDSearch) (found map[string]bool, complete bool, err error)
	DuplicateWindow(ctx context.Context) (time.Duration, error)
}

// SchemaView shows events in one version of their schema. *schemas.View implements it.
type SchemaView interface {
	Cast(ctx context.Context, e *jetstream.Event) error
}

// Collections gives access to KV buckets.
type Collections interface {
	Open(ctx context.Context, name string) (Collection, error)
	Delete(ctx context.Context, name string) error
}

// Collection is a KV bucket. *jetstream.Collection implements it.
type Collection interface {
	Get(ctx context.Context, key string) (*jetstream.Entry, error)
	Put(ctx context.Context, key string, value []byte, headers map[string]string, old uint64) (uint64, error)
	Delete(ctx context.Context, key string, headers map[string]string, old uint64) (uint64, error)
	Each(ctx context.Context, f func(*jetstream.Entry) error) error
	Follow(ctx context.Context, key string, f func(*jetstream.Entry) error) error
}

// JetStream returns a Bus on NATS JetStream. The caller owns bus and closes it after all users of
// the Bus have ended.
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

func (b onJetStream) Consume(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(context.Context, *jetstream.Delivery) error) (Subscription, error) {
	s, err := b.Bus.Consume(ctx, topic, group, opts, handler)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func (b onJetStream) SchemaView(ctx context.Context, topic string, version int) (SchemaView, error) {
	v, err := b.Bus.Schemas().View(ctx, topic, version)
	if err != nil {
		return nil, err
	}
	return v, nil
}

func (b onJetStream) NewPublisher() Publisher        { return b.Bus.NewPublisher() }
func (b onJetStream) Group(topic, name string) Group { return b.Bus.Group(topic, name) }
func (b onJetStream) Keys(topic string) Keys         { return b.Bus.Keys(topic) }
func (b onJetStream) History(topic string) History   { return b.Bus.History(topic) }
func (b onJetStream) Collections() Collections       { return collectionsOf{b.Bus.Collections()} }

type collectionsOf struct{ jetstream.Collections }

func (c collectionsOf) Open(ctx context.Context, name string) (Collection, error) {
	bucket, err := c.Collections.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	return bucket, nil
}
