package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// limitUnacked makes the kernel give connections of a listener up when sent bytes stay
// unacknowledged for unackedLimit. Accepted connections inherit the option of their listener.
func limitUnacked(_, _ string, c syscall.RawConn) error {
	var serr error
	if err := c.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unackedLimit.Milliseconds()))
	}); err != nil {
		return err
	}
	return serr
}
