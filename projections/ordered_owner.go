package projections

import (
	"context"
	"errors"
	"fmt"
)

// Ordered runs a Projection into a Store of the caller's, in the order of the topic's stream, and
// lets the caller change states in between, as package process does with what time alone changes.
// Run and Rebuild are for all others. Its methods may be called concurrently.
type Ordered struct {
	applier *applier
	ordered *ordered
}

// NewOrdered makes an Ordered of a Projection that has a Key. noted is told of each state that was
// loaded or saved, and may be nil. Ordered.Run starts it.
func NewOrdered(bus Bus, p Projection, store Store, noted func(key string, s State)) (*Ordered, error) {
	if err := p.validate(); err != nil {
		return nil, err
	}
	if p.Key == nil {
		return nil, fmt.Errorf("projection %q: function Key is missing", p.Name)
	}
	a := newApplier(bus, &p, store)
	a.saved = noted
	return &Ordered{applier: a, ordered: &ordered{a: a, floor: 1}}, nil
}

// Run projects until ctx ends, and then returns nil with its leases handed back. Failures of the
// bus are logged and tried again; an error is returned only when the bus is closed. Call it once.
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

// A Decision is what becomes of the state of a key: its next value, or that it stays.
type Decision func(s State) (next []byte, change bool, err error)

// Sweep projects all events that are stored at this moment, and then has f change states while no
// event is applied here. decide may be called again, when another instance was quicker.
func (o *Ordered) Sweep(ctx context.Context, f func(change func(key string, decide Decision) error) error) error {
	if err := o.ordered.tail(ctx); err != nil {
		return err
	}
	o.ordered.mu.Lock()
	defer o.ordered.mu.Unlock()
	return f(func(key string, decide Decision) error { return o.change(ctx, key, decide) })
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
