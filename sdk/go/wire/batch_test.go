package wire

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"testing"
	"time"
)

// gateConn lets a write through each time the gate is opened, and records it.
type gateConn struct {
	net.Conn
	entered chan struct{}
	gate    chan struct{}
	mu      sync.Mutex
	writes  [][]byte
}

func (g *gateConn) Write(p []byte) (int, error) {
	g.entered <- struct{}{}
	if _, open := <-g.gate; !open {
		return 0, net.ErrClosed
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writes = append(g.writes, bytes.Clone(p))
	return len(p), nil
}

func (*gateConn) SetWriteDeadline(time.Time) error { return nil }
func (*gateConn) Close() error                     { return nil }

func TestWritesThatComeTogetherAreOneSystemCall(t *testing.T) {
	gate := &gateConn{entered: make(chan struct{}, 10), gate: make(chan struct{}, 10)}
	b := newBatchConn(gate)
	b.start()
	write := func(s string) {
		t.Helper()
		if _, err := b.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	write("first")
	<-gate.entered // the flusher is in the network now
	for range 100 {
		write("x")
	}
	gate.gate <- struct{}{}
	gate.gate <- struct{}{}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if len(gate.writes) != 2 || string(gate.writes[0]) != "first" || len(gate.writes[1]) != 100 {
		t.Errorf("writes: %q", gate.writes)
	}
	if _, err := b.Write([]byte("late")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after Close: %v", err)
	}
}

func TestBatchBounds(t *testing.T) {
	gate := &gateConn{entered: make(chan struct{}, 10), gate: make(chan struct{})}
	b := newBatchConn(gate)
	b.start()
	if _, err := b.Write([]byte("first")); err != nil {
		t.Fatal(err)
	}
	<-gate.entered
	big := make([]byte, softBuffer)
	if _, err := b.Write(big); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- b.message(func(m []byte) []byte { return m }, true) }()
	var err error
	for range hardBuffer / softBuffer {
		if _, err = b.Write(big); err != nil {
			break
		}
	}
	if !errors.Is(err, ErrStalled) {
		t.Errorf("beyond the bound: %v", err)
	}
	if err := <-waited; !errors.Is(err, ErrStalled) {
		t.Errorf("who waited for room got %v", err)
	}
	close(gate.gate)
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
}
