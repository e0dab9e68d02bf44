// Package held records which locks are taken while others are held. Its types take the place of
// those of package sync in a build that "task lockorder" makes; no other code uses them.
package held

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// File is the environment variable that names the file to which each process appends the pairs that
// the process has not seen before, one a line: the lock held, the lock taken, and the lines of code
// that took them, separated by tabs. Without it, nothing is recorded.
const File = "LOCKORDER"

// Named is a type whose zero value names a lock.
type Named interface{ LockName() string }

// Lock is a sync.Mutex or sync.RWMutex that records. Readers wait for writers that wait, so that
// reading and writing have the same place in the order.
type Lock[N Named] struct{ mu sync.RWMutex }

// Lock implements sync.Locker.
func (l *Lock[N]) Lock() {
	taking[N](l)
	l.mu.Lock()
	took[N](l)
}

// TryLock is sync.Mutex.TryLock. A caller that does not wait may take locks in any order.
func (l *Lock[N]) TryLock() bool {
	ok := l.mu.TryLock()
	if ok {
		took[N](l)
	}
	return ok
}

// Unlock implements sync.Locker.
func (l *Lock[N]) Unlock() {
	released(l)
	l.mu.Unlock()
}

// RLock is sync.RWMutex.RLock.
func (l *Lock[N]) RLock() {
	taking[N](l)
	l.mu.RLock()
	took[N](l)
}

// RUnlock is sync.RWMutex.RUnlock.
func (l *Lock[N]) RUnlock() {
	released(l)
	l.mu.RUnlock()
}

// taken is a lock that a goroutine holds.
type taken struct {
	lock any // the pointer to it
	name string
	at   uintptr // the caller of Lock
}

// shard holds what some goroutines hold, by their numbers.
type shard struct {
	mu    sync.Mutex
	holds map[uint64][]taken
}

var (
	shards [64]shard
	seen   sync.Map // pairs of names

	// ofTests is in the names of files whose locks do not count: tests stop the hub with them.
	ofTests = "_test.go:"

	output = sync.OnceValue(func() *os.File {
		name := os.Getenv(File)
		if name == "" {
			return nil
		}
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600) //nolint:gosec // the program that runs the tests names the file
		if err != nil {
			panic(err)
		}
		return f
	})
)

// goroutine returns the number of the calling goroutine.
func goroutine() uint64 {
	var buf [32]byte
	text := string(buf[:runtime.Stack(buf[:], false)])
	number, _, _ := strings.Cut(strings.TrimPrefix(text, "goroutine "), " ")
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func of(goroutine uint64) *shard { return &shards[goroutine%uint64(len(shards))] }

// caller returns the line of code that called Lock.
func caller() uintptr {
	var pc [1]uintptr
	runtime.Callers(4, pc[:]) // Callers, caller, taking or took, Lock
	return pc[0]
}

func line(pc uintptr) string {
	frame, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	return frame.File + ":" + strconv.Itoa(frame.Line)
}

// taking notes which locks the goroutine holds as it is about to wait for another.
func taking[N Named](lock any) {
	me := goroutine()
	s := of(me)
	s.mu.Lock()
	holds := s.holds[me] // only this goroutine adds to it
	s.mu.Unlock()
	if len(holds) == 0 {
		return
	}
	var n N
	name := n.LockName()
	for _, outer := range holds {
		if outer.lock == lock {
			panic(fmt.Sprintf("%s is taken twice, at %s and %s", name, line(outer.at), line(caller())))
		}
		pair := [2]string{outer.name, name}
		if _, known := seen.Load(pair); known {
			continue
		}
		held := line(outer.at)
		if strings.Contains(held, ofTests) {
			continue // a test that stops the hub there
		}
		if _, known := seen.LoadOrStore(pair, true); known {
			continue
		}
		if f := output(); f != nil {
			// One write, as other processes write to the file.
			if _, err := fmt.Fprintf(f, "%s\t%s\t%s\t%s\n", outer.name, name, held, line(caller())); err != nil {
				panic(err)
			}
		}
	}
}

func took[N Named](lock any) {
	var n N
	me := goroutine()
	s := of(me)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holds == nil {
		s.holds = make(map[uint64][]taken)
	}
	s.holds[me] = append(s.holds[me], taken{lock, n.LockName(), caller()})
}

// released forgets a lock that this goroutine holds, or else another one.
func released(lock any) {
	me := goroutine()
	if of(me).release(me, lock) {
		return
	}
	for i := range shards {
		if shards[i].releaseAny(lock) {
			return
		}
	}
}

func (s *shard) releaseAny(lock any) bool {
	s.mu.Lock()
	owners := make([]uint64, 0, len(s.holds))
	for id := range s.holds {
		owners = append(owners, id)
	}
	s.mu.Unlock()
	return slices.ContainsFunc(owners, func(id uint64) bool { return s.release(id, lock) })
}

func (s *shard) release(id uint64, lock any) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	holds := s.holds[id]
	for i := len(holds) - 1; i >= 0; i-- {
		if holds[i].lock != lock {
			continue
		}
		if len(holds) == 1 {
			delete(s.holds, id)
		} else {
			// A copy, as the goroutine may read the old one in taking.
			s.holds[id] = slices.Concat(holds[:i:i], holds[i+1:])
		}
		return true
	}
	return false
}
