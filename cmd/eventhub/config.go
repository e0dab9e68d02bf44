package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"time"

	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topicfile"
	"eventhub/jetstream/topics"
	"eventhub/ops"
)

// listenFlags configure where the hub listens.
type listenFlags struct {
	Bind     string        `env:"EVENTHUB_BIND" default:"127.0.0.1" help:"Address for WebSocket and HTTP. An address other than loopback requires a token or a JWT setting."`
	WSPort   uint16        `name:"ws-port" env:"WS_PORT" default:"8090" help:"Port for WebSocket; 0 selects a free port."`
	HTTPPort uint16        `name:"http-port" env:"HTTP_PORT" default:"8081" help:"Port for HTTP; 0 selects a free port."`
	OpsBind  string        `env:"EVENTHUB_OPS_BIND" default:"127.0.0.1" help:"Address for health and metrics."`
	OpsPort  uint16        `env:"OPS_PORT" default:"8082" help:"Port for health and metrics; 0 selects a free port."`
	Metrics  string        `name:"metrics-access" env:"EVENTHUB_METRICS_ACCESS" enum:"auto,token,open" default:"auto" help:"Access to /metrics: token requires a token for the topic eventhub.metrics, open requires none, auto is open on loopback and token elsewhere."`
	Series   string        `name:"metrics-groups" env:"EVENTHUB_METRICS_GROUPS" default:"all" help:"How many topics, and groups, have series of their own in /metrics: all, none, or the number of those with the most lag. The others share series with the label other."`
	Grace    time.Duration `name:"drain-grace" env:"EVENTHUB_DRAIN_GRACE" default:"2s" help:"How long clients may still settle their events when the hub stops, at most 5s."`
	Origins  []string      `env:"EVENTHUB_ORIGINS" help:"Web origins whose pages may connect and use HTTP, such as https://*.example.com. Default: any on loopback without trusted proxies, otherwise none."`
	Proxies  []string      `name:"trusted-proxies" env:"EVENTHUB_TRUSTED_PROXIES" help:"Addresses of reverse proxies, such as 10.0.0.7 or 10.0.0.0/24, whose X-Forwarded-For names the client. Default: none."`
	Headers  []string      `name:"http-headers" env:"EVENTHUB_HTTP_HEADERS" help:"Further request headers that become headers of events published over HTTP, such as x-team or x-team-*. Default: none."`
}

// busFlags configure which NATS the hub uses, and how.
type busFlags struct {
	Data       string        `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"Data directory. Only one hub at a time can use it."`
	Sync       string        `env:"EVENTHUB_SYNC" default:"1s" help:"Interval between flushes of the embedded server to disk: a duration, or always (before each confirmation)."`
	NATSListen string        `name:"nats-listen" env:"EVENTHUB_NATS_LISTEN" placeholder:"HOST:PORT" help:"Address at which native NATS clients reach the embedded server with a token. Default: off."`
	NATSTLS    string        `name:"nats-listen-tls" env:"EVENTHUB_NATS_LISTEN_TLS" enum:"auto,on,off" default:"auto" help:"TLS for native NATS clients, with the certificate of --tls-cert: auto requires it unless --nats-listen is a loopback address, off sends tokens in clear text."`
	Isolation  string        `name:"nats-isolation" env:"EVENTHUB_NATS_ISOLATION" enum:"on,off" default:"on" help:"Isolation of native NATS clients: on sends answers to their inboxes only, off lets them have the server send answers to any subject. At NATS servers of your own, on needs an account of their own, which is slower."`
	NATSURL    string        `name:"nats-url" env:"NATS_URL" help:"NATS server to use instead of the embedded one; separate several addresses by commas."`
	NATSCreds  string        `name:"nats-creds" env:"NATS_CREDS" placeholder:"FILE" help:"Credentials for NATS_URL."`
	NATSNKey   string        `name:"nats-nkey-seed" env:"NATS_NKEY_SEED" placeholder:"FILE" help:"NKey seed for NATS_URL."`
	NATSCA     string        `name:"nats-tls-ca" env:"NATS_TLS_CA" placeholder:"FILE" help:"CA certificates for NATS_URL."`
	NATSCert   string        `name:"nats-tls-cert" env:"NATS_TLS_CERT" placeholder:"FILE" help:"Client certificate for NATS_URL."`
	NATSKey    string        `name:"nats-tls-key" env:"NATS_TLS_KEY" placeholder:"FILE" help:"Private key of the client certificate."`
	NATSDomain string        `name:"nats-domain" env:"NATS_DOMAIN" help:"JetStream domain at NATS_URL."`
	Replicas   int           `env:"EVENTHUB_REPLICAS" default:"1" help:"Replicas of each new stream, 1 to 5. More than 1 requires a cluster."`
	TopicsFile string        `name:"topics" env:"EVENTHUB_TOPICS" placeholder:"FILE" help:"Topics file with rules for retention, compaction, snapshots, and families; see docs/topics.yaml."`
	AckWait    time.Duration `env:"EVENTHUB_ACK_WAIT" default:"30s" help:"How long until events held by a dead hub are redelivered, 1s to 1h."`

	memory bool // the embedded server keeps nothing on disk
	// tls is the TLS configuration for native clients, or nil.
	tls *tls.Config
	// callout is how the embedded server asks about native clients; set with NATSListen.
	callout *embedded.Callout
	// clients, strangers and rates bound the native clients, and limitReached is told; set with
	// callout.
	clients, strangers int
	rates              embedded.Rates
	limitReached       func(limit string)
}

