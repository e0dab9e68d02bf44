//go:build unix

package model

import (
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// proxy stands between one hub and one nats-server. It can hold bytes back or delay them, and says
// when the hub loses a connection: that is what "cut off" means.
type proxy struct {
	listener net.Listener
	target   string
	lost     func()
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	holding bool
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

// hold keeps all bytes back, both ways, until it is called with false.
func (p *proxy) hold(on bool) { p.set(func() { p.holding = on }) }

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
		p.wg.Go(func() { defer over(); p.pipe(to, from) })
		p.wg.Go(func() { defer over(); p.pipe(from, to) })
	}
}

func (p *proxy) pipe(to, from net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if !p.pass() {
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
func (p *proxy) pass() bool {
	p.mu.Lock()
	delay := p.delay
	p.mu.Unlock()
	if delay > 0 {
		<-time.After(delay)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.holding && !p.closed {
		p.changed.Wait()
	}
	return !p.closed
}
