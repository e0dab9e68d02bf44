package main

import (
	"runtime"
	"testing"
	"time"
)

// Not parallel: the heap is one for the process.
func TestHeapFloor(t *testing.T) {
	next := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.NextGC
	}
	t.Setenv("GOGC", "")
	release := keepHeapFloor()
	if n := next(); n < heapFloor {
		t.Errorf("garbage is collected at %d bytes, want at least %d", n, heapFloor)
	}
	release()
	t.Setenv("GOGC", "100")
	least := next()
	release = keepHeapFloor()
	if n := next(); n > least+heapFloor/2 {
		t.Errorf("with GOGC, garbage is collected at %d bytes, and at %d before", n, least)
	}
	release()
}

// Not parallel, for the same reason. A heap that was large and is idle shrinks.
func TestAnIdleHeapShrinks(t *testing.T) {
	used := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	func() {
		large := make([][]byte, 3*heapFloor>>10)
		for i := range large {
			large[i] = make([]byte, 1<<10)
		}
		runtime.GC() // the next one, by itself, is at twice this size
		runtime.KeepAlive(large)
	}()
	if n := used(); n < 2*heapFloor {
		t.Fatalf("%d bytes are used", n)
	}
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		shrinkHeap(stop, 50*time.Millisecond)
	}()
	waitFor(t, "the garbage is collected", func() bool { return used() < heapFloor })
	close(stop)
	<-ended
}
