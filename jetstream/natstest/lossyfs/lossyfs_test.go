//go:build linux

package lossyfs

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// power cuts the power: no process uses the file system.
func power(s *System, random *rand.Rand) { s.Crash(random, func() {}, func() {}) }

func save(t *testing.T, path, text string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

func synced(t *testing.T, f *os.File) {
	t.Helper()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	closed(t, f)
}

func closed(t *testing.T, f *os.File) {
	t.Helper()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// has wants a file with a text, or none for "-".
func has(t *testing.T, path, text string) {
	t.Helper()
	data, err := os.ReadFile(path)
	switch {
	case text == "-" && errors.Is(err, fs.ErrNotExist):
	case err != nil || text == "-" || string(data) != text:
		t.Errorf("%s: %q, %v; want %q", filepath.Base(path), data, err, text)
	}
}

func TestWhatACrashKeeps(t *testing.T) {
	t.Parallel()
	s := Mount(t)
	at := func(name string) string { return filepath.Join(s.Dir(), name) }
	if err := os.MkdirAll(at("a/b"), 0o700); err != nil {
		t.Fatal(err)
	}
	synced(t, save(t, at("a/b/synced"), "1", 0))
	closed(t, save(t, at("written"), "1", 0))
	closed(t, save(t, at("always"), "1", unix.O_SYNC)) // and it commits the name of the one before
	closed(t, save(t, at("a/b/synced"), "2", os.O_APPEND))
	closed(t, save(t, at("unnamed"), "1", 0))
	power(s, nil)
	has(t, at("a/b/synced"), "1")
	has(t, at("written"), "")
	has(t, at("always"), "1")
	has(t, at("unnamed"), "-")

	// A rename over a file takes the data along, and a rename to a new name does not.
	closed(t, save(t, at("new"), "2", os.O_TRUNC))
	closed(t, save(t, at("other"), "2", 0))
	for from, to := range map[string]string{"new": "always", "other": "fresh"} {
		if err := os.Rename(at(from), at(to)); err != nil {
			t.Fatal(err)
		}
	}
	synced(t, save(t, at("commit"), "1", 0))
	if err := os.Remove(at("commit")); err != nil {
		t.Fatal(err)
	}
	power(s, nil)
	has(t, at("always"), "2")
	has(t, at("fresh"), "")
	has(t, at("commit"), "1") // its removal was not committed

	// A truncation that was not committed is undone.
	closed(t, save(t, at("always"), "", os.O_TRUNC))
	power(s, nil)
	has(t, at("always"), "2")
	closed(t, save(t, at("always"), "33", os.O_TRUNC|unix.O_SYNC))
	power(s, nil)
	has(t, at("always"), "33")
}

func TestCrashWithRandomWriteBack(t *testing.T) {
	t.Parallel()
	s := Mount(t)
	random := rand.New(rand.NewPCG(1, 1))
	old, fresh := bytes.Repeat([]byte("a"), 64*page), bytes.Repeat([]byte("b"), 64*page)
	path := filepath.Join(s.Dir(), "file")
	parts := map[bool]int{}
	for range 20 {
		synced(t, save(t, path, string(old), os.O_TRUNC))
		closed(t, save(t, path, string(fresh), 0))
		power(s, random)
		data, err := os.ReadFile(path)
		if err != nil || len(data) != len(old) {
			t.Fatalf("%d bytes, %v", len(data), err)
		}
		for p := 0; p < len(data); p += page {
			if kept := data[p : p+page]; !bytes.Equal(kept, old[:page]) && !bytes.Equal(kept, fresh[:page]) {
				t.Fatalf("the page at %d is neither old nor new", p)
			}
		}
		parts[bytes.Equal(data, old) || bytes.Equal(data, fresh)]++
	}
	if parts[true] == 0 || parts[false] == 0 {
		t.Errorf("whole and in parts: %v", parts)
	}
}

func TestFullDisk(t *testing.T) {
	t.Parallel()
	s := Mount(t)
	s.SetRoom(2)
	f := save(t, filepath.Join(s.Dir(), "file"), "12", 0)
	if _, err := f.WriteString("3"); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
	s.SetRoom(-1)
	if _, err := f.WriteString("3"); err != nil {
		t.Error(err)
	}
	synced(t, f)
	has(t, filepath.Join(s.Dir(), "file"), "123")
}
