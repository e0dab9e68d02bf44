package conn

import (
	"context"
	"sync"
	"sync/atomic"
)

// Gate bounds how much is under way for one owner, and lets it wait until nothing is. Acquiring and
// releasing cost an atomic operation each while nobody waits. All may be called concurrently; it is
// for few waiters, for each release wakes all.
type Gate struct {
	inside  atomic.Int64
	waiters atomic.Int64

	mu     sync.Mutex
	change chan struct{} // closed at the next release, when somebody waits
}

// TryAcquire counts one more, unless limit are there.
func (g *Gate) TryAcquire(limit int) bool {
	for {
		n := g.inside.Load()
		if n >= int64(limit) {
			return false
		}
		if g.inside.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// Acquire waits until fewer than limit are there, and counts one more.
func (g *Gate) Acquire(ctx context.Context, limit int) error {
	return g.await(ctx, func() bool { return g.TryAcquire(limit) })
}

// Empty waits until nobody is inside.
func (g *Gate) Empty(ctx context.Context) error {
	return g.await(ctx, func() bool { return g.inside.Load() == 0 })
}

// Release counts one less, and wakes all that wait.
func (g *Gate) Release() {
	g.inside.Add(-1)
	if g.waiters.Load() == 0 {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.change != nil {
		close(g.change)
		g.change = nil
	}
}

// await waits for releases until ready. Who has counted itself a waiter before it looks cannot miss
// one: either it sees that the other has left, or the other sees that it waits.
func (g *Gate) await(ctx context.Context, ready func() bool) error {
	g.waiters.Add(1)
	defer g.waiters.Add(-1)
	for {
		g.mu.Lock()
		if g.change == nil {
			g.change = make(chan struct{})
		}
		change := g.change
		g.mu.Unlock()
		if ready() {
			return nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
