package bench

import "syscall"

// endWithParent makes the child end if this process dies without stopping it.
func endWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} }
