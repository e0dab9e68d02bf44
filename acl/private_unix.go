//go:build unix

package acl

import (
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
)

// CheckPrivate returns an error if other users can read or write a file that holds a secret. A file
// of root may be readable for its group, because a process of another user can read such a file
// through its group only. If this process is root's, the group must be a further group of the
// process, as Kubernetes has it (fsGroup), or the group of root with a file that nobody may write.
func CheckPrivate(info fs.FileInfo) error {
	mode := info.Mode().Perm()
	open := mode & 0o077
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && stat.Uid == 0 && open&0o040 != 0 {
		groups, err := os.Getgroups()
		if err != nil {
			return fmt.Errorf("accessible by its group, and the groups of this process are unknown: %w", err)
		}
		if groupMayRead(mode, int(stat.Gid), os.Geteuid(), os.Getegid(), groups) {
			open &^= 0o040
		}
	}
	if open != 0 {
		return fmt.Errorf("accessible by other users (mode %04o)", mode)
	}
	return nil
}

// groupMayRead reports whether a file of root with this mode and group may be readable for the
// group, in a process of this user, first group and further groups.
func groupMayRead(mode fs.FileMode, group, user, first int, further []int) bool {
	switch {
	case user != 0:
		return true
	case group == first:
		return group == 0 && mode&0o222 == 0
	default:
		return slices.Contains(further, group)
	}
}
