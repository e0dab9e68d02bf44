//go:build !linux

package bench

import "syscall"

func endWithParent() *syscall.SysProcAttr { return nil }
