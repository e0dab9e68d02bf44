package main

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"eventhub/sdk/go/wire"
)

// disk is a small file system of the test's own.
type disk struct {
	t   *testing.T
	dir string
	// mounted is false where the test may not mount: then the kernel bounds the files of the hub
	// instead, whose writes fail just so.
	mounted bool
}

const (
	largeDisk = "size=2g" // none of it is taken before it is written to
	// smallFile is too small for a block of a stream that has some events already.
	smallFile = 16 << 10
)

func newDisk(t *testing.T) *disk {
	t.Helper()
	d := &disk{t: t, dir: t.TempDir()}
	err := unix.Mount("tmpfs", d.dir, "tmpfs", 0, largeDisk)
	switch {
	case err == nil:
		d.mounted = true
		t.Cleanup(func() {
			if err := unix.Unmount(d.dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	case !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES):
		t.Fatal(err)
	}
	return d
}

// fill leaves no room: the disk becomes as small as what is on it.
func (d *disk) fill(n *node) {
	d.t.Helper()
	if !d.mounted {
		d.limitFiles(n, smallFile)
		return
	}
	eventually(d.t, "the disk is full", func() bool {
		var st unix.Statfs_t
		if err := unix.Statfs(d.dir, &st); err != nil {
			d.t.Fatal(err)
		}
		used := (st.Blocks - st.Bfree) * uint64(st.Bsize)
		// else more was written meanwhile
		return unix.Mount("", d.dir, "", unix.MS_REMOUNT, "size="+strconv.FormatUint(used, 10)) == nil
	})
}

// enlarge makes room.
func (d *disk) enlarge(n *node) {
	d.t.Helper()
	if !d.mounted {
		d.limitFiles(n, unix.RLIM_INFINITY)
		return
	}
	if err := unix.Mount("", d.dir, "", unix.MS_REMOUNT, largeDisk); err != nil {
		d.t.Fatal(err)
	}
}

func (d *disk) limitFiles(n *node, most uint64) {
	d.t.Helper()
	limit := unix.Rlimit{Cur: most, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(n.cmd.Process.Pid, unix.RLIMIT_FSIZE, &limit, nil); err != nil {
		d.t.Fatal(err)
	}
}

// publishUntil publishes numbers from n on, each once, until want says so of an outcome. It returns
// the next number, and those that were confirmed.
func publishUntil(t *testing.T, c *wire.Conn, topic string, n int, want func(error) bool) (next int, confirmed []int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*noticed)
	defer cancel()
	padding := strings.Repeat(" ", 2_000)
	for ; ; n++ {
		_, err := c.Publish(ctx, topic, []byte(strconv.Itoa(n)+padding), wire.PublishOptions{})
		if ctx.Err() != nil {
			t.Fatalf("event %d: %v", n, err)
		}
		if err == nil {
			confirmed = append(confirmed, n)
		}
		if want(err) {
			return n + 1, confirmed
		}
	}
}

// A disk becomes full, and then larger. The hub reports within a minute that it cannot store
// events, and stores events again by itself when there is room. Each confirmed event is stored
// once. Events that a group acknowledged, also while the disk was full, do not come again; all
// others do.
func TestFullDiskThatIsMadeLarger(t *testing.T) {
	t.Parallel()
	d := newDisk(t)
	n := startNode(t, "--data="+filepath.Join(d.dir, "data"))
	c := n.dial()
	events := subscribeTo(t, c, "numbers", "g", wire.SubscribeOptions{MaxInFlight: 10_000})
	slow := subscribeTo(t, c, "numbers", "slow", wire.SubscribeOptions{MaxInFlight: 1})
	next, confirmed := publishUntil(t, c, "numbers", 0, func(error) bool { return len(events.events) >= 20 })
	publishTo(t, c, "quiet", `"before"`)
	shows(t, n.ops+"/readyz", http.StatusOK, `"bus":"ok"`)

	d.fill(n)
	fails := func(err error) bool { return err != nil }
	next, more := publishUntil(t, c, "numbers", next, fails)
	confirmed = append(confirmed, more...)
	shows(t, n.ops+"/readyz", http.StatusServiceUnavailable, "cannot be written: ")
	shows(t, n.ops+"/metrics", http.StatusOK, "eventhub_streams_failed 1\n")
	for range 5 { // it is delivered one after the other
		ackAll(t, slow.take(1))
	}
	settled := events.take(10)
	ackAll(t, settled)

	d.enlarge(n)
	shows(t, n.ops+"/readyz", http.StatusOK, `"bus":"ok"`)
	succeeds := func(err error) bool { return err == nil }
	_, more = publishUntil(t, c, "numbers", next, succeeds)
	confirmed = append(confirmed, more...)
	shows(t, n.ops+"/metrics", http.StatusOK, "eventhub_server_restarts_total 1\n")

	all := subscribeTo(t, c, "numbers", "audit", wire.SubscribeOptions{From: "earliest", MaxInFlight: 10_000})
	marker := publishTo(t, c, "numbers", "-1")
	var stored []int
	for e := all.next(); e.ID != marker; e = all.next() {
		stored = append(stored, number(t, e))
	}
	if !slices.Equal(slices.Compact(slices.Clone(stored)), stored) {
		t.Errorf("an event is there twice: %v", stored)
	}
	for _, n := range confirmed {
		if !slices.Contains(stored, n) {
			t.Errorf("event %d was confirmed and is lost", n)
		}
	}
	left := map[int]bool{-1: true}
	for _, n := range stored {
		left[n] = true
	}
	for i := range settled {
		delete(left, number(t, settled[i]))
	}
	for drop := len(events.events); drop > 0; drop-- {
		events.next() // of a lease from before the restart
	}
	other := subscribeTo(t, n.dial(), "numbers", "g", wire.SubscribeOptions{MaxInFlight: 10_000})
	if err := c.Close(); err != nil { // it gives back what it has
		t.Fatal(err)
	}
	for len(left) > 0 {
		e := other.next()
		k := number(t, e)
		if !left[k] {
			t.Errorf("event %d came, which was acknowledged", k)
		}
		delete(left, k)
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	n.terminate()
}
