package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"sync/atomic"
)

// lengthListener accepts connections that know whether a request may have had a Content-Length,
// which net/http removes from a chunked request before anybody can see it.
type lengthListener struct{ net.Listener }

func (l lengthListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	tcp, ok := c.(*net.TCPConn)
	if err != nil || !ok {
		return c, err
	}
	return &lengthConn{TCPConn: tcp}, nil
}

// lengthLine is how a header with a length begins, in lower case.
const lengthLine = "\ncontent-length:"

// lengthConn looks for lengthLine in all that it reads, bodies included: a body may make it close a
// connection, but no request can hide a length.
type lengthConn struct {
	*net.TCPConn
	seen    atomic.Bool
	matched int // bytes of lengthLine at the end of what was read
}

func (c *lengthConn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	if !c.seen.Load() {
		c.scan(p[:n])
	}
	return n, err
}

func (c *lengthConn) scan(p []byte) {
	for len(p) > 0 {
		if c.matched == 0 {
			i := bytes.IndexByte(p, lengthLine[0])
			if i < 0 {
				return
			}
			p, c.matched = p[i+1:], 1
			continue
		}
		// In lower case. This makes other bytes equal, too, which does no harm.
		if p[0]|0x20 != lengthLine[c.matched] {
			c.matched = 0
			continue
		}
		p, c.matched = p[1:], c.matched+1
		if c.matched == len(lengthLine) {
			c.seen.Store(true)
			return
		}
	}
}

type lengthKey struct{}

// withLengths is the ConnContext callback of a server.
func withLengths(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*lengthConn); ok {
		return context.WithValue(ctx, lengthKey{}, c)
	}
	return ctx
}

// mayHaveLength reports whether the request, or one before it on the connection, may have had a
// Content-Length. It is true where nobody looked.
func mayHaveLength(r *http.Request) bool {
	c, ok := r.Context().Value(lengthKey{}).(*lengthConn)
	return !ok || c.seen.Load()
}
