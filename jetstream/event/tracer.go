package event

import (
	"context"
)

// Tracer makes spans of publishes and deliveries, for distributed tracing. Its methods, and those
// of the spans that it returns, are called on the hot path from many goroutines: they must be safe
// for concurrent use and must not block. They must not change or keep headers and events.
type Tracer interface {
	// Publish begins the span of a publish, and returns nil for a publish that is not traced. ctx
	// is that of the caller; headers are those of the event.
	Publish(ctx context.Context, topic string, headers map[string]string) PublishSpan
	// Deliver begins the span of a lease when the subscriber takes the event, and returns nil for
	// an event that is not traced.
	Deliver(e *Event, group string, attempt int) DeliverySpan
}

// PublishSpan is the span of one publish.
type PublishSpan interface {
	// End is called once, when the publish was answered or refused.
	End(r Receipt, err error)
}

// DeliverySpan is the span of one lease.
type DeliverySpan interface {
	// Context returns ctx with the span, so that spans of the handler become its children.
	Context(ctx context.Context) context.Context
	// End is called once, at the end of the lease, while the subscription is locked.
	End(how Outcome)
}
