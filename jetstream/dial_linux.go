package jetstream

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// limitUnacked makes the kernel give a connection up when sent bytes stay unacknowledged for 4 s: an ack that was held
// up longer in a broken network must not reach the server later, when the event may be another member's.
func limitUnacked(_, _ string, c syscall.RawConn) error {
	var serr error
	if err := c.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 4000)
	}); err != nil {
		return err
	}
	return serr
}
