//go:build !linux

package main

import "syscall"

// limitUnacked does nothing where the kernel has no such limit. The kernel then gives up a client
// that has vanished after its own time, often many minutes.
func limitUnacked(_, _ string, _ syscall.RawConn) error { return nil }
