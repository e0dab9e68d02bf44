//go:build !linux

package conn

import (
	"syscall"
	"time"
)

// limitUnacked does nothing where the kernel has no such limit: a broken connection is noticed by
// NATS pings, within 15 s.
func limitUnacked(time.Duration) func(_, _ string, _ syscall.RawConn) error { return nil }
