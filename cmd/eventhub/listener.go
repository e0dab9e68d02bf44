package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"
)

// unackedLimit is how long bytes that were sent to a client may stay unacknowledged. Beyond it, the
// client has vanished without an end of its connection, and the kernel closes the connection. It is
// longer than the times after which the hub itself closes a client that does not read.
const unackedLimit = 45 * time.Second

// listener is one of the hub's ports.
type listener struct {
	net.Listener
	server *http.Server
	// upgrades says that connections become WebSockets.
	upgrades bool
}

// open opens the port. The flags are named in the error.
func (l *listener) open(ctx context.Context, host string, port uint16, portFlag, hostFlag string) error {
	at := net.JoinHostPort(host, strconv.Itoa(int(port)))
	cfg := net.ListenConfig{Control: limitUnacked}
	var err error
	if l.Listener, err = cfg.Listen(ctx, "tcp", at); err == nil {
		return nil
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("listen on %s: port is in use; stop the process that uses it (another hub?) or choose another port (%s)", at, portFlag)
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("listen on %s: permission denied; choose a port of at least 1024 (%s)", at, portFlag)
	default:
		return fmt.Errorf("listen on %s: %w; choose an address of this host (%s)", at, reason(err), hostFlag)
	}
}

// serveWith configures the handler and, if cert is not nil, TLS. The hub speaks HTTP/1.1 only: an
// HTTP/2 connection lets a client open, reset and continue streams faster than the limits of the
// hub see. A reverse proxy that speaks HTTP/2 may stand in front.
func (l *listener) serveWith(handler http.Handler, cert *certificate, room *waitingRoom, log *slog.Logger) {
	l.server = newServer(handler, room, log)
	if cert == nil {
		return
	}
	l.server.TLSConfig = cert.config()
	l.server.Protocols = new(http.Protocols)
	l.server.Protocols.SetHTTP1(true)
}

// address returns the address of the listener.
func (l *listener) address() string { return l.Addr().String() }

// visited returns the address of the listener as others know it: without the host if the listener
// is bound to all addresses.
func (l *listener) visited() string {
	host, port, err := net.SplitHostPort(l.address())
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		return ":" + port
	}
	return l.address()
}

// serve answers requests until close is called.
func (l *listener) serve() error {
	serve, at := l.server.Serve, l.Listener
	switch {
	case l.server.TLSConfig != nil:
		serve = func(at net.Listener) error { return l.server.ServeTLS(at, "", "") }
	case !l.upgrades:
		at = lengthListener{at}
	}
	if err := serve(at); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("listen on %s: %w", l.address(), err)
	}
	return nil
}

// close waits for current requests until ctx ends, and frees the port.
func (l *listener) close(ctx context.Context) {
	if l.server != nil && l.server.Shutdown(ctx) != nil {
		_ = l.server.Close() // the remaining requests have exceeded their time
	}
	if l.Listener != nil {
		_ = l.Listener.Close() // usually closed already, unless serve never ran
	}
}
