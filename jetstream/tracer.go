package jetstream

import (
	"context"
	"errors"

	"eventhub/jetstream/event"
	"eventhub/jetstream/schemas"
)

// publishTraced is PublishAsync for a bus with a Tracer.
func (p *Publisher) publishTraced(ctx context.Context, topic string, payload []byte, opts *PublishOptions, done func(event.Receipt, error)) error {
	span := p.publishing.tracer.Publish(ctx, topic, opts.Headers)
	if span == nil {
		return p.publish(ctx, topic, payload, opts, done)
	}
	err := p.publish(ctx, topic, payload, opts, func(r event.Receipt, err error) {
		span.End(r, err)
		done(r, err)
	})
	switch {
	case errors.Is(err, schemas.ErrLong): // which is no failure: the caller publishes again
		span.End(event.Receipt{}, nil)
	case err != nil: // nobody calls done
		span.End(event.Receipt{}, err)
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
func (d *Delivery) traceEnd(how event.Outcome) {
	if d.trace != nil {
		d.trace.End(how)
		d.trace = nil
	}
}
