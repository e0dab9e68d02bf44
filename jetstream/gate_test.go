package jetstream

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
	var g gate
	var inside, worst atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				if !g.tryAcquire(most) {
					if err := g.acquire(t.Context(), most); err != nil {
						t.Error(err)
						return
					}
				}
				n := inside.Add(1)
				for w := worst.Load(); n > w && !worst.CompareAndSwap(w, n); w = worst.Load() {
				}
				runtime.Gosched()
				inside.Add(-1)
				g.release()
			}
		})
	}
	wg.Wait()
	if worst.Load() > most {
		t.Errorf("%d were inside at once", worst.Load())
	}
	if err := g.empty(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestGateWaitEndsWithItsContext(t *testing.T) {
	t.Parallel()
	var g gate
	if !g.tryAcquire(1) || g.tryAcquire(1) {
		t.Fatal("one fits")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := g.acquire(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := g.empty(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	g.release()
	if err := g.acquire(t.Context(), 1); err != nil {
		t.Error(err)
	}
}
