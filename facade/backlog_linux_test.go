package facade

import (
	"io"
	"net"
	"testing"
	"time"
)

// TestArrivalOfWhatWasNotRead has bytes arrive while the reader is away, twice. Each byte has
// arrived when the reader went, and one that comes later when it is read.
func TestArrivalOfWhatWasNotRead(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	w := newWire(time.Minute)
	if w.Conn, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	unread := 0
	send := func(n int) {
		t.Helper()
		if _, err := peer.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		unread += n
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for end := time.Now().Add(20 * time.Second); received(w.Conn) != unread; <-tick.C {
			if time.Now().After(end) {
				t.Fatalf("%d bytes were received, not %d", received(w.Conn), unread)
			}
		}
	}
	read := func(n int) time.Time {
		t.Helper()
		if _, err := io.ReadFull(w, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		unread -= n
		return w.arrived
	}
	begun := time.Now()
	first, second := begun.Add(-20*time.Second), begun.Add(-10*time.Second)
	send(1000)
	w.away(first)
	send(500)
	for _, n := range []int{600, 100, 300} {
		if got := read(n); !got.Equal(first) {
			t.Fatal(got)
		}
	}
	send(500)
	w.away(second)
	send(50)
	w.away(begun)
	w.away(begun)
	for _, want := range []time.Time{second, second, begun} {
		n := 500
		if want.Equal(begun) {
			n = 50
		}
		if got := read(n); !got.Equal(want) {
			t.Fatal(got, want)
		}
	}
	send(10)
	if got := read(10); got.Before(begun) || len(w.backlog) > 0 {
		t.Fatal(got, w.backlog)
	}
	w.away(first) // nothing has arrived
	send(10)
	if got := read(10); got.Before(begun) {
		t.Fatal(got)
	}
}
