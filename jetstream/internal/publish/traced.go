package publish

import (
	"context"
	"errors"

	"eventhub/jetstream/event"
	"eventhub/jetstream/schemas"
)

// publishTraced is PublishAsync for a bus with a Tracer.
func (p *Publisher) publishTraced(ctx context.Context, topic string, payload []byte, opts *Options, done func(event.Receipt, error)) error {
	span := p.shared.Tracer.Publish(ctx, topic, opts.Headers)
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
