package conn

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// limitUnacked makes the kernel give a connection up when sent bytes stay unacknowledged for so
// long: an ack that was held up longer in a broken network must not reach the server later, when
// the event may be another member's.
func limitUnacked(limit time.Duration) func(_, _ string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var serr error
		if err := c.Control(func(fd uintptr) {
			serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit.Milliseconds()))
		}); err != nil {
			return err
		}
		return serr
	}
}
