package model

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// disk is a small file system in memory, for the store of one node.
type disk struct {
	tb  testing.TB
	dir string
}

const largeDisk = "size=2g" // none of it is taken before it is written to

// newDisk mounts a disk for the time of the test, as root only: nil otherwise.
func newDisk(tb testing.TB) *disk {
	tb.Helper()
	d := &disk{tb: tb, dir: tb.TempDir()}
	if err := unix.Mount("tmpfs", d.dir, "tmpfs", 0, largeDisk); err != nil {
		tb.Logf("the fault diskfull is left out: mount: %v", err)
		return nil
	}
	tb.Cleanup(func() {
		if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
			tb.Error(err)
		}
	})
	return d
}

// fill leaves no room: the disk becomes as small as what is on it.
func (d *disk) fill() {
	for range 1_000 {
		var st unix.Statfs_t
		if err := unix.Statfs(d.dir, &st); err != nil {
			d.tb.Fatal(err)
		}
		used := (st.Blocks - st.Bfree) * uint64(st.Bsize)
		// else more was written meanwhile
		if unix.Mount("", d.dir, "", unix.MS_REMOUNT, "size="+strconv.FormatUint(used, 10)) == nil {
			d.mustBeFull()
			return
		}
	}
	d.tb.Error("the disk cannot be filled")
}

// mustBeFull fails the test when there is room for a file.
func (d *disk) mustBeFull() {
	path := filepath.Join(d.dir, "probe")
	if err := os.WriteFile(path, make([]byte, 64<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		d.tb.Errorf("the disk is not full: %v", err)
	}
	_ = os.Remove(path)
}

// enlarge makes room.
func (d *disk) enlarge() {
	if err := unix.Mount("", d.dir, "", unix.MS_REMOUNT, largeDisk); err != nil {
		d.tb.Fatal(err)
	}
}
