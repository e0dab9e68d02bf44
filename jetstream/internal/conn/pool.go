package conn

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
)

// minServer is the oldest server that has all that the bus uses (atomic consumer creation, several
// filter subjects, stream reads by time).
var minServer = [2]int{2, 11}

// Pool has the connections of a bus to NATS, with its life and its clock. Its methods may be called
// concurrently, but Connect, CheckServer and Close come one after another.
type Pool struct {
	lifecycle

	cfg   Config
	log   *slog.Logger
	obs   event.Observer
	Clock *Clock

	Links      []*Link
	Hooks      Hooks         // set before Connect
	turn       atomic.Uint32 // deals the links out
	JS         manager       // over Links[0]; for what is not hot
	API        string        // prefix of the JetStream API subjects
	MaxPayload int           // in bytes
}

// Config says where NATS is, and who hears of it.
type Config struct {
	// Embedded is a server in this process, which replaces what follows.
	Embedded embeddedServer
	// URL is a server, or several separated by commas. The rest is as in jetstream.Config.
	URL, Creds, NKeySeed, TLSCA, TLSCert, TLSKey, Domain string

	Connections int
	MaxPayload  int           // the largest payload that is wanted, in bytes
	Margin      time.Duration // native.Margin of the AckWait of the hub
	OpenWait    time.Duration // how long a question of Open waits for an answer

	Log   *slog.Logger
	Obs   event.Observer
	Clock *Clock
	// Warn logs a line that an outage can repeat: seldom for each key.
	Warn func(ctx context.Context, msg, key string, attrs ...slog.Attr)
}

// embeddedServer is a NATS server in this process.
type embeddedServer interface {
	Connection() (url string, options []nats.Option)
}

// New returns a pool without connections. The values of ctx go on, but its end is not that of
// the pool.
func New(ctx context.Context, cfg Config) *Pool {
	p := &Pool{cfg: cfg, log: cfg.Log, obs: cfg.Obs, Clock: cfg.Clock}
	ignore := func(*Link) {}
	p.Hooks = Hooks{Cut: ignore, Lost: ignore, Returning: func(*Link, int64) {}, Back: ignore, Heard: ignore, Changed: func(string, string) {}}
	p.beginLife(ctx)
	return p
}

// Connect opens the connections.
func (p *Pool) Connect() error {
	for i := range p.cfg.Connections {
		l, err := p.dial(i)
		if err != nil {
			if parse, ok := errors.AsType[*url.Error](err); ok {
				err = parse.Err // the rest of it repeats the address, password included
			}
			return fmt.Errorf("connect to nats at %s: %w; check that the server runs, and check address and credentials", p.Where(), err)
		}
		p.Links = append(p.Links, l)
	}
	return nil
}

// Where names the server without credentials that a URL may carry.
func (p *Pool) Where() string {
	if p.cfg.Embedded != nil {
		return "the embedded server"
	}
	var servers []string
	for address := range strings.SplitSeq(p.cfg.URL, ",") {
		if scheme, rest, ok := strings.Cut(address, "://"); ok {
			if at := strings.LastIndexByte(rest, '@'); at >= 0 {
				rest = rest[at+1:]
			}
			address = scheme + "://" + rest
		} else if at := strings.LastIndexByte(address, '@'); at >= 0 {
			address = address[at+1:]
		}
		servers = append(servers, strings.TrimSpace(address))
	}
	return strings.Join(servers, ",")
}

// CheckServer refuses a server that lacks something, and sizes payloads to it.
func (p *Pool) CheckServer(ctx context.Context) (err error) {
	nc := p.Links[0].NC
	version := nc.ConnectedServerVersion()
	if tooOld(version) {
		return fmt.Errorf("nats at %s: server version %q is too old; use nats-server %d.%d or newer", p.Where(), version, minServer[0], minServer[1])
	}
	if !nc.HeadersSupported() {
		return fmt.Errorf("nats at %s: the server does not support message headers; set no_header_support: false", p.Where())
	}
	p.API = "$JS.API."
	opts := []natsjs.JetStreamOpt{natsjs.WithDefaultTimeout(PublishWait), natsjs.WithClientTrace(p.countErrors())}
	var js natsjs.JetStream
	if p.cfg.Domain != "" {
		p.API = "$JS." + p.cfg.Domain + ".API."
		js, err = natsjs.NewWithDomain(nc, p.cfg.Domain, opts...)
	} else {
		js, err = natsjs.New(nc, opts...)
	}
	if err != nil {
		return err
	}
	p.JS = manager{js, PublishWait, p.Hooks.Changed}
	info := p.JS.Within(p.cfg.OpenWait).AccountInfo
	if _, err := WhenUp(ctx, p, func() (*natsjs.AccountInfo, error) { return info(ctx) }); err != nil {
		return fmt.Errorf("nats at %s: JetStream does not answer: %w; enable JetStream for this account, and check the domain", p.Where(), err)
	}
	p.MaxPayload = p.cfg.MaxPayload
	if limit := int(nc.MaxPayload()) - event.PayloadMargin; limit < p.MaxPayload {
		if limit < event.PayloadMargin {
			return fmt.Errorf("nats at %s: max_payload %d is too small; set at least %d", p.Where(), nc.MaxPayload(), 2*event.PayloadMargin)
		}
		if p.cfg.Embedded != nil {
			return fmt.Errorf("max payload %d: the embedded server allows at most %d", p.cfg.MaxPayload, limit)
		}
		p.MaxPayload = limit
	}
	p.log.InfoContext(ctx, "connected to nats", slog.String("server", p.Where()), slog.String("version", version), slog.Int("max_payload_bytes", p.MaxPayload))
	return nil
}

// tooOld reports whether a server of this version lacks something. A version that cannot be read
// counts as too old.
func tooOld(version string) bool {
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d", &major, &minor)
	return err != nil || major < minServer[0] || major == minServer[0] && minor < minServer[1]
}

// Link deals out the connections of the pool in turn.
func (p *Pool) Link() *Link {
	return p.Links[int(p.turn.Add(1))%len(p.Links)]
}

// Connected reports whether all links are up.
func (p *Pool) Connected() bool {
	for _, l := range p.Links {
		if !l.Up.Load() {
			return false
		}
	}
	return true
}

// FindStream returns ErrNotFound for a stream that does not exist.
func (p *Pool) FindStream(ctx context.Context, name string) (*natsjs.StreamInfo, error) {
	s, err := p.JS.Stream(ctx, name)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: stream %s: %w", name, err)
	}
	return s.CachedInfo(), nil
}

// Close waits for all work, and until ctx ends for what was asked over the connections. It then
// closes these. It is called once.
func (p *Pool) Close(ctx context.Context) {
	p.endLife()
	for _, l := range p.Links {
		l.drain(ctx)
		l.NC.Close()
		l.lost(nats.ErrConnectionClosed)
	}
}

// Pause waits, unless ctx or the bus ends.
func (p *Pool) Pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.Ctx.Done():
		return event.ErrClosed
	}
}

// Unavailable wraps a failure of NATS so that a client learns no more than that.
func (p *Pool) Unavailable(err error) error {
	if _, ok := errors.AsType[*event.Error](err); ok {
		return err
	}
	if p.Closing() {
		return event.ErrClosed
	}
	return &event.Error{Code: event.CodeInternal, Msg: "the event store did not answer as it should: try again later", Err: err}
}
