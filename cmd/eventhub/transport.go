package main

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"
)

// The bounds of a request's header, on every port.
const (
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
)

// The bounds of what comes after the header. Handlers that read a body or write a stream set deadlines of their own.
const (
	// bodyTimeout is for a body until its handler takes it in hand, unreadTimeout for what a handler has left of it, which
	// net/http reads for the sake of the next request.
	bodyTimeout   = 10 * time.Second
	unreadTimeout = time.Second
	// answerTimeout is for the part of an answer that is left when its handler is done.
	answerTimeout = 5 * time.Second
	// opsTimeout is for a whole answer to operators.
	opsTimeout = 30 * time.Second
)

// hstsAge is how long a browser that has seen TLS here insists on it.
const hstsAge = 365 * 24 * time.Hour

// newServer makes the server of a listener. How long a handler may work is its own affair.
func newServer(handler http.Handler, room *waitingRoom, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           bounded(handler),
		ConnState:         room.track,
		ReadHeaderTimeout: headerTimeout, // and that of the TLS handshake
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// bounded keeps a client from holding a connection without end: by a body that it announces and does not send, which a
// handler that refuses the request does not read and net/http waits for, or by not reading the answer.
func bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctrl := http.NewResponseController(w)
		_ = ctrl.SetWriteDeadline(time.Time{}) // that of the request before
		if r.Header.Get("Upgrade") != "" {
			_ = ctrl.SetWriteDeadline(time.Now().Add(answerTimeout)) // a connection that becomes a WebSocket forgets it
		}
		if r.ContentLength != 0 {
			_ = ctrl.SetReadDeadline(time.Now().Add(bodyTimeout))
		}
		next.ServeHTTP(w, r)
		if r.Header.Get("Upgrade") != "" {
			return // the connection may belong to a WebSocket
		}
		now := time.Now()
		_ = ctrl.SetWriteDeadline(now.Add(answerTimeout))
		if r.ContentLength != 0 {
			_ = ctrl.SetReadDeadline(now.Add(unreadTimeout)) // net/http sets that of the next request itself
		}
	})
}

// answerWithin bounds the time of a whole answer, for handlers that set no deadline themselves.
func answerWithin(limit time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
		next.ServeHTTP(w, r)
	})
}

// secure sets the headers that every answer has unless its handler knows better.
func secure(next http.Handler, overTLS bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		if overTLS {
			h.Set("Strict-Transport-Security", "max-age="+strconv.Itoa(int(hstsAge/time.Second)))
		}
		next.ServeHTTP(w, r)
	})
}
