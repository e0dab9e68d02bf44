package projections

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// applier applies events to the states of their keys. Its methods may be called concurrently for
// different keys, but not for the same key.
type applier struct {
	p     *Projection
	bus   Bus
	store Store
	cache *cache
	// saved, if not nil, receives each state that was loaded or saved. It is called by the
	// goroutine that works on the key.
	saved func(key string, s State)

	dropped, sayDrop atomic.Int64 // events dropped; when the log last said so, in epoch nanoseconds
}

const (
	// keysAtOnce is how many keys of a batch are worked on at a time.
	keysAtOnce = 64
	// sayDropEvery is how often the log says at most that events are dropped.
	sayDropEvery = time.Minute
)

func newApplier(bus Bus, p *Projection, store Store) *applier {
	full := func() { p.Observer.LimitReached("projection_cache") }
	return &applier{p: p, bus: bus, store: guardedStore{store, p.Logger}, cache: newCache(p.CacheKeys, p.CacheBytes, full)}
}

// load returns the state of a key, from the cache if possible.
func (a *applier) load(ctx context.Context, key string) (cached, error) {
	if c, ok := a.cache.get(key); ok {
		return c, nil
	}
	return a.reload(ctx, key)
}

// reload returns the stored state of a key. If the Store panics Attempts times, reload returns the
// panics.Error, because the fault lies with the event.
func (a *applier) reload(ctx context.Context, key string) (c cached, err error) {
	a.cache.drop(key)
	var fault error
	tries := 0
	err = insist(ctx, a.p.Logger, "load a state", func(ctx context.Context) (err error) {
		tries++
		c.state, err = a.store.Load(ctx, key)
		if panics.Is(err) && tries >= a.p.Attempts {
			fault = err
			return nil
		}
		return err
	})
	if err := cmp.Or(err, fault); err != nil {
		return cached{}, err
	}
	a.remember(key, c)
	return c, nil
}

// prefetch loads the states of several keys that are not in the cache with few requests, if the
// Store can do that. A state that has changed by the time of its use shows as ErrConflict.
func (a *applier) prefetch(ctx context.Context, keys []string) {
	many, ok := a.store.(manyStore)
	if !ok {
		return
	}
	var missing []string
	for _, key := range keys {
		if _, ok := a.cache.get(key); !ok {
			missing = append(missing, key)
		}
	}
	if len(missing) < 2 {
		return
	}
	states, err := many.loadMany(ctx, missing)
	if err != nil {
		return // each is loaded by itself
	}
	for _, key := range missing {
		a.remember(key, cached{state: states[key]})
	}
}

