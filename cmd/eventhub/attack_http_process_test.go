//go:build unix

package main

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// httpAttacks hold the places and the memory of the HTTP API.
var httpAttacks = []attack{
	{name: "bodies that hardly move", scopes: []string{"publish:attack.bodies.**"}, run: attackBodies},
	{name: "pages", scopes: []string{"subscribe:neighbour.kept"}, run: attackPages, like: permittedPages},
	{name: "answers that are not read", scopes: []string{"*:attack.pages.**"}, run: attackUnreadPages},
	{name: "frames of HTTP 2", run: attackHTTP2},
}

// attackBodies sends many requests whose bodies hardly move.
func attackBodies(ctx context.Context, a *attacker) {
	a.crowd(ctx, 600, func(int, int) {
		a.ask(ctx, http.MethodPost, "/publish/attack.bodies.t", &slowBody{ctx: ctx})
	})
}

// slowBody is a body of one byte a second.
type slowBody struct{ ctx context.Context }

func (b *slowBody) Read(p []byte) (int, error) {
	select {
	case <-b.ctx.Done():
		return 0, b.ctx.Err()
	case <-time.After(time.Second):
		p[0] = '1'
		return 1, nil
	}
}

// attackPages asks for pages on many connections at a time.
func attackPages(ctx context.Context, a *attacker) {
	a.crowd(ctx, 32, func(int, int) {
		a.ask(ctx, http.MethodGet, "/snap/neighbour.kept?limit=1000", nil)
	})
}

// permittedPages asks for as many as a principal may have at a time.
func permittedPages(ctx context.Context, a *attacker) {
	a.crowd(ctx, 2, func(int, int) {
		a.ask(ctx, http.MethodGet, "/snap/neighbour.kept?limit=1000", nil)
	})
}

// attackUnreadPages asks for large pages and does not read them.
func attackUnreadPages(ctx context.Context, a *attacker) {
	const keys, size = 100, 200_000
	for i := range keys {
		body := strings.NewReader(`"` + strings.Repeat("x", size) + `"`)
		for ctx.Err() == nil {
			if status, _ := a.ask(ctx, http.MethodPost, "/publish/attack.pages.kept", body, "Event-Key", string(rune('a'+i))); status == http.StatusOK {
				break
			}
			body.Reset(`"` + strings.Repeat("x", size) + `"`)
		}
	}
	request := "GET /snap/attack.pages.kept?limit=1000 HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer " + a.token + "\r\n\r\n"
	address := strings.TrimPrefix(a.http, "http://")
	a.crowd(ctx, 180, func(int, int) {
		conn, err := net.DialTimeout("tcp", address, patience)
		if err != nil {
			return
		}
		defer drop(conn)
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetReadBuffer(4096)
		}
		if _, err := io.WriteString(conn, request); err != nil {
			return
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		var first [1]byte
		if _, err := io.ReadFull(conn, first[:]); err != nil {
			return
		}
		select { // the hub gives the answer up
		case <-ctx.Done():
		case <-time.After(10 * time.Second):
		}
	})
}

// attackHTTP2 speaks HTTP/2 without asking: empty CONTINUATION frames without end, and streams that
// are reset as soon as they are open.
func attackHTTP2(ctx context.Context, a *attacker) {
	address := strings.TrimPrefix(a.http, "http://")
	a.crowd(ctx, 2, func(worker, _ int) {
		conn, err := net.DialTimeout("tcp", address, patience)
		if err != nil {
			return
		}
		defer drop(conn)
		stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
		defer stop()
		if _, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"); err != nil {
			return
		}
		const headers, reset, settings, continuation, endHeaders = 1, 3, 4, 9, 4
		chunk := frameHTTP2(nil, settings, 0, 0)
		for id, sent := uint32(1), false; ; id += 2 {
			switch {
			case worker == 1:
				chunk = frameHTTP2(chunk, headers, endHeaders, id, 0x82)
				chunk = frameHTTP2(chunk, reset, 0, id, 0, 0, 0, 8)
			case !sent:
				chunk, sent = frameHTTP2(chunk, headers, 0, 1, 0x82), true
			default:
				chunk = frameHTTP2(chunk, continuation, 0, 1)
			}
			if len(chunk) < 4096 {
				continue
			}
			if _, err := conn.Write(chunk); err != nil {
				return
			}
			chunk = chunk[:0]
		}
	})
}

// frameHTTP2 appends a frame of HTTP/2.
func frameHTTP2(b []byte, kind, flags byte, stream uint32, payload ...byte) []byte {
	b = append(b, 0, 0, byte(len(payload)), kind, flags)
	return append(binary.BigEndian.AppendUint32(b, stream), payload...)
}
