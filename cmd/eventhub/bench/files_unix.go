//go:build unix

package bench

import (
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// allowFiles lets this process, and those that it starts from now on, have so many files open.
func allowFiles(n int) error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("the limit of open files: %w", err)
	}
	want := uint64(max(n, 0))
	if want > math.MaxInt32 {
		return fmt.Errorf("%d open files are too many", n)
	}
	if limit.Cur >= want {
		return nil
	}
	had := limit.Max
	limit.Cur, limit.Max = want, max(limit.Max, want)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("%d files must be open at a time, and %d are allowed: %w: raise the limit (ulimit -Hn)", n, had, err)
	}
	return nil
}
