package projections

import (
	"context"
	"errors"
	"log/slog"

	"eventhub/jetstream"
)

// applier applies events to the states of their keys. Its methods may be called concurrently, for one key one at a time.
type applier struct {
	p     *Projection
	bus   Bus
	store Store
	cache *cache
	// saved, if not nil, is told of each state that was loaded or saved, of the key's caller.
	saved func(key string, s State)
}

func newApplier(bus Bus, p *Projection, store Store) *applier {
	full := func() { p.Observer.LimitReached("projection_cache") }
	return &applier{p: p, bus: bus, store: store, cache: newCache(p.CacheKeys, p.CacheBytes, full)}
}

// load returns the state of a key, from memory if it is there.
func (a *applier) load(ctx context.Context, key string) (cached, error) {
	if c, ok := a.cache.get(key); ok {
		return c, nil
	}
	return a.reload(ctx, key)
}

// reload returns the state of a key as it is stored.
func (a *applier) reload(ctx context.Context, key string) (c cached, err error) {
	a.cache.drop(key)
	err = insist(ctx, a.p.Logger, "load a state", func(ctx context.Context) error {
		c.state, err = a.store.Load(ctx, key)
		return err
	})
	if err != nil {
		return cached{}, err
	}
	a.remember(key, c)
	return c, nil
}

func (a *applier) remember(key string, c cached) {
	a.cache.put(key, c)
	if a.saved != nil {
		a.saved(key, c.state)
	}
}

// failing is called before each further attempt on an event.
type failing func()

// apply brings the event into the state of its key, or to the dead letters. An error means that it could do neither before
// ctx ended, or that the bus is closed.
func (a *applier) apply(ctx context.Context, key string, e *jetstream.Event, span uint64, fails failing) error {
	c, err := a.load(ctx, key)
	if err != nil {
		return err
	}
	tries := 0
	outcome := Applied
	var next []byte
	computed := false // next is Apply's answer to c.state
	for wait := retryFirst; ; {
		if c.state.Covers(e) {
			if outcome == Applied {
				outcome = Known
			}
			c.span = max(c.span, span)
			a.cache.put(key, c)
			a.p.Observer.Projected(a.p.Name, outcome)
			return nil
		}
		if !computed && outcome != Poisoned {
			tries++
			next, err = a.p.Apply(ctx, c.state.Value, e)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			_, final := errors.AsType[permanent](err)
			if err != nil && tries < a.p.Attempts && !final {
				a.warn(ctx, "applying an event failed and is tried again", e, err)
				fails()
				if err := pause(ctx, wait); err != nil {
					return err
				}
				wait = min(2*wait, retryMax)
				continue
			}
			if err != nil {
				if err := a.bury(ctx, e, err, tries); err != nil {
					return err
				}
				outcome = Poisoned
			}
			computed = true
		}
		if outcome == Poisoned {
			next = c.state.Value // as it was, but with the event behind it
		}
		saved, err := a.store.Save(ctx, key, c.state, State{Value: next, From: positionOf(e)}, e)
		switch {
		case err == nil:
			saved.StoredAt = max(saved.StoredAt, e.StoredAt) // this hub's clock may be behind
			a.remember(key, cached{saved, max(c.span, span)})
			a.p.Observer.Projected(a.p.Name, outcome)
			return nil
		case isRefused(err) && outcome != Poisoned:
			if err := a.bury(ctx, e, err, tries); err != nil {
				return err
			}
			outcome = Poisoned
			continue
		case isRefused(err):
			// Not even that the event is behind the state can be stored, as for a key that is no key for the store. If it
			// comes again, its dead letter is a duplicate.
			a.cache.drop(key)
			a.p.Observer.Projected(a.p.Name, outcome)
			return nil
		case ctx.Err() != nil:
			a.cache.drop(key)
			return ctx.Err()
		case errors.Is(err, jetstream.ErrClosed):
			return err
		case !errors.Is(err, ErrConflict):
			a.warn(ctx, "a state could not be saved; it is tried again", e, err)
			fails()
			if err := pause(ctx, wait); err != nil {
				return err
			}
			wait = min(2*wait, retryMax)
		}
		// Another instance was first, or the outcome is unknown: what is there decides.
		if c, err = a.reload(ctx, key); err != nil {
			return err
		}
		computed = false
		if outcome != Poisoned {
			tries = max(tries-1, 0) // it was not the event's fault
		}
	}
}

// bury stores the event's dead letter.
func (a *applier) bury(ctx context.Context, e *jetstream.Event, cause error, tries int) error {
	a.warn(ctx, "an event cannot be applied and goes to the dead letters", e, cause)
	return insist(ctx, a.p.Logger, "store a dead letter", func(ctx context.Context) error {
		return a.bus.Group(a.p.Topic, a.p.Group).DeadLetter(ctx, e, cause.Error(), tries)
	})
}

func (a *applier) warn(ctx context.Context, msg string, e *jetstream.Event, cause error) {
	//nolint:sloglint // callers pass constants
	a.p.Logger.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("projection", a.p.Name), slog.String("id", e.ID), slog.Any("error", cause))
}
