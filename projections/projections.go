// Package projections derives state from events: projections that keep a state for each key up to date (Projection), copies
// of compacted topics in memory (Mirror) and in SQL tables (Changelog), snapshots (Compactor), and the states of processes
// (Process).
package projections

import (
	"context"

	"eventhub/jetstream"
)

// Bus is what projections need of the event bus. *jetstream.Bus is one.
type Bus interface {
	Subscribe(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (*jetstream.Subscription, error)
	Cursor(ctx context.Context, topic, group string) (jetstream.Cursor, error)
	Backlog(ctx context.Context, topic, group string) (jetstream.Backlog, error)
	DeleteGroup(ctx context.Context, topic, group string) error

	Scan(ctx context.Context, topic string, opts jetstream.ScanOptions, f func(*jetstream.Event) error) error
	Tail(ctx context.Context, topic, stream string, after uint64, f func(*jetstream.Event) error) error
	NextOfKey(ctx context.Context, topic, key string, after uint64) (*jetstream.Event, error)
	Bounds(ctx context.Context, topic string) (first, last uint64, err error)

	Latest(ctx context.Context, topic, key string) (*jetstream.Event, error)
	LatestByKey(ctx context.Context, topic string, keys ...string) (map[string]*jetstream.Event, error)
	EachLatest(ctx context.Context, topic string, f func(*jetstream.Event) error) error
	EachLatestSince(ctx context.Context, topic string, mark jetstream.Mark, f func(*jetstream.Event) error) (jetstream.Mark, error)
	Watch(ctx context.Context, topic string, keys []string, f func(*jetstream.Event) error) error

	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
	NewPublisher() *jetstream.Publisher
	DeadLetter(ctx context.Context, e *jetstream.Event, group, reason string, attempts int) error

	OpenCollection(ctx context.Context, name string) (*jetstream.Collection, error)
	DeleteCollection(ctx context.Context, name string) error
}

var _ Bus = (*jetstream.Bus)(nil)
