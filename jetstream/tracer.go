package jetstream

import (
	"context"

	"eventhub/jetstream/event"
)

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
