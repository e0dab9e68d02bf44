//go:build unix

package main

import (
	"io"
	"net"
	"sync"
	"testing"
)

// relay passes TCP connections on, unless the network is off.
type relay struct {
	listener net.Listener

	mu     sync.Mutex
	target string
	moves  sync.Cond // of stuck
	off    bool
	// stuck says that connections live, and carry nothing.
	stuck bool
	conns map[net.Conn]struct{}
	pipes sync.WaitGroup
}

func startRelay(t *testing.T, target string) *relay {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: listener, target: target, conns: make(map[net.Conn]struct{})}
	r.moves.L = &r.mu
	r.pipes.Go(r.accept)
	t.Cleanup(func() {
		_ = listener.Close()
		r.cut(true)
		r.stick(false)
		r.pipes.Wait()
	})
	return r
}

func (r *relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return // the test is over
		}
		r.mu.Lock()
		target := r.target
		r.mu.Unlock()
		hub, err := net.Dial("tcp", target)
		if err != nil {
			_ = client.Close()
			continue
		}
		r.mu.Lock()
		if r.off {
			_, _ = client.Close(), hub.Close()
		} else {
			for from, to := range map[net.Conn]net.Conn{client: hub, hub: client} {
				r.conns[from] = struct{}{}
				r.pipes.Go(func() { r.pipe(from, to) })
			}
		}
		r.mu.Unlock()
	}
}

func (r *relay) pipe(from, to net.Conn) {
	_, _ = io.Copy(relayed{r, to}, from)
	_, _ = from.Close(), to.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, from)
}

// relayed is a connection that takes nothing while its relay is stuck.
type relayed struct {
	relay *relay
	to    net.Conn
}

func (c relayed) Write(p []byte) (int, error) {
	c.relay.mu.Lock()
	for c.relay.stuck {
		c.relay.moves.Wait()
	}
	c.relay.mu.Unlock()
	return c.to.Write(p)
}

// cut ends all connections, and refuses others until it is called with false.
func (r *relay) cut(off bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.off = off
	if off {
		for c := range r.conns {
			_ = c.Close()
		}
	}
}

// aim passes new connections on to another target.
func (r *relay) aim(target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = target
}

// stick keeps all connections, and carries nothing until it is called with false.
func (r *relay) stick(stuck bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stuck = stuck
	r.moves.Broadcast()
}
