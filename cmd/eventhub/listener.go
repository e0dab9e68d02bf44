package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"syscall"
)

// listener is one of the hub's ports.
type listener struct {
	net.Listener
	server *http.Server
}

// open takes the port. The flags are for the message when that fails.
func (l *listener) open(ctx context.Context, host string, port uint16, portFlag, hostFlag string) error {
	at := net.JoinHostPort(host, strconv.Itoa(int(port)))
	var cfg net.ListenConfig
	var err error
	if l.Listener, err = cfg.Listen(ctx, "tcp", at); err == nil {
		return nil
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s: the port is taken: stop what listens there (another hub?), or choose another port (%s)", at, portFlag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("listen on %s: this user may not: choose a port from 1024 on (%s)", at, portFlag)
	default:
		return fmt.Errorf("listen on %s: %w: choose an address of this host (%s)", at, reason(err), hostFlag)
	}
}

// serveWith decides what serve answers, over TLS when there is a certificate, with these versions of HTTP.
func (l *listener) serveWith(handler http.Handler, cert *certificate, room *waitingRoom, log *slog.Logger, versions ...string) {
	l.server = newServer(handler, room, log)
	if cert == nil {
		return
	}
	cfg := cert.config()
	cfg.NextProtos = versions
	l.server.TLSConfig = cfg
	l.server.Protocols = new(http.Protocols)
	l.server.Protocols.SetHTTP1(true)
	l.server.Protocols.SetHTTP2(slices.Contains(versions, "h2"))
}

// address is where clients reach the listener.
func (l *listener) address() string { return l.Addr().String() }

// serve answers until close.
func (l *listener) serve() error {
	serve := l.server.Serve
	if l.server.TLSConfig != nil {
		serve = func(at net.Listener) error { return l.server.ServeTLS(at, "", "") }
	}
	if err := serve(l.Listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("listen on %s: %w", l.address(), err)
	}
	return nil
}

// close waits for the requests that are being answered, until ctx ends, and frees the port.
func (l *listener) close(ctx context.Context) {
	if l.server != nil && l.server.Shutdown(ctx) != nil {
		_ = l.server.Close() // those that are left have had their time
	}
	if l.Listener != nil {
		_ = l.Listener.Close() // closed already, unless it never served
	}
}
