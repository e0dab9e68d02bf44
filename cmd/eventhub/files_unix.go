//go:build unix

package main

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"slices"
	"syscall"
)

// maxFiles returns how many files and connections this process may have open, which the runtime has
// raised as far as the system lets it.
func maxFiles() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > math.MaxInt32 {
		return math.MaxInt32
	}
	return int(limit.Cur)
}

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

// checkUnshared returns an error if others than the owner may write to a file. A further group of
// this process (id -G) is trusted: it is how Kubernetes shares a volume with a container (fsGroup).
func checkUnshared(info fs.FileInfo) error {
	mode := info.Mode().Perm()
	if mode&0o002 != 0 || mode&0o020 != 0 && !ofFurtherGroup(info) {
		return fmt.Errorf("can be written by other users (mode %04o)", mode)
	}
	return nil
}

// withdraw takes from a further group of this process what the group may do with a file of this
// user's, for Kubernetes grants the group access to all files of a volume at each start.
func withdraw(path string, info fs.FileInfo) error {
	stat, ok := info.Sys().(*syscall.Stat_t)
	mode := info.Mode()
	if !ok || int(stat.Uid) != os.Geteuid() || mode.Perm()&0o070 == 0 || !ofFurtherGroup(info) || !mode.IsDir() && !mode.IsRegular() {
		return nil
	}
	if err := os.Chmod(path, mode&^0o070); err != nil {
		return fmt.Errorf("is shared with a group: %w", cause(err))
	}
	return nil
}

// ofFurtherGroup reports whether a file's group is one of this process's besides its first.
func ofFurtherGroup(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return false
	}
	first, further := ownGroups()
	return int(stat.Gid) != first && slices.Contains(further, int(stat.Gid))
}

// ownGroups returns the groups of this process. Tests replace it.
var ownGroups = func() (first int, further []int) {
	further, err := os.Getgroups()
	if err != nil {
		return os.Getegid(), nil
	}
	return os.Getegid(), further
}
