package conn

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestGateBoundsAndWakes(t *testing.T) {
	t.Parallel()
	const most, each, workers = 3, 2_000, 8
	var g Gate
	var inside, worst atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				if !g.TryAcquire(most) {
					if err := g.Acquire(t.Context(), most); err != nil {
						t.Error(err)
						return
					}
				}
				n := inside.Add(1)
				for w := worst.Load(); n > w && !worst.CompareAndSwap(w, n); w = worst.Load() {
				}
				runtime.Gosched()
				inside.Add(-1)
				g.Release()
			}
		})
	}
	wg.Wait()
	if worst.Load() > most {
		t.Errorf("%d were inside at once", worst.Load())
	}
	if err := g.Empty(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestGateWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var g Gate
	if !g.TryAcquire(1) || g.TryAcquire(1) {
		t.Fatal("one fits")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := g.Acquire(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := g.Empty(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	g.Release()
	if err := g.Acquire(t.Context(), 1); err != nil {
		t.Error(err)
	}
}
