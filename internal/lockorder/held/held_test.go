package held

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "held")
	if err != nil {
		panic(err)
	}
	ofTests = "no such file"
	_ = os.Setenv(File, filepath.Join(dir, "seen"))
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

type (
	nameA struct{}
	nameB struct{}
	nameC struct{}
)

func (nameA) LockName() string { return "A" }
func (nameB) LockName() string { return "B" }
func (nameC) LockName() string { return "C" }

// pairs returns what is in the file, without the lines of code.
func pairs(t *testing.T) (pairs []string) {
	t.Helper()
	text, err := os.ReadFile(os.Getenv(File))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Split(line, "\t")
		for _, at := range fields[2:] {
			if !strings.Contains(at, "held_test.go:") {
				t.Errorf("%q is not a line of this test", at)
			}
		}
		pairs = append(pairs, fields[0]+fields[1])
	}
	return pairs
}

func TestPairs(t *testing.T) {
	seen.Clear()
	if err := os.Truncate(os.Getenv(File), 0); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var a Lock[nameA]
	var b, b2 Lock[nameB]
	var c Lock[nameC]
	want := ""
	expect := func(what, more string) {
		t.Helper()
		want += more
		if got := strings.Join(pairs(t), " "); got != strings.TrimSpace(want) {
			t.Errorf("%s: the pairs are %q, want %q", what, got, want)
		}
	}
	alone := func(l sync.Locker) {
		l.Lock()
		defer l.Unlock()
	}
	alone(&a)
	alone(&b)
	expect("one after the other", "")
	a.Lock()
	if b.TryLock() {
		b.Unlock()
	}
	expect("without waiting", "")
	b.RLock()
	expect("nested", "AB")
	c.Lock()
	expect("three", " AC BC")
	b.RUnlock()
	a.Unlock()
	b2.Lock()
	expect("under the last", " CB")
	b.Lock()
	expect("two of a kind", " BB")
	b.Unlock()
	b2.Unlock()
	done := make(chan struct{})
	go func() { c.Unlock(); close(done) }()
	<-done
	alone(&a)
	expect("unlocked by another goroutine", "")
	cond := sync.Cond{L: &a}
	b.Lock()
	a.Lock()
	go func() { a.Lock(); cond.Signal(); a.Unlock() }()
	cond.Wait()
	a.Unlock()
	b.Unlock()
	expect("a condition", " BA")
	for i := range shards {
		if n := len(shards[i].holds); n != 0 {
			t.Errorf("%d goroutines hold locks at the end", n)
		}
	}
}

func TestTakenTwice(t *testing.T) {
	var a Lock[nameA]
	a.RLock()
	defer a.RUnlock()
	defer func() {
		if text, _ := recover().(string); !strings.Contains(text, "A is taken twice") {
			t.Errorf("panic %q", text)
		}
	}()
	a.RLock()
}
