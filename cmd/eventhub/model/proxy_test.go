//go:build unix

package model

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// proxy stands between one hub and one nats-server, or between two nats-servers. It can hold bytes
// back, both ways or one way, or delay them, and says when an established connection breaks: for a
// hub, that is what "cut off" means.
type proxy struct {
	listener net.Listener
	target   string
	lost     func()
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	holding [2]bool // by direction
	delay   time.Duration
	closed  bool
	conns   map[net.Conn]struct{}
}

// startProxy starts a proxy for the time of the test. lost is called when an established connection
// breaks.
func startProxy(tb testing.TB, target string, lost func()) *proxy {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &proxy{listener: l, target: strings.TrimPrefix(target, "nats://"), lost: lost, conns: map[net.Conn]struct{}{}}
	p.changed.L = &p.mu
	p.wg.Go(p.accept)
	tb.Cleanup(func() {
		_ = l.Close()
		p.set(func() {
			p.closed = true
			for c := range p.conns {
				_ = c.Close()
			}
		})
		p.wg.Wait()
	})
	return p
}

func (p *proxy) url() string { return "nats://" + p.listener.Addr().String() }

// The directions: to the server, and from the server to who has connected.
const (
	toServer = iota
	fromServer
)

// hold keeps all bytes back, both ways, until it is called with false. As in a network that loses
// all packets for a while, connections stay, and what was sent comes when it is over.
func (p *proxy) hold(on bool) { p.set(func() { p.holding = [2]bool{on, on} }) }

// holdOne keeps the bytes of one direction back.
func (p *proxy) holdOne(direction int, on bool) { p.set(func() { p.holding[direction] = on }) }

// slow delays what comes by d, both ways.
func (p *proxy) slow(d time.Duration) { p.set(func() { p.delay = d }) }

func (p *proxy) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

func (p *proxy) accept() {
	for {
		from, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		to, err := (&net.Dialer{Timeout: time.Second}).Dial("tcp", p.target)
		if err != nil {
			_ = from.Close()
			continue
		}
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			_, _ = from.Close(), to.Close()
			continue
		}
		p.conns[from], p.conns[to] = struct{}{}, struct{}{}
		p.mu.Unlock()
		var once sync.Once
		over := func() {
			_, _ = from.Close(), to.Close()
			once.Do(func() {
				p.mu.Lock()
				delete(p.conns, from)
				delete(p.conns, to)
				closed := p.closed
				p.mu.Unlock()
				if !closed {
					p.lost()
				}
			})
		}
		p.wg.Go(func() { defer over(); p.pipe(to, from, toServer) })
		p.wg.Go(func() { defer over(); p.pipe(from, to, fromServer) })
	}
}

func (p *proxy) pipe(to, from net.Conn, direction int) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if !p.pass(direction) {
				return
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// pass waits until what was read may go on. It reports false at the end.
func (p *proxy) pass(direction int) bool {
	p.mu.Lock()
	delay := p.delay
	p.mu.Unlock()
	if delay > 0 {
		<-time.After(delay)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.holding[direction] && !p.closed {
		p.changed.Wait()
	}
	return !p.closed
}
