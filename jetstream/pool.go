package jetstream

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

// pool has the connections of a bus to NATS, with its life and its clock. Its methods may be called
// concurrently, but connect, checkServer and close come one after another.
type pool struct {
	lifecycle

	cfg   poolConfig
	log   *slog.Logger
	obs   event.Observer
	clock *clock

	links      []*link
	hooks      linkHooks     // set before there are links
	turn       atomic.Uint32 // deals the links out
	js         manager       // over links[0]; for what is not hot
	api        string        // prefix of the JetStream API subjects
	maxPayload int           // in bytes
}

// poolConfig says where NATS is, and who hears of it.
type poolConfig struct {
	// embedded is a server in this process, which replaces what follows.
	embedded embeddedServer
	// url is a server, or several separated by commas. The rest is as in Config.
	url, creds, nkeySeed, tlsCA, tlsCert, tlsKey, domain string

	connections int
	maxPayload  int           // the largest payload that is wanted, in bytes
	margin      time.Duration // native.Margin of the AckWait of the hub
	openWait    time.Duration // how long a question of Open waits for an answer

	log   *slog.Logger
	obs   event.Observer
	clock *clock
	// warn logs a line that an outage can repeat: seldom for each key.
	warn func(ctx context.Context, msg, key string, attrs ...slog.Attr)
}

// embeddedServer is a NATS server in this process.
type embeddedServer interface {
	Connection() (url string, options []nats.Option)
}

// newPool returns a pool without connections. The values of ctx go on, but its end is not that of
// the pool.
func newPool(ctx context.Context, cfg poolConfig) *pool {
	p := &pool{cfg: cfg, log: cfg.log, obs: cfg.obs, clock: cfg.clock}
	ignore := func(*link) {}
	p.hooks = linkHooks{cut: ignore, lost: ignore, returning: func(*link, int64) {}, back: ignore, heard: ignore, changed: func(string, string) {}}
	p.beginLife(ctx)
	return p
}

// connect opens the connections.
func (p *pool) connect() error {
	for i := range p.cfg.connections {
		l, err := p.dial(i)
		if err != nil {
			if parse, ok := errors.AsType[*url.Error](err); ok {
				err = parse.Err // the rest of it repeats the address, password included
			}
			return fmt.Errorf("connect to nats at %s: %w; check that the server runs, and check address and credentials", p.where(), err)
		}
		p.links = append(p.links, l)
	}
	return nil
}

// where names the server without credentials that a URL may carry.
func (p *pool) where() string {
	if p.cfg.embedded != nil {
		return "the embedded server"
	}
	var servers []string
	for address := range strings.SplitSeq(p.cfg.url, ",") {
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

// checkServer refuses a server that lacks something, and sizes payloads to it.
func (p *pool) checkServer(ctx context.Context) (err error) {
	nc := p.links[0].nc
	version := nc.ConnectedServerVersion()
	if tooOld(version) {
		return fmt.Errorf("nats at %s: server version %q is too old; use nats-server %d.%d or newer", p.where(), version, minServer[0], minServer[1])
	}
	if !nc.HeadersSupported() {
		return fmt.Errorf("nats at %s: the server does not support message headers; set no_header_support: false", p.where())
	}
	p.api = "$JS.API."
	opts := []natsjs.JetStreamOpt{natsjs.WithDefaultTimeout(publishWait), natsjs.WithClientTrace(p.countErrors())}
	var js natsjs.JetStream
	if p.cfg.domain != "" {
		p.api = "$JS." + p.cfg.domain + ".API."
		js, err = natsjs.NewWithDomain(nc, p.cfg.domain, opts...)
	} else {
		js, err = natsjs.New(nc, opts...)
	}
	if err != nil {
		return err
	}
	p.js = manager{js, publishWait, p.hooks.changed}
	info := p.js.within(p.cfg.openWait).AccountInfo
	if _, err := whenUp(ctx, p, func() (*natsjs.AccountInfo, error) { return info(ctx) }); err != nil {
		return fmt.Errorf("nats at %s: JetStream does not answer: %w; enable JetStream for this account, and check the domain", p.where(), err)
	}
	p.maxPayload = p.cfg.maxPayload
	if limit := int(nc.MaxPayload()) - event.PayloadMargin; limit < p.maxPayload {
		if limit < event.PayloadMargin {
			return fmt.Errorf("nats at %s: max_payload %d is too small; set at least %d", p.where(), nc.MaxPayload(), 2*event.PayloadMargin)
		}
		if p.cfg.embedded != nil {
			return fmt.Errorf("max payload %d: the embedded server allows at most %d", p.cfg.maxPayload, limit)
		}
		p.maxPayload = limit
	}
	p.log.InfoContext(ctx, "connected to nats", slog.String("server", p.where()), slog.String("version", version), slog.Int("max_payload_bytes", p.maxPayload))
	return nil
}

// tooOld reports whether a server of this version lacks something. A version that cannot be read
// counts as too old.
func tooOld(version string) bool {
	var major, minor int
	_, err := fmt.Sscanf(version, "%d.%d", &major, &minor)
	return err != nil || major < minServer[0] || major == minServer[0] && minor < minServer[1]
}

// link deals out the connections of the pool in turn.
func (p *pool) link() *link {
	return p.links[int(p.turn.Add(1))%len(p.links)]
}

func (p *pool) connected() bool {
	for _, l := range p.links {
		if !l.up.Load() {
			return false
		}
	}
	return true
}

// findStream returns ErrNotFound for a stream that does not exist.
func (p *pool) findStream(ctx context.Context, name string) (*natsjs.StreamInfo, error) {
	s, err := p.js.Stream(ctx, name)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return nil, event.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("jetstream: stream %s: %w", name, err)
	}
	return s.CachedInfo(), nil
}

// close waits for all work, and until ctx ends for what was asked over the connections. It then
// closes these. It is called once.
func (p *pool) close(ctx context.Context) {
	p.endLife()
	for _, l := range p.links {
		l.drain(ctx)
		l.nc.Close()
		l.lost(nats.ErrConnectionClosed)
	}
}

// pause waits, unless ctx or the bus ends.
func (p *pool) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-p.ctx.Done():
		return event.ErrClosed
	}
}
