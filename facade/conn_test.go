package facade

import (
	"errors"
	"io"
	"net"
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
	_, _ = w.Write([]byte("a frame that is cut,"))
	next, _ := w.mark()
	_, _ = w.Write([]byte("and one that is never sent"))
	b := make([]byte, 100)
	read := make(chan int, 1)
	go func() {
		n, _ := peer.Read(b[:7])
		read <- n
	}()
	if err := w.uncork(); !errors.Is(err, errStalled) {
		t.Fatal(err)
	}
	n := <-read
	if w.taken() != int64(n) {
		t.Fatal(w.taken(), n)
	}
	w.truncate(next)
	written := make(chan error, 1)
	go func() {
		_, err := w.Write([]byte("bye"))
		written <- err
	}()
	m, err := io.ReadAtLeast(peer, b[n:], len("a frame that is cut,bye")-n)
	if got := string(b[:n+m]); got != "a frame that is cut,bye" || err != nil {
		t.Fatal(got, err)
	}
	if err := <-written; err != nil {
		t.Fatal(err)
	}
}
