package main

import (
	"runtime"
	"testing"
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
