package conn

import (
	"errors"
	"sync/atomic"
	"time"
)

// Clock is the bus's monotonic time in nanoseconds, and knows when the process stood still: its
// owner reads it regularly (Bus.watchStalls), and a reading long after the last one means that
// those did not come.
type Clock struct {
	read     func() time.Time
	Base     time.Time
	LastTick atomic.Int64
	Limit    int64
}

// NewClock returns a clock that begins now. The process has stood still when the clock was not
// ticked for longer than limit.
func NewClock(read func() time.Time, limit time.Duration) *Clock {
	return &Clock{read: read, Base: read(), Limit: int64(limit)}
}

// Now returns the time in nanoseconds.
func (c *Clock) Now() int64 { return int64(c.read().Sub(c.Base)) }

// Stalled reports whether, at now, the process is known to have stood still and nobody has dealt
// with it yet.
func (c *Clock) Stalled(now int64) bool { return now-c.LastTick.Load() > c.Limit }

// At is a reading as a wall-clock time.
func (c *Clock) At(mono int64) time.Time { return c.Base.Add(time.Duration(mono)) }

// ErrStalled says that the process stood still, so that others may have gone on meanwhile.
var ErrStalled = errors.New("the process stood still")
