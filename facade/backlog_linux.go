package facade

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// received returns how many bytes the kernel has received of a connection and nobody has read, or 0
// when that cannot be told.
func received(conn net.Conn) (n int) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return 0
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if n, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ); err != nil {
			n = 0
		}
	})
	return n
}
