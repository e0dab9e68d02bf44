package facade

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// received returns how many bytes of a connection the kernel has received and nobody has read, or 0
// when the kernel does not tell.
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
