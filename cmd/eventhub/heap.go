package main

import (
	"os"
	"runtime"
	"runtime/metrics"
	"sync"
	"time"
)

// heapFloor is the size up to which the heap may grow before garbage is collected. Go collects
// whenever the heap has doubled. The heap of a hub is small and grows fast under load, so that
// would be many times a second, and each time the whole heap is looked at.
const heapFloor = 64 << 20

// heapRest is how long a heap above heapFloor may hold garbage. Go alone would wait until the heap
// has doubled, or for heapRestMost, so a hub whose clients have gone would keep what these needed.
const (
	heapRest     = 5 * time.Second
	heapRestMost = 2 * time.Minute
)

// keepHeapFloor lets the heap grow up to heapFloor, and has it shrink, until release is called. It
// holds half of heapFloor as one allocation, which is never written to and therefore takes no
// memory, but counts for Go. An operator who has set GOGC decides alone.
func keepHeapFloor() (release func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	ballast := make([]byte, heapFloor/2)
	stop := make(chan struct{})
	var shrinking sync.WaitGroup
	shrinking.Go(func() { shrinkHeap(stop, heapRest) })
	return func() {
		close(stop)
		shrinking.Wait()
		runtime.KeepAlive(ballast)
	}
}

// shrinkHeap collects garbage that nothing else collects within a time, while the heap is above
// heapFloor. Where that frees less than a tenth, the next time is twice as long.
func shrinkHeap(stop <-chan struct{}, within time.Duration) {
	rest := within
	timer := time.NewTimer(rest)
	defer timer.Stop()
	now := []metrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}, {Name: "/memory/classes/heap/objects:bytes"}}
	for cycles := uint64(0); ; {
		select {
		case <-stop:
			return
		case <-timer.C:
		}
		metrics.Read(now)
		used := now[1].Value.Uint64()
		switch {
		case now[0].Value.Uint64() != cycles:
			rest = within
		case used > heapFloor:
			runtime.GC()
			metrics.Read(now)
			if rest = min(2*rest, heapRestMost); now[1].Value.Uint64() < used-used/10 {
				rest = within
			}
		}
		cycles = now[0].Value.Uint64()
		timer.Reset(rest)
	}
}
