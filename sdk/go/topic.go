package eventhub

import (
	"context"
	"iter"
)

// Topic publishes and consumes events whose payloads have the type T. If T, or *T, has a method
// Validate() error, payloads are checked before they are sent and before they are handled.
type Topic[T any] struct {
	hub  *Client
	name string
}

// TopicOf returns the topic of that name.
func TopicOf[T any](hub *Client, name string) Topic[T] { return Topic[T]{hub, name} }

// Name returns the topic's name.
func (t Topic[T]) Name() string { return t.name }

// Publish is Client.Publish.
func (t Topic[T]) Publish(ctx context.Context, payload T, opts PublishOptions) (id string, err error) {
	return t.hub.Publish(ctx, t.name, checkable(&payload), opts)
}

// checkable returns the payload, or a pointer to it if that has the method Validate.
func checkable[T any](payload *T) any {
	if _, ok := any(*payload).(validator); !ok {
		if v, ok := any(payload).(validator); ok {
			return v
		}
	}
	return *payload
}

// PublishAsync is Client.PublishAsync.
func (t Topic[T]) PublishAsync(ctx context.Context, payload T, opts PublishOptions, done func(id string, err error)) error {
	return t.hub.PublishAsync(ctx, t.name, checkable(&payload), opts, done)
}

// Subscribe is Client.Subscribe. An event whose payload does not fit T is refused with the reason.
func (t Topic[T]) Subscribe(ctx context.Context, group string, opts SubscribeOptions, handler func(context.Context, T, *Delivery) error) (*Subscription, error) {
	return t.hub.Subscribe(ctx, t.name, group, opts, func(ctx context.Context, d *Delivery) error {
		payload, err := Payload[T](&d.Event)
		if err != nil {
			return err
		}
		return handler(ctx, payload, d)
	})
}

// Message is an event with its decoded payload.
type Message[T any] struct {
	*Delivery

	Value T
}

// Events is Client.Events. An event whose payload does not fit T is refused with the reason, and
// the sequence goes on.
func (t Topic[T]) Events(ctx context.Context, group string, opts SubscribeOptions) iter.Seq2[Message[T], error] {
	return func(yield func(Message[T], error) bool) {
		for d, err := range t.hub.Events(ctx, t.name, group, opts) {
			if err != nil {
				yield(Message[T]{}, err)
				return
			}
			value, err := Payload[T](&d.Event)
			if err != nil {
				d.Nack(err.Error(), DefaultBackoff)
				continue
			}
			if !yield(Message[T]{d, value}, nil) {
				return
			}
		}
	}
}

// Payload decodes the payload of an event, and validates it as Topic does.
func Payload[T any](e *Event) (T, error) {
	var value T
	if err := e.Decode(&value); err != nil {
		return value, err
	}
	if v, ok := checkable(&value).(validator); ok {
		if err := v.Validate(); err != nil {
			return value, invalidPayload(err)
		}
	}
	return value, nil
}
