package facade

import (
	"errors"
	"fmt"
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

func TestControlFramesFollowAWriteThatIsUnderWay(t *testing.T) {
	w, peer := pipeWire(t, time.Minute)
	done := make(chan error, 1)
	go func() {
		offset, err := w.send([]byte("onetwothree"))
		if err == nil && offset != 0 {
			err = fmt.Errorf("offset %d", offset)
		}
		done <- err
	}()
	b := make([]byte, 100)
	n, err := peer.Read(b[:5])
	if err != nil {
		t.Fatal(err)
	}
	if w.taken() != 0 || !w.busy() {
		t.Fatal(w.taken())
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

func TestNoMessageFollowsACloseFrame(t *testing.T) {
	w, peer := pipeWire(t, time.Minute)
	read := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(peer)
		read <- string(b)
	}()
	const bye = "\x88\x02\x03\xe8"
	if _, err := w.Write([]byte(bye)); err != nil {
		t.Fatal(err)
	}
	if offset, err := w.send([]byte("late")); offset != int64(len(bye)) || !errors.Is(err, net.ErrClosed) {
		t.Fatal(offset, err)
	}
	_ = w.Close()
	if got := <-read; got != bye {
		t.Fatalf("%q", got)
	}
}

func TestWireFinishesTheFrameThatWasCut(t *testing.T) {
	w, peer := pipeWire(t, 50*time.Millisecond)
	const first, second = "a frame that is cut,", "and one that is never sent"
	b := make([]byte, 100)
	read := make(chan int, 1)
	go func() {
		n, _ := peer.Read(b[:7])
		read <- n
	}()
	offset, err := w.send([]byte(first + second))
	if !errors.Is(err, errStalled) {
		t.Fatal(err)
	}
	n := <-read
	if w.taken() != int64(n) {
		t.Fatal(w.taken(), n)
	}
	w.truncate(offset + int64(len(first)))
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
