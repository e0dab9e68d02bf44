package projections

import (
	"context"
	"errors"
	"fmt"
)

// Ordered runs a Projection into a Store of the caller, the events of each key in the order of the
// topic's stream. Between events, the caller can change states, as package process does when time
// passes. For all other
// projections, use Run and Rebuild. Its methods may be called concurrently.
type Ordered struct {
	applier *applier
	ordered *ordered
}

// NewOrdered returns an Ordered for a Projection with a Key. noted, if not nil, is called for each
// state that was loaded or saved. Ordered.Run starts the projection.
func NewOrdered(bus Bus, p Projection, store Store, noted func(key string, s State)) (*Ordered, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if p.Key == nil {
		return nil, fmt.Errorf("projection %q: function Key is missing", p.Name)
	}
	a := newApplier(bus, &p, store)
	a.saved = noted
	return &Ordered{applier: a, ordered: newOrdered(a)}, nil
}

// Run projects until ctx ends, then gives its leases back and returns nil. Failures of the bus are
// logged and retried. Run returns an error only if the bus is closed. It may be called only once.
func (o *Ordered) Run(ctx context.Context) error {
	err := o.ordered.run(ctx, o.applier.p.Group, o.applier.p.From)
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx is no failure
	}
	return err
}

// Each calls f for each state that is stored.
func (o *Ordered) Each(ctx context.Context, f func(key string, s State) error) error {
	return o.applier.store.Each(ctx, f)
}

// A Decision returns the next value of the state of a key, or change false to leave the state as it
// is.
type Decision func(s State) (next []byte, change bool, err error)

// Tail projects all events that are stored at the moment of the call.
func (o *Ordered) Tail(ctx context.Context) error { return o.ordered.tail(ctx) }

// Change lets the states of keys be changed, of several at the same time. This instance applies no
// event meanwhile, so callers divide many keys into calls. decide may be called again for a key
// when another instance wrote first.
func (o *Ordered) Change(ctx context.Context, keys []string, decide func(key string) Decision) error {
	if len(keys) == 0 {
		return nil
	}
	o.ordered.mu.Lock()
	defer o.ordered.mu.Unlock()
	return o.applier.each(ctx, keys, func(key string) error { return o.change(ctx, key, decide(key)) })
}

// change lets the state of a key be changed. o.ordered.mu is held.
func (o *Ordered) change(ctx context.Context, key string, decide Decision) error {
	load := o.applier.load
	for {
		c, err := load(ctx, key)
		if err != nil {
			return err
		}
		value, change, err := decide(c.state)
		if err != nil || !change {
			return err
		}
		saved, err := o.applier.store.Save(ctx, key, c.state, State{Value: value, From: c.state.From}, nil)
		if err == nil {
			o.applier.remember(key, cached{saved, c.span})
			return nil
		}
		if !errors.Is(err, ErrConflict) {
			return err
		}
		// Another instance has a newer state of it.
		load = o.applier.reload
	}
}