// public lists the addresses that other hosts can reach, each with its flag.
func (f listenFlags) public() (places [][2]string) {
	for _, place := range [][2]string{{f.Bind, "--bind, EVENTHUB_BIND"}, {f.OpsBind, "--ops-bind, EVENTHUB_OPS_BIND"}} {
		if !isLoopback(place[0]) {
			places = append(places, place)
		}
	}
	return places
}

// metricsNeedToken reports whether /metrics requires a token.
func (f listenFlags) metricsNeedToken() bool {
	return f.Metrics == "token" || f.Metrics == "auto" && !isLoopback(f.OpsBind)
}

// series returns how many topics and groups have series of their own. The flag has been checked.
func (f listenFlags) series() ops.Series {
	n, _ := ops.ParseSeries(f.Series)
	return n
}

// validate returns every invalid value.
func (f listenFlags) validate() (faults []error) {
	if f.Grace < 0 || f.Grace > maxGrace {
		faults = append(faults, fmt.Errorf("drain grace %v: must be 0s to %v (--drain-grace, EVENTHUB_DRAIN_GRACE)", f.Grace, maxGrace))
	}
	if _, err := ops.ParseSeries(f.Series); err != nil {
		faults = append(faults, fmt.Errorf("groups in the metrics %w (--metrics-groups, EVENTHUB_METRICS_GROUPS)", err))
	}
	for _, o := range f.Origins {
		if err := facade.ValidOrigin(o); err != nil {
			faults = append(faults, fmt.Errorf("origin %w (--origins, EVENTHUB_ORIGINS)", err))
		}
	}
	for _, p := range f.Proxies {
		if _, err := facade.ParseProxy(p); err != nil {
			faults = append(faults, fmt.Errorf("trusted proxy %w (--trusted-proxies, EVENTHUB_TRUSTED_PROXIES)", err))
		}
	}
	for _, name := range f.Headers {
		if err := facade.ValidHeader(name); err != nil {
			faults = append(faults, fmt.Errorf("request header %w (--http-headers, EVENTHUB_HTTP_HEADERS)", err))
		}
	}
	ports := make(map[uint16]string)
	for _, p := range []struct {
		port uint16
		flag string
	}{
		{f.WSPort, "--ws-port, WS_PORT"}, {f.HTTPPort, "--http-port, HTTP_PORT"}, {f.OpsPort, "--ops-port, OPS_PORT"},
	} {
		if other, twice := ports[p.port]; twice && p.port != 0 {
			faults = append(faults, fmt.Errorf("port %d is used twice; choose different ports (%s; %s)", p.port, other, p.flag))
		}
		ports[p.port] = p.flag
	}
	return faults
}

// origins returns the allowed origins in the form of facade.Config: nil allows any, an empty list
// allows none. Behind a proxy, a listener on loopback is reached from elsewhere.
func (f listenFlags) origins() []string {
	if len(f.Origins) == 0 && !f.local() {
		return []string{}
	}
	return f.Origins
}

// local reports whether clients are on this host: no other reaches the listener, and no proxy
// brings them.
func (f listenFlags) local() bool { return isLoopback(f.Bind) && len(f.Proxies) == 0 }

