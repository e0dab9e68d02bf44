//go:build !linux

package bench

import "time"

func pin() (unpin func()) { return func() {} }

// sleepUntil returns up to a millisecond after due, by the clock of now.
func sleepUntil(due int64) {
	if left := due - now(); left > 0 {
		<-time.After(time.Duration(left))
	}
}
