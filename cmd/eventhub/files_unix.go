//go:build unix

package main

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// noWait is the flag with which open does not wait for the writer of a FIFO.
const noWait = syscall.O_NONBLOCK

// checkOwner returns an error if a file belongs to another user. Files of root are trusted, because
// root can do anything here.
func checkOwner(info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || stat.Uid == 0 || int(stat.Uid) == os.Geteuid() {
		return nil
	}
	return fmt.Errorf("belongs to another user (uid %d)", stat.Uid)
}

// checkUnshared returns an error if others than the owner may write to a file.
func checkUnshared(info fs.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o022 != 0 {
		return fmt.Errorf("can be written by other users (mode %04o)", mode)
	}
	return nil
}