// each calls f for each key, for some of them at the same time. It returns an error of f, if there
// is one, after all calls have ended.
func (a *applier) each(ctx context.Context, keys []string, f func(key string) error) error {
	a.prefetch(ctx, keys)
	if len(keys) == 1 {
		return f(keys[0])
	}
	var (
		workers sync.WaitGroup
		next    atomic.Int64
		failed  atomic.Pointer[error]
	)
	for range min(keysAtOnce, len(keys)) {
		workers.Go(func() {
			err := errGoexit
			defer func() {
				if err != nil {
					failed.CompareAndSwap(nil, &err)
				}
			}()
			for failed.Load() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(keys) {
					break
				}
				if ferr := f(keys[i]); ferr != nil {
					err = ferr
					return
				}
			}
			err = nil
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

func (a *applier) remember(key string, c cached) {
	a.cache.put(key, c)
	if a.saved != nil {
		a.saved(key, c.state)
	}
}

// failing is called before each retry of an event.
type failing func()

// key calls Key for an event and returns the number of attempts made. Only a panic is retried: Key
// depends on nothing but the event, so an error would recur.
func (a *applier) key(ctx context.Context, e *jetstream.Event, fails failing) (key string, tries int, err error) {
	for wait := retryFirst; ; wait = min(2*wait, retryMax) {
		tries++
		err = panics.Call(a.p.Logger, "Key", func() (err error) {
			key, err = a.p.Key(e)
			return err
		})
		if !panics.Is(err) || tries >= a.p.Attempts {
			return key, tries, err
		}
		a.warn(ctx, "failed to find the key of an event; retrying", e, err)
		fails()
		if err := pause(ctx, wait); err != nil {
			return "", tries, err
		}
	}
}

// apply applies the event to the state of its key, or sends the event to the dead letters. It
// returns an error if ctx ended before either was done, or if the bus is closed.
func (a *applier) apply(ctx context.Context, key string, e *jetstream.Event, span uint64, fails failing) (err error) {
	if a.p.Tracer != nil {
		var end func(error)
		ctx, end = a.p.Tracer.Apply(ctx, a.p.Name, e)
		defer func() { end(err) }()
	}
	return a.change(ctx, key, e, span, fails)
}

// change is apply without a span.
func (a *applier) change(ctx context.Context, key string, e *jetstream.Event, span uint64, fails failing) error {
	c, err := a.load(ctx, key)
	if panics.Is(err) {
		return a.passOver(ctx, e, err, a.p.Attempts)
	}
	if err != nil {
		return err
	}
	tries := 0
	outcome := Applied
	var next []byte
	computed := false // next is the result of Apply for c.state
	var fault error   // set when no further attempt will be made
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
		if !computed && outcome != Poisoned && fault == nil {
			tries++
			err = panics.Call(a.p.Logger, "Apply", func() (err error) {
				// a clone, because Apply may modify its argument and then fail
				next, err = a.p.Apply(ctx, bytes.Clone(c.state.Value), e)
				return err
			})
			if ctx.Err() != nil {
				return ctx.Err()
			}
			_, final := errors.AsType[permanent](err)
			if err != nil && tries < a.p.Attempts && !final {
				a.warn(ctx, "failed to apply an event; retrying", e, err)
				fails()
				if err := pause(ctx, wait); err != nil {
					return err
				}
				wait = min(2*wait, retryMax)
				continue
			}
			fault, computed = err, true
		}
		if fault != nil {
			if err := a.bury(ctx, e, fault, tries); err != nil {
				return err
			}
			outcome, fault = Poisoned, nil
		}
		if outcome == Poisoned {
			next = c.state.Value // an unchanged value that records the event as handled
		}
		saved, err := a.store.Save(ctx, key, c.state, State{Value: next, From: positionOf(e)}, e)
		panicked := panics.Is(err)
		switch {
		case err == nil:
			// the hub's clock may be behind that of NATS
			saved.StoredAt = max(saved.StoredAt, e.StoredAt)
			a.remember(key, cached{saved, max(c.span, span)})
			a.p.Observer.Projected(a.p.Name, outcome)
			return nil
		case errors.Is(err, jetstream.ErrMaxKeys):
			// Others must not wait until keys go, which may be never.
			a.cache.drop(key)
			return a.noRoom(ctx, e, err, outcome, tries)
		case isRefused(err) && outcome != Poisoned:
			fault = err
			continue
		case isRefused(err), panicked && outcome == Poisoned:
			// The store cannot even record that the event was handled, for example because it
			// rejects the key. If the event is redelivered, its dead letter is a duplicate.
			a.cache.drop(key)
			a.p.Observer.Projected(a.p.Name, outcome)
			return nil
		case ctx.Err() != nil:
			a.cache.drop(key)
			return ctx.Err()
		case errors.Is(err, jetstream.ErrClosed):
			return err
		case panicked && tries >= a.p.Attempts:
			fault = err
		case !errors.Is(err, ErrConflict):
			a.warn(ctx, "failed to save a state; retrying", e, err)
			fails()
			if err := pause(ctx, wait); err != nil {
				return err
			}
			wait = min(2*wait, retryMax)
		}
		// Another instance wrote first, or the outcome is unknown. The stored state decides.
		if c, err = a.reload(ctx, key); panics.Is(err) {
			if outcome == Poisoned {
				a.p.Observer.Projected(a.p.Name, outcome)
				return nil
			}
			return a.passOver(ctx, e, err, tries)
		}
		if err != nil {
			return err
		}
		computed = false
		if outcome != Poisoned && !panicked {
			tries = max(tries-1, 0) // the event did not cause the failure
		}
	}
}

// noRoom deals with an event of a new key that the topic of the states does not take.
func (a *applier) noRoom(ctx context.Context, e *jetstream.Event, cause error, outcome Outcome, tries int) error {
	switch {
	case outcome == Poisoned: // it has its dead letter
		a.p.Observer.Projected(a.p.Name, Poisoned)
		return nil
	case !a.p.DropNewKeys:
		return a.passOver(ctx, e, cause, tries)
	}
	a.p.Observer.Projected(a.p.Name, Dropped)
	n := a.dropped.Add(1)
	if now := time.Now().UnixNano(); now > a.sayDrop.Load()+int64(sayDropEvery) {
		a.sayDrop.Store(now)
		a.warn(ctx, "events of new keys are dropped: the topic of the states takes no more keys", e, cause, slog.Int64("dropped", n))
	}
	return nil
}

// passOver sends an event to the dead letters when its state cannot record that.
func (a *applier) passOver(ctx context.Context, e *jetstream.Event, cause error, tries int) error {
	if err := a.bury(ctx, e, cause, tries); err != nil {
		return err
	}
	a.p.Observer.Projected(a.p.Name, Poisoned)
	return nil
}

// bury publishes the dead letter of the event.
func (a *applier) bury(ctx context.Context, e *jetstream.Event, cause error, tries int) error {
	a.warn(ctx, "failed to apply an event; sending it to the dead letters", e, cause)
	return insist(ctx, a.p.Logger, "store a dead letter", func(ctx context.Context) error {
		return a.bus.Group(a.p.Topic, a.p.Group).DeadLetter(ctx, e, cause.Error(), tries)
	})
}

func (a *applier) warn(ctx context.Context, msg string, e *jetstream.Event, cause error, more ...slog.Attr) {
	attrs := append([]slog.Attr{slog.String("projection", a.p.Name), slog.String("id", e.ID), slog.Any("error", cause)}, more...)
	//nolint:sloglint // callers pass constants
	a.p.Logger.LogAttrs(ctx, slog.LevelWarn, msg, attrs...)
}