// trusted returns the trusted proxies. They have been checked.
func (f listenFlags) trusted() (proxies []netip.Prefix) {
	for _, text := range f.Proxies {
		p, _ := facade.ParseProxy(text)
		proxies = append(proxies, p)
	}
	return proxies
}

// validate returns every contradiction and every unreadable file. The bus checks the rest.
func (f busFlags) validate() (faults []error) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	own := []struct {
		value, flag string
		secret      bool
	}{
		{f.NATSCreds, "--nats-creds, NATS_CREDS", true},
		{f.NATSNKey, "--nats-nkey-seed, NATS_NKEY_SEED", true},
		{f.NATSCA, "--nats-tls-ca, NATS_TLS_CA", false},
		{f.NATSCert, "--nats-tls-cert, NATS_TLS_CERT", false},
		{f.NATSKey, "--nats-tls-key, NATS_TLS_KEY", true},
		{f.NATSDomain, "--nats-domain, NATS_DOMAIN", false},
	}
	const files = 5 // the first entries of own that name files
	for i, given := range own {
		if given.value == "" {
			continue
		}
		if f.NATSURL == "" {
			fault("%s requires an external NATS; set its address (--nats-url, NATS_URL) or leave it out", given.flag)
		} else if i < files {
			if err := readable(given.value, given.secret); err != nil {
				fault("%w (%s)", err, given.flag)
			}
		}
	}
	if (f.NATSCert == "") != (f.NATSKey == "") {
		fault("a NATS client certificate requires its key; set both (--nats-tls-cert, NATS_TLS_CERT; --nats-tls-key, NATS_TLS_KEY)")
	}
	if f.NATSURL != "" {
		faults = append(faults, checkNATSURL(f.NATSURL)...)
	}
	if f.NATSListen != "" {
		if _, _, err := net.SplitHostPort(f.NATSListen); err != nil {
			fault("NATS listen address %q: use HOST:PORT (--nats-listen, EVENTHUB_NATS_LISTEN)", f.NATSListen)
		}
		if f.NATSURL != "" {
			fault("--nats-listen requires the embedded server, which --nats-url replaces; choose one (EVENTHUB_NATS_LISTEN, NATS_URL)")
		}
	}
	if _, _, err := f.sync(); err != nil {
		fault("sync interval %q: use a duration such as 1s or 100ms, or always (--sync, EVENTHUB_SYNC)", f.Sync)
	}
	if f.AckWait < time.Second || f.AckWait > time.Hour {
		fault("ack wait %v: must be 1s to 1h (--ack-wait, EVENTHUB_ACK_WAIT)", f.AckWait)
	}
	switch {
	case f.Replicas < 1 || f.Replicas > 5:
		fault("replicas %d: must be 1 to 5 (--replicas, EVENTHUB_REPLICAS)", f.Replicas)
	case f.Replicas > 1 && f.NATSURL == "":
		fault("replicas %d: more than 1 requires a NATS cluster; the embedded server has no peers (--replicas, EVENTHUB_REPLICAS; --nats-url, NATS_URL)", f.Replicas)
	}
	return faults
}

// checkNATSURL returns an error for each useless address in a list.
func checkNATSURL(list string) (faults []error) {
	web := 0
	places := strings.Split(list, ",")
	for i, place := range places {
		place = strings.TrimSpace(place)
		if !strings.Contains(place, "://") {
			place = "nats://" + place
		}
		u, err := checkURL(place, "nats", "tls", "ws", "wss")
		if err != nil {
			faults = append(faults, fmt.Errorf("NATS URL %d: %w; use nats://HOST:PORT, or tls, ws or wss (--nats-url, NATS_URL)", i+1, err))
			continue
		}
		if strings.HasPrefix(u.Scheme, "ws") {
			web++
		}
	}
	if web > 0 && web < len(places) && len(faults) == 0 {
		faults = append(faults, errors.New("NATS URLs mix WebSocket with other schemes; use either ws and wss, or nats and tls (--nats-url, NATS_URL)"))
	}
	return faults
}

// readable returns an error if a file cannot be read, or if other users can read a secret.
func readable(path string, secret bool) error {
	f, err := openRegular(path)
	if err != nil {
		return fmt.Errorf("file %s: %w", path, cause(err))
	}
	defer func() { _ = f.Close() }() // read-only
	if secret {
		return checkSecretFile(f)
	}
	return nil
}

