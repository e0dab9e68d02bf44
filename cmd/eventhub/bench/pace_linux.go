package bench

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// pin gives the calling goroutine a thread of its own until the returned function is called: sleepUntil then blocks that
// thread alone.
func pin() (unpin func()) {
	runtime.LockOSThread()
	return runtime.UnlockOSThread
}

// sleepUntil returns when now() is due, some 50 µs late. Go's timers are up to 1 ms late in a process that is idle,
// which would be most of what is measured here.
func sleepUntil(due int64) {
	for left := due - now(); left > 0; left = due - now() {
		wait := unix.NsecToTimespec(left)
		_ = unix.Nanosleep(&wait, nil) // interrupted: sleep on
	}
}
