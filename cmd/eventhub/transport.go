package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/panics"
)

// Limits for request headers, on every port.
const (
	headerTimeout  = 5 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 64 << 10
)

// Timeouts after the header. Handlers that read a body or write a stream set their own deadlines.
const (
	// bodyTimeout applies to a body until its handler sets a deadline. unreadTimeout applies to the
	// rest of a body that the handler did not read, which net/http reads before the next request.
	bodyTimeout   = 10 * time.Second
	unreadTimeout = time.Second
	// answerTimeout applies to the part of a response that is unsent when the handler returns.
	answerTimeout = 5 * time.Second
	// opsTimeout applies to a whole response on the ops port.
	opsTimeout = 30 * time.Second
)

// hstsAge is how long browsers that used TLS here must keep using TLS.
const hstsAge = 365 * 24 * time.Hour

// newServer returns the server of a listener. It does not limit the running time of handlers.
func newServer(handler http.Handler, room *waitingRoom, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:   survives(strange(bounded(handler)), log),
		ConnState: room.track,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return room.welcome(withLengths(ctx, conn), conn)
		},
		ReadHeaderTimeout: headerTimeout, // also limits the TLS handshake
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// survives notes panics of handlers that let them through, and cuts the connection.
func survives(next http.Handler, log *slog.Logger) http.Handler {
	often := pacedlog.New(log).By("func")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			if cause := recover(); cause != nil {
				if cause != http.ErrAbortHandler { //nolint:errorlint // net/http compares so, too
					panics.Note(often, "request", cause)
				}
				panic(http.ErrAbortHandler)
			}
		}()
		next.ServeHTTP(w, r)
	})
}

// bounded prevents a client from holding a connection indefinitely. A client could announce a body
// and not send it, which net/http waits for if the handler does not read it, or could stop reading
// the response.
func bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctrl := http.NewResponseController(w)
		_ = ctrl.SetWriteDeadline(time.Time{}) // clear the deadline of the previous request
		if r.Header.Get("Upgrade") != "" {
			// a connection that becomes a WebSocket clears this deadline
			_ = ctrl.SetWriteDeadline(time.Now().Add(answerTimeout))
		}
		if r.ContentLength != 0 {
			_ = ctrl.SetReadDeadline(time.Now().Add(bodyTimeout))
		}
		if r.TransferEncoding != nil && mayHaveLength(r) {
			// A request with both Content-Length and Transfer-Encoding may end elsewhere for a
			// proxy in front. RFC 9112 (section 6.1) wants the connection closed after the answer.
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
		if r.Header.Get("Upgrade") != "" {
			return // the connection may now belong to a WebSocket
		}
		now := time.Now()
		_ = ctrl.SetWriteDeadline(now.Add(answerTimeout))
		if r.ContentLength != 0 {
			// net/http sets the deadline of the next request
			_ = ctrl.SetReadDeadline(now.Add(unreadTimeout))
		}
	})
}

// answerWithin limits the time of a whole response, for handlers that set no deadline.
func answerWithin(limit time.Duration, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(limit))
		next.ServeHTTP(w, r)
	})
}

// secure sets default security headers, which a handler may override.
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
