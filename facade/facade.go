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
	"net/url"
	"path"
	"strings"
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
	// Origins are the web origins whose pages may open a WebSocket: "https://app.example.com", with * for any part
	// of the host name ("https://*.example.com"). Clients that send no Origin pass always. Default, nil: any origin;
	// leave it so only while the listener is bound to loopback. Empty and not nil: no web page.
	Origins []string
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
		if u, err := url.Parse(o); err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
			return cfg, fmt.Errorf("facade: Config.Origins: %q is not of the form scheme://host or scheme://host:port", o)
		}
		if _, err := path.Match(o, ""); err != nil {
			return cfg, fmt.Errorf("facade: Config.Origins: %q: %w", o, err)
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

// originAllowed reports whether a page of this origin may connect. "" is a client that is no web page.
func (cfg *Config) originAllowed(origin string) bool {
	if origin == "" || cfg.Origins == nil {
		return true
	}
	origin = strings.ToLower(origin)
	for _, o := range cfg.Origins {
		// * does not cross the slashes after the scheme, so a pattern for the host never matches another scheme.
		if ok, err := path.Match(strings.ToLower(o), origin); err == nil && ok {
			return true
		}
	}
	return false
}
