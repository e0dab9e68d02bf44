//go:build unix

package acl

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// CheckPrivate returns an error if other users can read or write a file that holds a secret. A file
// of root may be readable for its group, because a process of another user can read such a file
// through its group only.
func CheckPrivate(info fs.FileInfo) error {
	mode := info.Mode().Perm()
	open := mode & 0o077
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid == 0 && os.Geteuid() != 0 {
		open &^= 0o040
	}
	if open != 0 {
		return fmt.Errorf("accessible by other users (mode %04o)", mode)
	}
	return nil
}
