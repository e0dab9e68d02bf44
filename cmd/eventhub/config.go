package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topicfile"
)

// listenFlags say where the hub listens.
type listenFlags struct {
	Bind     string        `env:"EVENTHUB_BIND" default:"127.0.0.1" help:"Address for WebSocket and HTTP. Beyond loopback a token or a JWT setting is needed."`
	WSPort   uint16        `name:"ws-port" env:"WS_PORT" default:"8090" help:"Port for WebSocket; 0 takes a free one."`
	HTTPPort uint16        `name:"http-port" env:"HTTP_PORT" default:"8081" help:"Port for HTTP; 0 takes a free one."`
	OpsBind  string        `env:"EVENTHUB_OPS_BIND" default:"127.0.0.1" help:"Address for health and metrics."`
	OpsPort  uint16        `env:"OPS_PORT" default:"8082" help:"Port for health and metrics; 0 takes a free one."`
	Metrics  string        `name:"metrics-access" env:"EVENTHUB_METRICS_ACCESS" enum:"auto,token,open" default:"auto" help:"Who may read /metrics: whoever has a token for the topic eventhub.metrics (token), everybody (open), or everybody on loopback only (auto)."`
	Grace    time.Duration `name:"drain-grace" env:"EVENTHUB_DRAIN_GRACE" default:"2s" help:"How long clients may settle the events they hold when the hub ends, up to 5s."`
	Origins  []string      `env:"EVENTHUB_ORIGINS" help:"Web origins whose pages may connect, such as https://*.example.com. Default: any on loopback, else none."`
}

// busFlags say which NATS the hub uses, and how.
type busFlags struct {
	Data       string        `env:"EVENTHUB_DATA" default:"./eventhub-data" help:"Data directory. One hub at a time may use it."`
	Sync       string        `env:"EVENTHUB_SYNC" default:"1s" help:"How often the embedded server flushes to disk: a duration, or always (before each confirmation)."`
	NATSListen string        `name:"nats-listen" env:"EVENTHUB_NATS_LISTEN" placeholder:"HOST:PORT" help:"Let native NATS clients reach the embedded server here, with the hub's token. Default: off."`
	NATSURL    string        `name:"nats-url" env:"NATS_URL" help:"Use this NATS instead of the embedded server; several addresses are separated by commas."`
	NATSCreds  string        `name:"nats-creds" env:"NATS_CREDS" placeholder:"FILE" help:"Credentials for NATS_URL."`
	NATSNKey   string        `name:"nats-nkey-seed" env:"NATS_NKEY_SEED" placeholder:"FILE" help:"NKey seed for NATS_URL."`
	NATSCA     string        `name:"nats-tls-ca" env:"NATS_TLS_CA" placeholder:"FILE" help:"CA certificates for NATS_URL."`
	NATSCert   string        `name:"nats-tls-cert" env:"NATS_TLS_CERT" placeholder:"FILE" help:"Client certificate for NATS_URL."`
	NATSKey    string        `name:"nats-tls-key" env:"NATS_TLS_KEY" placeholder:"FILE" help:"Key of the client certificate."`
	NATSDomain string        `name:"nats-domain" env:"NATS_DOMAIN" help:"JetStream domain at NATS_URL."`
	Replicas   int           `env:"EVENTHUB_REPLICAS" default:"1" help:"Copies of each new stream, 1 to 5. More than 1 needs a cluster."`
	TopicsFile string        `name:"topics" env:"EVENTHUB_TOPICS" placeholder:"FILE" help:"Rules for topics: retention, compaction, snapshots, families (docs/topics.yaml is a sample)."`
	AckWait    time.Duration `env:"EVENTHUB_ACK_WAIT" default:"30s" help:"After it, the server gives the events of a hub that died to others."`

	memory bool // the embedded server keeps nothing on disk
}

// public lists the addresses that are reached from other hosts, each with its flag.
func (f listenFlags) public() (places [][2]string) {
	for _, place := range [][2]string{{f.Bind, "--bind, EVENTHUB_BIND"}, {f.OpsBind, "--ops-bind, EVENTHUB_OPS_BIND"}} {
		if !isLoopback(place[0]) {
			places = append(places, place)
		}
	}
	return places
}

// metricsNeedToken says whether /metrics asks for a token.
func (f listenFlags) metricsNeedToken() bool {
	return f.Metrics == "token" || f.Metrics == "auto" && !isLoopback(f.OpsBind)
}

// validate finds what makes no sense.
func (f listenFlags) validate() (faults []error) {
	if f.Grace < 0 || f.Grace > maxGrace {
		faults = append(faults, fmt.Errorf("drain grace %v: 0s to %v are allowed (--drain-grace, EVENTHUB_DRAIN_GRACE)", f.Grace, maxGrace))
	}
	for _, o := range f.Origins {
		if u, err := url.Parse(o); err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
			faults = append(faults, fmt.Errorf("origin %q: give scheme://host or scheme://host:port (--origins, EVENTHUB_ORIGINS)", o))
		} else if _, err := path.Match(o, ""); err != nil {
			faults = append(faults, fmt.Errorf("origin %q: * stands for a part of the host name, and [ is not allowed (--origins, EVENTHUB_ORIGINS)", o))
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
			faults = append(faults, fmt.Errorf("port %d is given twice: choose another for one of them (%s; %s)", p.port, other, p.flag))
		}
		ports[p.port] = p.flag
	}
	return faults
}

// origins are the allowed ones as the facade wants them: nil is any, empty is none.
func (f listenFlags) origins() []string {
	if len(f.Origins) == 0 && !isLoopback(f.Bind) {
		return []string{}
	}
	return f.Origins
}

