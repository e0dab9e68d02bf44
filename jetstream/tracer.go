package jetstream

import (
	"context"
	"errors"
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

// publishTraced is PublishAsync for a bus with a Tracer.
func (p *Publisher) publishTraced(ctx context.Context, topic string, payload []byte, opts *PublishOptions, done func(Receipt, error)) error {
	span := p.publishing.tracer.Publish(ctx, topic, opts.Headers)
	if span == nil {
		return p.publish(ctx, topic, payload, opts, done)
	}
	err := p.publish(ctx, topic, payload, opts, func(r Receipt, err error) {
		span.End(r, err)
		done(r, err)
	})
	switch {
	case errors.Is(err, ErrLong): // which is no failure: the caller publishes again
		span.End(Receipt{}, nil)
	case err != nil: // nobody calls done
		span.End(Receipt{}, err)
	}
	return err
}

// Context returns ctx with the span of the delivery, for the spans of whoever handles the event.
// Without a Tracer, it returns ctx.
func (d *Delivery) Context(ctx context.Context) context.Context {
	if d.m.sub.bus.tracer == nil {
		return ctx
	}
	d.m.sub.mu.Lock()
	span := d.trace
	d.m.sub.mu.Unlock()
	if span == nil {
		return ctx
	}
	return span.Context(ctx)
}

// traceBegin begins the span of a lease. The subscription's mu is held.
func (d *Delivery) traceBegin() {
	if t := d.m.sub.bus.tracer; t != nil {
		d.trace = t.Deliver(&d.Event, d.m.sub.group, d.Attempt)
	}
}

// traceEnd ends the span of a lease. The subscription's mu is held.
func (d *Delivery) traceEnd(how Outcome) {
	if d.trace != nil {
		d.trace.End(how)
		d.trace = nil
	}
}
