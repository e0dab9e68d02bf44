package jetstream

import (
	"sync/atomic"
	"time"
)

// clock is the bus's monotonic time in nanoseconds, and knows when the process stood still: its
// owner reads it regularly (Bus.watchStalls), and a reading long after the last one means that
// those did not come.
type clock struct {
	read     func() time.Time
	base     time.Time
	lastTick atomic.Int64
	limit    int64
}

func newClock(read func() time.Time, limit time.Duration) *clock {
	return &clock{read: read, base: read(), limit: int64(limit)}
}

func (c *clock) now() int64 { return int64(c.read().Sub(c.base)) }

// stalled reports whether, at now, the process is known to have stood still and nobody has dealt
// with it yet.
func (c *clock) stalled(now int64) bool { return now-c.lastTick.Load() > c.limit }

// at is a reading as a wall-clock time.
func (c *clock) at(mono int64) time.Time { return c.base.Add(time.Duration(mono)) }
