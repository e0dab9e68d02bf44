//go:build unix

package bench

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// allowFiles raises the limit of open files to n, for this process and for processes that it starts
// later.
func allowFiles(n int) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("read the limit of open files: %w", err)
	}
	want := uint64(max(n, 0))
	if want > math.MaxInt32 {
		return fmt.Errorf("%d open files exceed the range of the limit", n)
	}
	if limit.Cur >= want {
		return nil
	}
	had := limit.Max
	limit.Cur, limit.Max = want, max(limit.Max, want)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("raise the limit of open files to %d from at most %d: %w; increase the hard limit (ulimit -Hn)", n, had, err)
	}
	return nil
}
