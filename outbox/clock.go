package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// Times of looking at clocks.
const (
	// NATS is asked for its time again after clockFresh. Where it does not answer, its last answer is good for clockUsable.
	clockFresh  = time.Second
	clockUsable = 15 * time.Second
	// skewEvery is how often the clocks of the store and of NATS are compared, skewWait how long the store may take for that,
	// and skewSay how often the log repeats that they are apart.
	skewEvery = 15 * time.Second
	skewWait  = 5 * time.Second
	skewSay   = 10 * time.Minute
)

// natsClock tells the time by the clock of NATS, in epoch milliseconds: from its last answer on, and the drainer's own clock.
// The drainer notes by it since when a record may be in the stream, for the events there have the times of that clock: no
// other clock can say where to look for an event, or how long NATS remembers its id.
type natsClock struct {
	last atomic.Pointer[clockReading]
}

// clockReading is an answer of NATS. Its own time lies between the question and the answer.
type clockReading struct {
	asked, answered time.Duration // by the drainer's clock
	said            int64
}

func (c *natsClock) earliest(at time.Duration) int64 { return c.last.Load().earliest(at) }
func (c *natsClock) latest(at time.Duration) int64   { return c.last.Load().latest(at) }

func (r *clockReading) earliest(at time.Duration) int64 {
	return r.said + (at - r.answered).Milliseconds()
}

func (r *clockReading) latest(at time.Duration) int64 {
	return r.said + (at - r.asked).Milliseconds() + 2 // both are cut off
}

// askClock asks NATS for its time.
func (d *Drainer) askClock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	asked := d.now()
	now, err := d.cfg.Bus.Now(ctx)
	if err != nil {
		return fmt.Errorf("outbox: clock of NATS: %w", err)
	}
	d.clock.last.Store(&clockReading{asked: asked, answered: d.now(), said: now.UnixMilli()})
	return nil
}

// lookAtClocks asks NATS for its time, unless it is known, and compares it with the store's now and then. It returns an error
// when the time of NATS is not known.
func (l *loop) lookAtClocks(ctx context.Context) error {
	now, last := l.now(), l.clock.last.Load()
	if last == nil || now-last.asked > clockFresh {
		if err := l.askClock(ctx); err != nil && (last == nil || now-last.asked > clockUsable) {
			return err
		}
	}
	if now >= l.skewAt {
		l.skewAt = now + skewEvery
		l.compareClocks(ctx)
	}
	return nil
}

// compareClocks tells how far the clocks of the store and of NATS are apart. When the store does not answer, the claim that
// comes next says so.
func (l *loop) compareClocks(ctx context.Context) {
	sctx, cancel := context.WithTimeout(ctx, skewWait)
	defer cancel()
	asked := l.now()
	store, err := l.cfg.Store.Now(sctx)
	if err != nil {
		return
	}
	answered := l.now()
	// The store's time lies between the question and the answer as well.
	least := time.Duration(l.clock.earliest(asked)-store.UnixMilli()) * time.Millisecond
	most := time.Duration(l.clock.latest(answered)-store.UnixMilli()) * time.Millisecond
	skew := (least + most) / 2
	l.cfg.Observer.ClockSkew(skew)
	apart := least > l.cfg.ClockSkew || most < -l.cfg.ClockSkew
	attrs := []any{slog.Duration("nats_ahead", skew.Round(10*time.Millisecond)), slog.Duration("allowed", l.cfg.ClockSkew)}
	switch {
	case apart && (!l.skewed || answered-l.skewSaid >= skewSay):
		l.skewSaid = answered
		l.log.WarnContext(ctx, "the clocks of the outbox and of NATS are apart: set them right, or allow it; times of records and of events cannot be compared", attrs...)
	case !apart && l.skewed:
		l.log.InfoContext(ctx, "the clocks of the outbox and of NATS agree again", attrs...)
	}
	l.skewed = apart
}
