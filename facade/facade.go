// Package facade serves clients outside the process: frames over a WebSocket, and HTTP.
//
// A Server turns requests into calls of a Bus. Server (server.go) owns the connections. Each
// connection is a session (session.go, commands.go), which reads frames, and a writer (writer.go),
// which sends replies and events over a wire (conn.go). http.go and ndjson.go publish over HTTP;
// snap.go and page.go serve the latest records of keys, and export.go stored events. frame.go,
// options.go and reply.go define the wire format, code.go its error and close codes. auth.go checks
// policies, and limits.go and throttle.go enforce limits.
package facade

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"time"

	"eventhub/jetstream/cputime"
)

// Config configures a Server.
type Config struct {
	// Bus stores and delivers events; JetStream makes one. Required. The caller closes the bus
	// after the Server.
	Bus Bus
	// Auth checks the credentials of WebSocket and HTTP clients. Required.
	Auth Authenticator
	// Observer counts what the Server does. Defaults to none.
	Observer Observer
	// Logger receives messages for operators. Defaults to no logging.
	Logger *slog.Logger
	// Origins are the web origins whose pages may open a WebSocket and use the HTTP API:
	// "https://app.example.com", with * for any part of the host name ("https://*.example.com") or
	// for any port ("http://localhost:*"). Clients that send no Origin always pass. Empty and not
	// nil: no web page. Default, nil: any origin, which suits only a listener on loopback.
	Origins []string
	// Headers are further request headers of HTTP that become headers of the event: names in any
	// case, with * at the end for any rest. content-type, traceparent, tracestate,
	// x-correlation-id, x-request-id, x-schema-version and ce-* always do, and a header
	// Event-Header-NAME becomes NAME. No other header of a request becomes part of an event. Names
	// that carry credentials are refused. Default: none.
	Headers []string
	// TrustedProxies are the addresses of reverse proxies. Of their requests, the address of the
	// client is taken from X-Forwarded-For: it rations refused tokens and is in the log. From other
	// peers, the header has no effect. ParseProxy makes an entry. Default: none.
	TrustedProxies []netip.Prefix
	// DrainGrace is how long Drain lets clients settle the events they hold. Default 2 s.
	DrainGrace time.Duration
	// Limits bound what the Server holds and how long it waits. Zero fields take their defaults.
	Limits Limits
	// Computing is the ration of time of a processor for each client (by its Key): the one of the
	// Bus. Answers are compressed within it. Default: none.
	Computing *cputime.Ration
	// Outbox stores the events of POST /outbox/{topic}. The caller closes it after the Server.
	// Defaults to none, which makes such requests fail.
	Outbox Outbox
	// Accepted, if not nil, is called for each request of the HTTP API whose token is valid, with
	// the Key of its owner, before the request is served. It must not block.
	Accepted func(r *http.Request, owner string)
	// Documents serve GET requests for their paths, such as /openapi.yaml, without a token. They
	// must show nothing secret. Defaults to none.
	Documents map[string]http.Handler
}

// validate checks cfg and returns it with its defaults filled in.
func (cfg Config) validate() (Config, error) {
	if cfg.Bus == nil {
		return cfg, errors.New("facade: Config.Bus is missing")
	}
	if cfg.Auth == nil {
		return cfg, errors.New("facade: Config.Auth is missing")
	}
	if cfg.Observer == nil {
		cfg.Observer = nopObserver{}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	for _, o := range cfg.Origins {
		if err := ValidOrigin(o); err != nil {
			return cfg, fmt.Errorf("facade: Config.Origins: %w", err)
		}
	}
	for _, p := range cfg.TrustedProxies {
		if err := checkProxy(p); err != nil {
			return cfg, fmt.Errorf("facade: Config.TrustedProxies: %w", err)
		}
	}
	if err := cfg.Limits.validate(cfg.Bus.MaxPayload()); err != nil {
		return cfg, err
	}
	if err := fill("DrainGrace", &cfg.DrainGrace, 2*time.Second); err != nil {
		return cfg, err
	}
	return cfg, nil
}
