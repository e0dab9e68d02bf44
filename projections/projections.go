// Package projections holds the read models that the hub derives from events, each a member of a group of its own.
package projections

import (
	"context"

	"eventhub/jetstream"
)

// Bus is what a projection needs of the event bus. *jetstream.Bus is one.
type Bus interface {
	Consume(ctx context.Context, topic, group string, opts jetstream.SubscribeOptions, workers int,
		handler func(context.Context, *jetstream.Delivery) error) (*jetstream.Subscription, error)
	Cursor(ctx context.Context, topic, group string) (jetstream.Cursor, error)
	Scan(ctx context.Context, topic string, opts jetstream.ScanOptions, f func(*jetstream.Event) error) error
	LatestByKey(ctx context.Context, topic, key string) (*jetstream.Event, error)
	Publish(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (jetstream.Receipt, error)
}

var _ Bus = (*jetstream.Bus)(nil)
