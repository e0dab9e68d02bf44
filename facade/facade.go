// Package facade is what clients outside of the process talk to: frames over a WebSocket, and HTTP.
//
// A Server turns them into calls of a jetstream.Bus. Server (server.go) owns the connections; each is a session
// (session.go, commands.go) that reads frames and a writer (writer.go) that sends replies and events over a wire
// (conn.go). http.go and ndjson.go are publishing over HTTP. The wire format itself is in frame.go, options.go and
// reply.go, its codes in code.go.
package facade

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path"
	"strings"
	"time"

	"eventhub/jetstream"
)

// Config configures a Server.
type Config struct {
	// Bus is where events go and come from. Required; the caller closes it after the Server.
	Bus *jetstream.Bus
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
}

// Limits bound what a Server holds and how long it waits. Zero fields take the default. Reaching one is counted by
// Observer.LimitReached under the name given here.
type Limits struct {
	// Connections ("connections") is the most WebSocket connections at a time: default 20,000. Beyond it, upgrades
	// get 503.
	Connections int
	// Requests ("requests") is the most HTTP requests served at a time: default 512. Beyond it, they get 503.
	Requests int
	// Subscriptions ("subscriptions") is the most subscriptions of one connection: default 256. Beyond it, SUBSCRIBE
	// gets overloaded.
	Subscriptions int
	// Frame ("frame") is the largest message in bytes that is read whole: default 4 MiB, and at least twice the bus's
	// payload limit, so that a payload over that limit can be answered with its corr. A larger message is skipped and
	// answered without one.
	Frame int
	// Skip ("skip") is the largest message in bytes that is skipped: default 64 MiB. Beyond it, the connection is
	// closed.
	Skip int
	// OutboundBytes ("outbound_bytes") is how many bytes of replies wait for a connection before its frames are not
	// read any more: default 1 MiB.
	OutboundBytes int
	// Faults ("faults") is how many frames in a row that cannot be read or understood a connection may send: default
	// 100. Beyond it, the connection is closed.
	Faults int
	// AuthTries ("auth_tries") is how many AUTH in a row may be refused: default 10. Beyond it, the connection is
	// closed.
	AuthTries int
	// Window ("window") is how many lines of one NDJSON request are in flight: default 1,024. Beyond it, the request
	// is not read any more.
	Window int
	// AuthTimeout is how long a connection may stay without a successful AUTH: default 10 s.
	AuthTimeout time.Duration
	// PingInterval is how long a connection may be silent before it is pinged: default 30 s.
	PingInterval time.Duration
	// PongTimeout is how long a pinged peer may stay silent: default 10 s. Beyond it, the connection is closed.
	PongTimeout time.Duration
	// WriteStall ("write_stall") is how long a peer may take no byte of what is sent: default 15 s. Beyond it, the
	// connection is closed as a slow consumer.
	WriteStall time.Duration
	// CloseGrace is how long a connection that is being closed has to take what is queued for it, and for the closing
	// handshake: default 3 s.
	CloseGrace time.Duration
	// BodyStall is how long an HTTP client may send no byte of a body, or take no byte of an NDJSON answer: default
	// 30 s.
	BodyStall time.Duration
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
	l := &cfg.Limits
	for _, f := range []struct {
		name string
		v    *int
		def  int
	}{
		{"Connections", &l.Connections, 20_000},
		{"Requests", &l.Requests, 512},
		{"Subscriptions", &l.Subscriptions, 256},
		{"Frame", &l.Frame, max(4<<20, 2*cfg.Bus.MaxPayload())},
		{"Skip", &l.Skip, max(64<<20, l.Frame)},
		{"OutboundBytes", &l.OutboundBytes, 1 << 20},
		{"Faults", &l.Faults, 100},
		{"AuthTries", &l.AuthTries, 10},
		{"Window", &l.Window, 1024},
	} {
		if err := fill(f.name, f.v, f.def); err != nil {
			return cfg, err
		}
	}
	for _, f := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"AuthTimeout", &l.AuthTimeout, 10 * time.Second},
		{"PingInterval", &l.PingInterval, 30 * time.Second},
		{"PongTimeout", &l.PongTimeout, 10 * time.Second},
		{"WriteStall", &l.WriteStall, 15 * time.Second},
		{"CloseGrace", &l.CloseGrace, 3 * time.Second},
		{"BodyStall", &l.BodyStall, 30 * time.Second},
		{"DrainGrace", &cfg.DrainGrace, 2 * time.Second},
	} {
		if err := fill(f.name, f.v, f.def); err != nil {
			return cfg, err
		}
	}
	return cfg, nil
}

func fill[T ~int | ~int64](name string, v *T, def T) error {
	if *v < 0 {
		return fmt.Errorf("facade: %s must not be negative, it is %d", name, *v)
	}
	if *v == 0 {
		*v = def
	}
	return nil
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
