//go:build !linux

package bench

import "time"

func pin() (unpin func()) { return func() {} }

// sleepUntil returns when now() is due, up to a millisecond late.
func sleepUntil(due int64) {
	if left := due - now(); left > 0 {
		<-time.After(time.Duration(left))
	}
}
