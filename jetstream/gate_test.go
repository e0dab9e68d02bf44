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
	const most, each, workers = 3, 2_000, 8
	var g gate
	var inside, worst atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				if !g.tryEnter(most) {
					if err := g.enter(t.Context(), most); err != nil {
						t.Error(err)
						return
					}
				}
				n := inside.Add(1)
				for w := worst.Load(); n > w && !worst.CompareAndSwap(w, n); w = worst.Load() {
				}
				runtime.Gosched()
				inside.Add(-1)
				g.leave()
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
	var g gate
	if !g.tryEnter(1) || g.tryEnter(1) {
		t.Fatal("one fits")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if err := g.enter(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := g.empty(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	g.leave()
	if err := g.enter(t.Context(), 1); err != nil {
		t.Error(err)
	}
}
