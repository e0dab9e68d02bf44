package facade

import (
	"bufio"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

// pipeWire is a wire whose peer gets each write to the kernel as one read.
func pipeWire(t *testing.T, stall time.Duration) (w *wire, peer net.Conn) {
	t.Helper()
	near, far := net.Pipe()
	w = newWire(stall)
	w.Conn = near
	t.Cleanup(func() {
		_ = far.Close()
		_ = w.Close()
	})
	_ = far.SetReadDeadline(time.Now().Add(10 * time.Second))
	return w, far
}

func TestWireGathersWrites(t *testing.T) {
	w, peer := pipeWire(t, time.Minute)
	w.cork()
	for _, s := range []string{"one", "two", "three"} {
		if n, err := w.Write([]byte(s)); n != len(s) || err != nil {
			t.Fatal(n, err)
		}
	}
	if offset, held := w.mark(); offset != 11 || held != 11 || w.taken() != 0 {
		t.Fatal(offset, held, w.taken())
	}
	done := make(chan error, 1)
	go func() { done <- w.uncork() }()
	b := make([]byte, 100)
	n, err := peer.Read(b[:5])
	if err != nil {
		t.Fatal(err)
	}
	// The write is under way: what comes now does not wait for it, and goes out behind it.
	if _, err := w.Write([]byte("pong")); err != nil {
		t.Fatal(err)
	}
	m, err := peer.Read(b[n:])
	if err != nil {
		t.Fatal(err)
	}
	n += m
	m, err = peer.Read(b[n:])
	if got := string(b[:n+m]); got != "onetwothreepong" || m != len("pong") || err != nil {
		t.Fatal(got, m, err)
	}
	if err := <-done; err != nil || w.taken() != 15 {
		t.Fatal(err, w.taken())
	}
}

func TestWireFinishesTheFrameThatWasCut(t *testing.T) {
	w, peer := pipeWire(t, 50*time.Millisecond)
	w.cork()
	_, _ = w.Write([]byte("first"))
	_, _ = w.Write([]byte("second"))
	start, _ := w.mark()
	_, _ = w.Write([]byte("third"))
	in := bufio.NewReaderSize(peer, 16)
	half := make(chan error, 1)
	go func() {
		_, err := in.Peek(1) // net.Pipe gives all that fits in the buffer
		half <- err
	}()
	if err := w.uncork(); err == nil || <-half != nil {
		if err != nil {
			t.Fatal(err)
		}
	}
	// Now nobody reads.
	w.cork()
	_, _ = w.Write([]byte(strings.Repeat("x", 100)))
	cut, _ := w.mark()
	_, _ = w.Write([]byte("never sent"))
	if err := w.uncork(); !errors.Is(err, errStalled) {
		t.Fatal(err)
	}
	if cut <= start {
		t.Fatal(cut, start)
	}
	w.truncate(cut)
	closed := make(chan error, 1)
	go func() {
		_, err := w.Write([]byte("bye"))
		closed <- err
	}()
	want := "firstsecondthird" + strings.Repeat("x", 100) + "bye"
	got := make([]byte, len(want))
	for n := 0; n < len(got); {
		m, err := in.Read(got[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += m
	}
	if string(got) != want {
		t.Fatalf("got %q", got)
	}
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
}
