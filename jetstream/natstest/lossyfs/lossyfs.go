//go:build linux

// Package lossyfs gives tests a file system in memory that loses, at a crash, what was not synced.
// A process that keeps its files there can be ended as a crash of its machine would end it: Crash
// kills the process and drops the unsynced data at the same instant.
//
// The model is ext4 with its default options (data=ordered, delayed allocation, auto_da_alloc), as
// far as a program may rely on it:
//
//   - Data of a file is safe after fsync, fdatasync, or a write to a file that was opened with
//     O_SYNC or O_DSYNC. Data that was written later is not, and neither is the size that it gave
//     the file.
//   - Changes of directories and truncations go to a journal, in their order. They are safe when
//     the journal is committed. fsync commits the whole journal if the file or directory was
//     changed since the last commit, so a new file that was synced has its name, and its
//     directories have theirs.
//   - A rename over an existing file takes the data of the new file along at the next commit. A
//     rename to a new name does not: the file may be there and empty.
//   - ext4 also commits by itself, every 5 s, and writes data back by itself, in any order of
//     pages. A crash with a source of random numbers therefore keeps a random part of the journal's
//     beginning, and random pages of the unsynced data. A crash without one keeps nothing.
//
// XFS and btrfs give the same guarantees for the first three. POSIX gives less: there, a name is
// safe only after fsync of its directory. A disk that loses its own cache in spite of a flush is
// not part of the model.
package lossyfs

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// page is the unit in which unsynced data is written back.
const page = 4096

// maxWrite bounds one write that the kernel passes on.
const maxWrite = 1 << 20

// System is a mounted file system. Its methods may be called concurrently.
type System struct {
	tb     testing.TB
	dir    string
	server *fuse.Server

	mu      sync.Mutex
	root    *object
	objects uint64          // how many were made; each has a number of its own
	tx      uint64          // the running transaction of the journal
	journal []func()        // its changes, in their order, to what is stored
	along   map[*object]int // objects whose data is stored with the transaction, and how much
	frozen  chan struct{}   // closed when operations may fail, at a crash; else nil
	room    int64           // bytes that may still be written; negative: no bound
	syncs   int
	lost    int64
}

// Mount mounts an empty file system for the time of the test. It needs /dev/fuse, and either root
// or fusermount3; without them the test fails.
func Mount(tb testing.TB) *System {
	tb.Helper()
	s := &System{tb: tb, dir: tb.TempDir(), along: map[*object]int{}, room: -1, tx: 1}
	s.root = s.newObject(unix.S_IFDIR | 0o755)
	if err := s.mount(); err != nil {
		tb.Fatalf("mount a file system in user space: %v; it needs /dev/fuse, and either root or fusermount3", err)
	}
	tb.Cleanup(func() {
		if err := s.unmount(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Dir is the directory at which it is mounted.
func (s *System) Dir() string { return s.dir }

// Syncs is how often files and directories were synced.
func (s *System) Syncs() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.syncs
}

// Lost is how many bytes of unsynced data all crashes have dropped.
func (s *System) Lost() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lost
}

// SetRoom bounds what may still be written, in bytes, as a full disk does. A negative number means
// no bound.
func (s *System) SetRoom(bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.room = bytes
}

// Crash ends the machine: kill ends all processes that use the file system, by SIGKILL, and wait
// returns when they are gone. From the moment before kill, nothing reaches the file system any
// more. Afterwards the file system has what was stored, and, with a source of random numbers, a
// part of what was not.
func (s *System) Crash(random *rand.Rand, kill, wait func()) {
	s.tb.Helper()
	Crash(s.tb, random, kill, wait, s)
}

// Crash crashes several file systems at the same instant.
func Crash(tb testing.TB, random *rand.Rand, kill, wait func(), all ...*System) {
	tb.Helper()
	for _, s := range all {
		s.mu.Lock()
		s.frozen = make(chan struct{})
		s.mu.Unlock()
	}
	kill()
	for _, s := range all {
		// Threads that are killed come back from the kernel only when their operations have ended.
		close(s.frozen)
	}
	wait()
	for _, s := range all {
		if err := s.recover(random); err != nil {
			tb.Fatal(err)
		}
	}
}

// recover mounts what is left after a crash.
func (s *System) recover(random *rand.Rand) error {
	if err := s.unmount(); err != nil {
		return err
	}
	s.mu.Lock()
	if random != nil {
		for _, change := range s.journal[:random.IntN(len(s.journal)+1)] {
			change()
		}
	}
	s.journal, s.along = nil, map[*object]int{}
	s.tx++
	s.lost += s.root.revert(random, map[*object]bool{})
	s.frozen = nil
	s.mu.Unlock()
	return s.mount()
}

func (s *System) mount() error {
	server, err := fs.Mount(s.dir, &node{sys: s, obj: s.root}, &fs.Options{
		MountOptions: fuse.MountOptions{
			FsName: "lossyfs", Name: "lossyfs", DirectMount: true, MaxWrite: maxWrite,
			DisableXAttrs: true, DisableReadDirPlus: true,
		},
		RootStableAttr: &fs.StableAttr{Ino: s.root.number},
	})
	s.server = server
	return err
}

func (s *System) unmount() error {
	err := s.server.Unmount()
	if err != nil {
		// A process of the test may still look at a file.
		if detached := unix.Unmount(s.dir, unix.MNT_DETACH); detached != nil {
			return fmt.Errorf("unmount %s: %w", s.dir, errors.Join(err, detached))
		}
	}
	s.server.Wait()
	return nil
}

// enter begins an operation on the file system. It fails at a crash, and then only when all
// processes have been killed: none can see the failure.
func (s *System) enter() (leave func(), failed bool) {
	s.mu.Lock()
	if frozen := s.frozen; frozen != nil {
		s.mu.Unlock()
		<-frozen
		return nil, true
	}
	return s.mu.Unlock, false
}

// log adds a change to the running transaction. The objects belong to the transaction from now on.
func (s *System) log(change func(), objects ...*object) {
	s.journal = append(s.journal, change)
	for _, o := range objects {
		o.tx = s.tx
	}
}

// commit stores the running transaction.
func (s *System) commit() {
	for _, change := range s.journal {
		change()
	}
	for o, size := range s.along {
		o.store(min(size, len(o.data)))
	}
	s.journal = nil
	clear(s.along)
	s.tx++
}

// sync is fsync of an object.
func (s *System) sync(o *object) {
	s.syncs++
	if o.tx == s.tx {
		s.commit()
	}
	o.store(len(o.data))
}

// Unsynced returns the paths of files of a name that a crash would lose, or would empty.
func (s *System) Unsynced(name string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.root.unsynced("", name, true)
}
