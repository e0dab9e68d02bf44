package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"eventhub/jetstream"
)

// listenFlags say where the hub listens.
type listenFlags struct {
	Bind     string        `env:"EVENTHUB_BIND" default:"127.0.0.1" help:"Address for WebSocket and HTTP. Beyond loopback WS_TOKEN must be set."`
	WSPort   uint16        `name:"ws-port" env:"WS_PORT" default:"8090" help:"Port for WebSocket; 0 takes a free one."`
	HTTPPort uint16        `name:"http-port" env:"HTTP_PORT" default:"8081" help:"Port for HTTP; 0 takes a free one."`
	OpsBind  string        `env:"EVENTHUB_OPS_BIND" default:"127.0.0.1" help:"Address for health and metrics, which ask for no credential."`
	OpsPort  uint16        `env:"OPS_PORT" default:"8082" help:"Port for health and metrics; 0 takes a free one."`
	Token    string        `env:"WS_TOKEN" help:"The token clients must know. Default: one is made, and kept in the data directory."`
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
	AckWait    time.Duration `env:"EVENTHUB_ACK_WAIT" default:"30s" help:"After it, the server gives the events of a hub that died to others."`
}

// check refuses what would listen beyond this host without a credential that somebody chose, and what is no origin.
func (f listenFlags) check(natsListen string) error {
	var errs []error
	if f.Grace < 0 || f.Grace > maxGrace {
		errs = append(errs, fmt.Errorf("drain grace %v: 0s to %v are allowed (--drain-grace, EVENTHUB_DRAIN_GRACE)", f.Grace, maxGrace))
	}
	errs = append(errs,
		f.checkBind(f.Bind, "--bind, EVENTHUB_BIND"),
		f.checkBind(f.OpsBind, "--ops-bind, EVENTHUB_OPS_BIND"),
	)
	if natsListen != "" {
		host, _, err := net.SplitHostPort(natsListen)
		if err != nil {
			errs = append(errs, fmt.Errorf("nats listen address %q: give HOST:PORT (--nats-listen, EVENTHUB_NATS_LISTEN)", natsListen))
		} else {
			errs = append(errs, f.checkBind(host, "--nats-listen, EVENTHUB_NATS_LISTEN"))
		}
	}
	for _, o := range f.Origins {
		if u, err := url.Parse(o); err != nil || u.Scheme == "" || u.Host == "" || u.Path != "" {
			errs = append(errs, fmt.Errorf("origin %q: give scheme://host or scheme://host:port (--origins, EVENTHUB_ORIGINS)", o))
		}
	}
	return errors.Join(errs...)
}

func (f listenFlags) checkBind(host, flag string) error {
	if f.Token == "" && !isLoopback(host) {
		return fmt.Errorf("address %q is reached from other hosts, and no token was chosen: set WS_TOKEN, or use 127.0.0.1 (%s)", host, flag)
	}
	return nil
}

// origins are the allowed ones as the facade wants them: nil is any, empty is none.
func (f listenFlags) origins() []string {
	if len(f.Origins) == 0 && !isLoopback(f.Bind) {
		return []string{}
	}
	return f.Origins
}

// check refuses what contradicts itself. The bus checks the rest.
func (f busFlags) check() error {
	if f.NATSURL != "" && f.NATSListen != "" {
		return errors.New("--nats-listen is for the embedded server, which does not run with --nats-url: choose one of them (EVENTHUB_NATS_LISTEN, NATS_URL)")
	}
	if f.NATSURL == "" {
		for _, given := range [][2]string{
			{f.NATSCreds, "--nats-creds, NATS_CREDS"},
			{f.NATSNKey, "--nats-nkey-seed, NATS_NKEY_SEED"},
			{f.NATSCA, "--nats-tls-ca, NATS_TLS_CA"},
			{f.NATSCert, "--nats-tls-cert, NATS_TLS_CERT"},
			{f.NATSKey, "--nats-tls-key, NATS_TLS_KEY"},
			{f.NATSDomain, "--nats-domain, NATS_DOMAIN"},
		} {
			if given[0] != "" {
				return fmt.Errorf("%s is for a NATS of your own, and none is named: say where it is (--nats-url, NATS_URL), or leave it out", given[1])
			}
		}
	}
	for place := range strings.SplitSeq(f.NATSURL, ",") {
		if scheme, _, found := strings.Cut(strings.TrimSpace(place), "://"); found && !slices.Contains([]string{"nats", "tls", "ws", "wss"}, scheme) {
			return fmt.Errorf("nats url of scheme %q: give nats://HOST:PORT, or tls, ws or wss (--nats-url, NATS_URL)", scheme)
		}
	}
	if _, _, err := f.sync(); err != nil {
		return fmt.Errorf("sync interval %q: give a duration such as 1s or 100ms, or always (--sync, EVENTHUB_SYNC)", f.Sync)
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

// config is the bus's configuration, but for who listens to it. The flags have been checked.
func (f busFlags) config(token string) jetstream.Config {
	cfg := jetstream.Config{
		URL: f.NATSURL, Creds: f.NATSCreds, NKeySeed: f.NATSNKey,
		TLSCA: f.NATSCA, TLSCert: f.NATSCert, TLSKey: f.NATSKey, Domain: f.NATSDomain,
		DataDir: f.Data, Listen: f.NATSListen, Replicas: f.Replicas, AckWait: f.AckWait,
	}
	if f.NATSListen != "" {
		cfg.ListenToken = token
	}
	cfg.SyncInterval, cfg.SyncAlways, _ = f.sync()
	return cfg
}
