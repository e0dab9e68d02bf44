package bench

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// pin locks the calling goroutine to an OS thread until unpin is called, so that sleepUntil blocks
// only that thread.
func pin() (unpin func()) {
	runtime.LockOSThread()
	return runtime.UnlockOSThread
}

// sleepUntil returns about 50 µs after due, by the clock of now. Go's timers are up to 1 ms late in
// an idle process, which would dominate the measurement.
func sleepUntil(due int64) {
	for left := due - now(); left > 0; left = due - now() {
		wait := unix.NsecToTimespec(left)
		_ = unix.Nanosleep(&wait, nil) // an interrupted sleep continues
	}
}
