package bench

import "syscall"

// endWithParent ends a child when this process dies without having stopped it.
func endWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} }
