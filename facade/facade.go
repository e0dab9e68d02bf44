// Package facade is what clients outside of the process talk to: frames over a WebSocket, and HTTP.
//
// A Server turns them into calls of a jetstream.Bus. Server (server.go) owns the connections; each is a session
// (session.go, commands.go) that reads frames and a writer (writer.go) that sends replies and events over a wire
// (conn.go). http.go and ndjson.go are publishing over HTTP; snap.go and page.go show the latest records of keys. The wire
// format itself is in frame.go, options.go and reply.go, its codes in code.go. Who may do what is asked in auth.go, how
// much of it in limits.go and throttle.go.
package facade

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Config configures a Server.
type Config struct {
	// Bus is where events go and come from: see JetStream. Required; the caller closes it after the
	// Server.
	Bus Bus
	// Auth checks the credentials of WebSocket and HTTP clients. Required.
	Auth Authenticator
	// Observer is told what happens. Default: nobody.
	Observer Observer
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// Origins are the web origins whose pages may open a WebSocket and use the HTTP API:
	// "https://app.example.com", with * for any part of the host name ("https://*.example.com") or
	// for any port ("http://localhost:*"). Clients that send no Origin always pass. Empty and not
	// nil: no web page. Default, nil: any origin, which suits only a listener on loopback.
	Origins []string
	// Headers are further request headers of HTTP that become headers of the event: names in any
	// case, with * at the end for any rest. content-type, traceparent, tracestate, x-correlation-id,
	// x-request-id, x-schema-version and ce-* always do, and a header Event-Header-NAME becomes
	// NAME. No other header of a request becomes part of an event. Names that carry credentials are
	// refused. Default: none.
	Headers []string
	// DrainGrace is how long Drain lets clients settle the events they hold. Default 2 s.
	DrainGrace time.Duration
	// Limits bound what the Server holds; zero fields take their defaults.
	Limits Limits
	// Outbox takes what is sent to POST /outbox/{topic}. Default: there is none. The caller closes it after the Server.
	Outbox Outbox
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
		if _, ok := parseOrigin(o, true); !ok {
			return cfg, fmt.Errorf("facade: Config.Origins: %q is not of the form scheme://host or scheme://host:port", o)
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
