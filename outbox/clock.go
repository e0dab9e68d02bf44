package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// Timing of clock reads.
const (
	// A reading of the NATS clock is refreshed once it is older than clockFresh. While NATS does
	// not answer, the last reading stays usable for clockUsable.
	clockFresh  = time.Second
	clockUsable = 15 * time.Second
	// skewEvery is the interval between comparisons of the store's clock with the NATS clock.
	// skewWait is the timeout of one comparison. skewSay is the interval between repeated warnings
	// about the skew.
	skewEvery = 15 * time.Second
	skewWait  = 5 * time.Second
	skewSay   = 10 * time.Minute
)

// natsClock estimates the current NATS time, in epoch milliseconds, from the last answer of NATS
// and the drainer's monotonic clock. The drainer uses NATS time to note when a publish of a record
// may have begun. Events in the stream carry NATS time, so only that clock tells where to search
// for an event and how long NATS remembers an event's id.
type natsClock struct {
	last atomic.Pointer[clockReading]
}

// clockReading is one answer of NATS. NATS read its clock at some moment between asked and
// answered.
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
	return r.said + (at - r.asked).Milliseconds() + 2 // both times are truncated to milliseconds
}

// askClock asks NATS for its time.
func (d *Drainer) askClock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	asked := d.now()
	now, err := d.cfg.Bus.Now(ctx)
	if err != nil {
		return fmt.Errorf("outbox: read the NATS clock: %w", err)
	}
	d.clock.last.Store(&clockReading{asked: asked, answered: d.now(), said: now.UnixMilli()})
	return nil
}

// lookAtClocks refreshes the NATS time when it is stale and, every skewEvery, compares it with the
// store's clock. It returns an error when no usable NATS time is known.
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

// compareClocks reports the skew between the store's clock and the NATS clock. It ignores an error
// of the store, because the next claim reports the same error.
func (l *loop) compareClocks(ctx context.Context) {
	sctx, cancel := context.WithTimeout(ctx, skewWait)
	defer cancel()
	asked := l.now()
	store, err := l.cfg.Store.Now(sctx)
	if err != nil {
		return
	}
	answered := l.now()
	// The store also read its clock at some moment between asked and answered.
	least := time.Duration(l.clock.earliest(asked)-store.UnixMilli()) * time.Millisecond
	most := time.Duration(l.clock.latest(answered)-store.UnixMilli()) * time.Millisecond
	skew := (least + most) / 2
	l.cfg.Observer.ClockSkew(skew)
	apart := least > l.cfg.ClockSkew || most < -l.cfg.ClockSkew
	attrs := []slog.Attr{slog.Duration("nats_ahead", skew.Round(10*time.Millisecond)), slog.Duration("allowed", l.cfg.ClockSkew)}
	switch {
	case apart && (!l.skewed || answered-l.skewSaid >= skewSay):
		l.skewSaid = answered
		l.often.Log(ctx, slog.LevelWarn, "clock skew between the outbox and NATS exceeds the limit; correct the clocks or raise the limit", "", attrs...)
	case !apart && l.skewed:
		l.often.Log(ctx, slog.LevelInfo, "clock skew between the outbox and NATS is back within the limit", "", attrs...)
	}
	l.skewed = apart
}
