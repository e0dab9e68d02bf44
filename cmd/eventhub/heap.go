package main

import (
	"os"
	"runtime"
)

// heapFloor is the size up to which the heap may grow before garbage is collected. Go collects
// whenever the heap has doubled. The heap of a hub is small and grows fast under load, so that
// would be many times a second, and each time the whole heap is looked at.
const heapFloor = 64 << 20

// keepHeapFloor lets the heap grow up to heapFloor, until release is called. It holds half of that
// as one allocation, which is never written to and therefore takes no memory, but counts for Go. An
// operator who has set GOGC decides alone.
func keepHeapFloor() (release func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	ballast := make([]byte, heapFloor/2)
	return func() { runtime.KeepAlive(ballast) }
}