func (f busFlags) sync() (every time.Duration, always bool, err error) {
	if strings.EqualFold(f.Sync, "always") {
		return 0, true, nil
	}
	every, err = time.ParseDuration(f.Sync)
	if err == nil && every <= 0 {
		err = errors.New("not positive")
	}
	return every, false, err
}

// rules reads and checks the topics file. Without a file there are no rules.
func (f busFlags) rules() (rules []topics.Rule, err error) {
	if f.TopicsFile == "" {
		return nil, nil
	}
	if rules, err = topicfile.Load(f.TopicsFile); err != nil {
		if _, listed := errors.AsType[topicfile.Errors](err); !listed {
			err = fmt.Errorf("%w (--topics, EVENTHUB_TOPICS)", err)
		}
		return nil, err
	}
	for _, r := range rules {
		if r.Replicas > 1 && f.NATSURL == "" {
			err = errors.Join(err, fmt.Errorf("topics file %s: the rule for %s requires %d replicas, but the embedded server has no peers; more than 1 requires a NATS cluster (--nats-url, NATS_URL)", f.TopicsFile, r.Pattern, r.Replicas))
		}
	}
	return rules, err
}

// natsPublic returns the host of the NATS listener if other hosts can reach it, else "".
func (f busFlags) natsPublic() (host string, public bool) {
	host, _, err := net.SplitHostPort(f.NATSListen)
	return host, err == nil && !isLoopback(host)
}

// natsOverTLS reports whether native clients have to use TLS.
func (f busFlags) natsOverTLS() bool {
	_, public := f.natsPublic()
	return f.NATSListen != "" && (f.NATSTLS == "on" || f.NATSTLS == "auto" && public)
}

// where describes where the events are stored.
func (f busFlags) where() string {
	switch {
	case f.NATSURL != "":
		return "NATS at NATS_URL"
	case f.memory:
		return "in memory"
	}
	return f.Data
}

// open opens the bus on the NATS that the flags name, or starts the embedded server for it. cfg
// says what is not in the flags: who listens to the bus, and the rules of topics. The flags have
// been checked.
func (f busFlags) open(ctx context.Context, cfg jetstream.Config) (*jetstream.Bus, error) {
	cfg.Replicas, cfg.AckWait = f.Replicas, f.AckWait
	if f.NATSURL != "" {
		f.address(&cfg)
		bus, err := jetstream.Open(ctx, cfg)
		if err != nil {
			return nil, fmt.Errorf("%w (--nats-url, NATS_URL; --nats-creds, NATS_CREDS; --nats-domain, NATS_DOMAIN)", err)
		}
		return bus, nil
	}
	server, err := f.embed(ctx, cfg.Logger)
	if err != nil {
		return nil, err
	}
	cfg.Server = server
	return jetstream.Open(ctx, cfg)
}

// address fills in where NATS is.
func (f busFlags) address(cfg *jetstream.Config) {
	cfg.URL, cfg.Creds, cfg.NKeySeed, cfg.Domain = f.NATSURL, f.NATSCreds, f.NATSNKey, f.NATSDomain
	cfg.TLSCA, cfg.TLSCert, cfg.TLSKey = f.NATSCA, f.NATSCert, f.NATSKey
}

// embed starts the embedded server.
func (f busFlags) embed(ctx context.Context, log *slog.Logger) (*embedded.Server, error) {
	own := embedded.Config{DataDir: cmp.Or(f.Data, "eventhub-data"), Listen: f.NATSListen, TLS: f.tls, Logger: log}
	if f.memory {
		own.DataDir = ""
	}
	own.Callout, own.Clients, own.Strangers, own.Rates, own.LimitReached = f.callout, f.clients, f.strangers, f.rates, f.limitReached
	own.SyncInterval, own.SyncAlways, _ = f.sync()
	server, err := embedded.Start(ctx, own)
	switch {
	case errors.Is(err, embedded.ErrDataDir):
		return nil, fmt.Errorf("%w (--data, EVENTHUB_DATA)", err)
	case errors.Is(err, embedded.ErrListen):
		return nil, fmt.Errorf("%w (--nats-listen, EVENTHUB_NATS_LISTEN)", err)
	}
	return server, err
}