// validate finds what contradicts itself and files that cannot be read. The bus checks the rest.
func (f busFlags) validate() (faults []error) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	own := []struct{ value, flag string }{
		{f.NATSCreds, "--nats-creds, NATS_CREDS"},
		{f.NATSNKey, "--nats-nkey-seed, NATS_NKEY_SEED"},
		{f.NATSCA, "--nats-tls-ca, NATS_TLS_CA"},
		{f.NATSCert, "--nats-tls-cert, NATS_TLS_CERT"},
		{f.NATSKey, "--nats-tls-key, NATS_TLS_KEY"},
		{f.NATSDomain, "--nats-domain, NATS_DOMAIN"},
	}
	const files = 5 // of own
	for i, given := range own {
		if given.value == "" {
			continue
		}
		if f.NATSURL == "" {
			fault("%s is for a NATS of your own, and none is named: say where it is (--nats-url, NATS_URL), or leave it out", given.flag)
		} else if i < files {
			if err := readable(given.value); err != nil {
				fault("file %s: %w (%s)", given.value, err, given.flag)
			}
		}
	}
	if (f.NATSCert == "") != (f.NATSKey == "") {
		fault("a certificate for NATS and its key go together: name both (--nats-tls-cert, NATS_TLS_CERT; --nats-tls-key, NATS_TLS_KEY)")
	}
	for place := range strings.SplitSeq(f.NATSURL, ",") {
		if scheme, _, found := strings.Cut(strings.TrimSpace(place), "://"); found && !slices.Contains([]string{"nats", "tls", "ws", "wss"}, scheme) {
			fault("nats url of scheme %q: give nats://HOST:PORT, or tls, ws or wss (--nats-url, NATS_URL)", scheme)
		}
	}
	if f.NATSListen != "" {
		if _, _, err := net.SplitHostPort(f.NATSListen); err != nil {
			fault("nats listen address %q: give HOST:PORT (--nats-listen, EVENTHUB_NATS_LISTEN)", f.NATSListen)
		}
		if f.NATSURL != "" {
			fault("--nats-listen is for the embedded server, which does not run with --nats-url: choose one of them (EVENTHUB_NATS_LISTEN, NATS_URL)")
		}
	}
	if _, _, err := f.sync(); err != nil {
		fault("sync interval %q: give a duration such as 1s or 100ms, or always (--sync, EVENTHUB_SYNC)", f.Sync)
	}
	if f.AckWait < time.Second || f.AckWait > time.Hour {
		fault("ack wait %v: 1s to 1h are allowed (--ack-wait, EVENTHUB_ACK_WAIT)", f.AckWait)
	}
	switch {
	case f.Replicas < 1 || f.Replicas > 5:
		fault("replicas %d: 1 to 5 are allowed (--replicas, EVENTHUB_REPLICAS)", f.Replicas)
	case f.Replicas > 1 && f.NATSURL == "":
		fault("replicas %d: the embedded server is alone; more than 1 needs a cluster (--replicas, EVENTHUB_REPLICAS; --nats-url, NATS_URL)", f.Replicas)
	}
	return faults
}

// readable reports why a file cannot be read.
func readable(path string) error {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		return cause(err)
	}
	return f.Close()
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

// rules reads the topics file, and finds what is wrong in it and with it. Without a file there are none.
func (f busFlags) rules() (rules []jetstream.TopicRule, err error) {
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
			err = errors.Join(err, fmt.Errorf("topics file %s: the rule for %s wants %d replicas, and the embedded server is alone: more than 1 needs a cluster (--nats-url, NATS_URL)", f.TopicsFile, r.Pattern, r.Replicas))
		}
	}
	return rules, err
}

// where is where the events are.
func (f busFlags) where() string {
	switch {
	case f.NATSURL != "":
		return "NATS at NATS_URL"
	case f.memory:
		return "in memory"
	}
	return f.Data
}

// open opens the bus on the NATS that the flags name, or starts the embedded server for it. cfg says what is not in the flags:
// who listens to the bus, and the rules of topics. The flags have been checked.
func (f busFlags) open(ctx context.Context, cfg jetstream.Config, token string) (*jetstream.Bus, error) {
	cfg.Replicas, cfg.AckWait = f.Replicas, f.AckWait
	if f.NATSURL != "" {
		cfg.URL, cfg.Creds, cfg.NKeySeed, cfg.Domain = f.NATSURL, f.NATSCreds, f.NATSNKey, f.NATSDomain
		cfg.TLSCA, cfg.TLSCert, cfg.TLSKey = f.NATSCA, f.NATSCert, f.NATSKey
		bus, err := jetstream.Open(ctx, cfg)
		if err != nil {
			return nil, fmt.Errorf("%w (--nats-url, NATS_URL; --nats-creds, NATS_CREDS; --nats-domain, NATS_DOMAIN)", err)
		}
		return bus, nil
	}
	own := embedded.Config{DataDir: cmp.Or(f.Data, "eventhub-data"), Listen: f.NATSListen, Logger: cfg.Logger}
	if f.memory {
		own.DataDir = ""
	}
	if own.Listen != "" {
		own.Token = token
	}
	own.SyncInterval, own.SyncAlways, _ = f.sync()
	server, err := embedded.Start(ctx, own)
	switch {
	case errors.Is(err, embedded.ErrDataDir):
		return nil, fmt.Errorf("%w (--data, EVENTHUB_DATA)", err)
	case errors.Is(err, embedded.ErrListen):
		return nil, fmt.Errorf("%w (--nats-listen, EVENTHUB_NATS_LISTEN)", err)
	case err != nil:
		return nil, err
	}
	cfg.Server = server
	return jetstream.Open(ctx, cfg)
}
