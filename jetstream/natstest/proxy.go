package natstest

import (
	"bufio"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// Proxy stands between NATS clients and a server. It can show what clients say, swallow what they
// publish, without a word to either side, and hold back what the server says.
type Proxy struct {
	listener net.Listener
	server   string
	swallows atomic.Pointer[func(subject string) bool]
	watches  atomic.Pointer[func(conn int, line string)]
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]struct{} // nil once it is closed
	gates    []*sync.RWMutex       // held, of each connection
	held     sync.RWMutex          // what the server says passes with a read lock
}

// StartProxy starts a proxy for the server at a NATS URL. The test closes it.
func StartProxy(tb testing.TB, server string) *Proxy {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it lives until the test ends
	if err != nil {
		tb.Fatal(err)
	}
	p := &Proxy{listener: listener, server: strings.TrimPrefix(server, "nats://"), conns: make(map[net.Conn]struct{})}
	p.wg.Go(p.accept)
	tb.Cleanup(p.close)
	return p
}

// URL is the address for clients.
func (p *Proxy) URL() string { return "nats://" + p.listener.Addr().String() }

// Swallow has the proxy drop messages to the subjects for which f returns true, from now on; nil:
// none.
func (p *Proxy) Swallow(f func(subject string) bool) {
	if f == nil {
		p.swallows.Store(nil)
		return
	}
	p.swallows.Store(&f)
}

// Watch has the proxy call f with each line that a client says, before the line is passed on, and
// with "" at the end of the connection. The first connection is number 0. The calls for different
// connections are concurrent.
func (p *Proxy) Watch(f func(conn int, line string)) { p.watches.Store(&f) }

// Hold holds back what the server says from now on, until release is called or the test ends.
func (p *Proxy) Hold(tb testing.TB) (release func()) {
	tb.Helper()
	return hold(tb, &p.held)
}

// HoldOne is Hold for the connection that came as number n, from 0.
func (p *Proxy) HoldOne(tb testing.TB, n int) (release func()) {
	tb.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	return hold(tb, p.gates[n])
}

func hold(tb testing.TB, held *sync.RWMutex) (release func()) {
	tb.Helper()
	held.Lock()
	release = sync.OnceFunc(held.Unlock)
	tb.Cleanup(release)
	return release
}

// gate is a writer that waits while it or all are held.
type gate struct {
	io.Writer

	one, all *sync.RWMutex
}

func (g gate) Write(b []byte) (int, error) {
	g.one.RLock()
	defer g.one.RUnlock()
	g.all.RLock()
	defer g.all.RUnlock()
	return g.Writer.Write(b)
}

func (p *Proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	for conn := range p.conns {
		_ = conn.Close()
	}
	p.conns = nil
	p.mu.Unlock()
	p.wg.Wait()
}

// keep has close end a connection. It reports false when the proxy is closed.
func (p *Proxy) keep(conn net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		_ = conn.Close()
		return false
	}
	p.conns[conn] = struct{}{}
	return true
}

func (p *Proxy) drop(conn net.Conn) {
	_ = conn.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, conn)
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.server) //nolint:noctx // on loopback
		if err != nil {
			_ = client.Close()
			continue
		}
		if !p.keep(client) || !p.keep(server) {
			_ = client.Close()
			_ = server.Close()
			return
		}
		one := new(sync.RWMutex)
		p.mu.Lock()
		n := len(p.gates)
		p.gates = append(p.gates, one)
		p.mu.Unlock()
		p.wg.Go(func() {
			defer p.drop(client)
			_, _ = io.Copy(gate{client, one, &p.held}, server) // it ends with either connection
		})
		p.wg.Go(func() {
			defer p.drop(server)
			p.forward(bufio.NewReaderSize(client, 64<<10), bufio.NewWriter(server), n)
		})
	}
}

// forward passes on what client n sends: lines, of which PUB and HPUB are followed by as many bytes
// as their last word says.
func (p *Proxy) forward(from *bufio.Reader, to *bufio.Writer, n int) {
	for {
		line, err := from.ReadString('\n')
		if watches := p.watches.Load(); watches != nil {
			(*watches)(n, line)
		}
		if err != nil {
			return
		}
		words := strings.Fields(line)
		sink := io.Writer(to)
		body := 0
		if verb := strings.ToUpper(words[0]); verb == "PUB" || verb == "HPUB" {
			if body, err = strconv.Atoi(words[len(words)-1]); err != nil {
				return
			}
			body += len("\r\n")
			if swallows := p.swallows.Load(); swallows != nil && (*swallows)(words[1]) {
				sink = io.Discard
			}
		}
		if _, err := io.WriteString(sink, line); err != nil {
			return
		}
		if _, err := io.CopyN(sink, from, int64(body)); err != nil {
			return
		}
		if from.Buffered() == 0 && to.Flush() != nil {
			return
		}
	}
}
