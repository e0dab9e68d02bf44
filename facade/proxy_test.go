package facade_test

import (
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// tcpProxy stands between a hub and NATS, and can be made to fail as networks do: frozen (bytes
// stop, connections stay) or cut (connections end, new ones are refused).
type tcpProxy struct {
	t        testing.TB
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu      sync.Mutex
	changed sync.Cond
	budget  int // bytes that may still go to the target; -1 for any number
	frozen  bool
	held    bool // as frozen, but only what goes to the target
	slow    time.Duration
	severed bool
	conns   map[net.Conn]struct{}
}

func newTCPProxy(tb testing.TB, target string) *tcpProxy {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	p := &tcpProxy{t: tb, listener: l, target: strings.TrimPrefix(target, "nats://"), budget: -1, conns: map[net.Conn]struct{}{}}
	p.changed.L = &p.mu
	p.wg.Go(p.accept)
	tb.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *tcpProxy) url() string { return "nats://" + p.listener.Addr().String() }

// freeze stops all bytes, both ways.
func (p *tcpProxy) freeze() { p.set(func() { p.frozen = true }) }

// hold stops what goes to the target: it is taken from who sends it, and kept until heal.
func (p *tcpProxy) hold() { p.set(func() { p.held = true }) }

// delay holds back whatever comes, each way, for d.
func (p *tcpProxy) delay(d time.Duration) { p.set(func() { p.slow = d }) }

// freezeAfter lets n more bytes through to the target, and then does as freeze.
func (p *tcpProxy) freezeAfter(n int) { p.set(func() { p.budget = n }) }

// spent reports whether freezeAfter has come to its end.
func (p *tcpProxy) spent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.budget == 0
}

// cut ends all connections, and new ones as soon as they come.
func (p *tcpProxy) cut() {
	p.set(func() {
		p.severed = true
		for c := range p.conns {
			_ = c.Close()
		}
	})
}

// heal lets everything through again, what was held back by freeze included.
func (p *tcpProxy) heal() {
	p.set(func() { p.frozen, p.held, p.severed, p.budget = false, false, false, -1 })
}

func (p *tcpProxy) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.changed.Broadcast()
}

func (p *tcpProxy) accept() {
	for {
		from, err := p.listener.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				p.t.Error(err)
			}
			return
		}
		to, err := net.Dial("tcp", p.target)
		if err != nil || !p.enter(from, to) {
			_ = from.Close()
			if to != nil {
				_ = to.Close()
			}
			continue
		}
		p.wg.Go(func() { p.pipe(to, from, true) })
		p.wg.Go(func() { p.pipe(from, to, false) })
	}
}

func (p *tcpProxy) enter(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.severed {
		return false
	}
	for _, c := range conns {
		p.conns[c] = struct{}{}
	}
	return true
}

func (p *tcpProxy) pipe(to, from net.Conn, outward bool) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
		p.mu.Lock()
		delete(p.conns, to)
		delete(p.conns, from)
		p.mu.Unlock()
	}()
	chunks := make(chan chunk)
	p.wg.Go(func() {
		defer close(chunks)
		for {
			buf := make([]byte, 32<<10)
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			p.mu.Lock()
			due := time.Now().Add(p.slow)
			p.mu.Unlock()
			chunks <- chunk{data: buf[:n], due: due}
		}
	})
	defer func() {
		_ = from.Close()
		for range chunks { // until the reader has seen the end
		}
	}()
	for c := range chunks {
		<-time.After(time.Until(c.due))
		for sent := 0; sent < len(c.data); {
			allowed := p.allow(len(c.data)-sent, outward)
			if allowed < 0 {
				return
			}
			if _, err := to.Write(c.data[sent : sent+allowed]); err != nil {
				return
			}
			sent += allowed
		}
	}
}

// chunk is what was read at once, and when it may go on.
type chunk struct {
	data []byte
	due  time.Time
}

// allow waits until some of n bytes may go on, and returns how many; -1 when the connection was
// cut.
func (p *tcpProxy) allow(n int, outward bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		switch {
		case p.severed:
			return -1
		case p.frozen || p.held && outward || p.budget == 0:
			// Once the budget is spent, the answers stop too.
		case outward && p.budget > 0:
			n = min(n, p.budget)
			p.budget -= n
			return n
		default:
			return n
		}
		p.changed.Wait()
	}
}
