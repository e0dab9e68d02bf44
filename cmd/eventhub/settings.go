package main

import (
	"errors"
	"fmt"
	"slices"

	"eventhub/acl"
	"eventhub/jetstream/topics"
)

// minPublicToken is the minimum length of a token that other hosts can try to guess.
const minPublicToken = 16

// settings is the checked configuration of a hub, beyond its flags.
type settings struct {
	// token is the hub's own token, or "" if there is none. With makesToken, the token is in the
	// data directory and is created if it is missing.
	token      string
	makesToken bool
	auth       acl.Config
	// cert is nil without TLS.
	cert    *certificate
	certOps bool
	// topics are the rules of the topics file.
	topics []topics.Rule
	// outbox is the outbox of OUTBOX_DSN, or nil.
	outbox *outboxDSN
	// tracing says where spans go, or is nil.
	tracing *traceSettings
}

// opsCert returns the certificate of the ops port, or nil if the port does not use TLS.
func (s *settings) opsCert() *certificate {
	if s.certOps {
		return s.cert
	}
	return nil
}

// prepare reads the whole configuration, including files, and returns all errors in it. It changes
// nothing.
func (cmd *serveCmd) prepare() (set settings, faults []error) {
	fault := func(err error) bool {
		if many, ok := err.(interface{ Unwrap() []error }); ok {
			faults = append(faults, many.Unwrap()...)
		} else if err != nil {
			faults = append(faults, err)
		}
		return err != nil
	}
	faults = slices.Concat(cmd.unread, cmd.listenFlags.validate())

	var err error
	set.token, err = cmd.configured()
	unknown := fault(err)
	if set.token == "" && !unknown && !cmd.jwt() {
		set.makesToken = true
	}
	if looksLikeJWT(set.token) {
		fault(errors.New("the hub's own token is a JWT, which would grant full access to its holder; choose another, for example from openssl rand -hex 32; clients take their JWT from EVENTHUB_TOKEN (--token, WS_TOKEN, WS_TOKEN_FILE)"))
	}
	own := set.token
	if set.makesToken {
		own = "(created at startup)"
	}
	set.auth, err = cmd.authFlags.config(own)
	fault(err)
	// otherwise there is an error already
	if len(set.auth.Static) > 0 || set.auth.Secret != nil || set.auth.JWKSURL != "" {
		if err := set.auth.Validate(); err != nil {
			fault(fmt.Errorf("%w (WS_TOKEN, JWT_SECRET, JWT_JWKS_URL)", err))
		}
	}
	if own == "" && !unknown && cmd.TokenPolicy != "" {
		fault(errors.New("a token policy is set, but the hub has no token of its own; set WS_TOKEN or leave the policy out (--token-policy, WS_TOKEN_POLICY)"))
	}
	faults = append(faults, cmd.checkPublic(&set)...)

	set.cert, err = cmd.certificate()
	fault(err)
	set.certOps = cmd.tlsFlags.Ops
	fault(cmd.secureNATS(&set))
	faults = append(faults, cmd.busFlags.validate()...)
	faults = append(faults, cmd.calloutFlags.validate(&cmd.busFlags)...)
	faults = append(faults, cmd.limitFlags.validate()...)
	set.topics, err = cmd.rules()
	fault(err)
	set.auth.Snapshots = snapshotTopics(set.topics)
	set.outbox, err = cmd.outboxDSN()
	fault(err)
	fault(checkSkew(cmd.Skew, "--outbox-clock-skew"))
	var untraced []error
	set.tracing, untraced = cmd.traceFlags.settings()
	faults = append(faults, untraced...)
	return set, faults
}

// secureNATS gives the NATS listener the certificate of the hub. It refuses to let native clients
// send the hub's token in clear text from other hosts, unless the operator has said so.
func (cmd *serveCmd) secureNATS(set *settings) error {
	switch {
	case !cmd.natsOverTLS():
		return nil
	case set.cert != nil:
		cmd.busFlags.tls = set.cert.config()
		return nil
	case cmd.Cert != "" || cmd.Key != "":
		return nil // the certificate has a fault of its own
	case cmd.NATSTLS == "on":
		return errors.New("TLS for native NATS clients requires a certificate and its key; set both (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY) or leave it out (--nats-listen-tls, EVENTHUB_NATS_LISTEN_TLS)")
	}
	return fmt.Errorf("NATS listen address %q is reachable from other hosts, and without TLS native clients send their tokens in clear text; set a certificate and its key (--tls-cert, EVENTHUB_TLS_CERT; --tls-key, EVENTHUB_TLS_KEY), use 127.0.0.1 (--nats-listen, EVENTHUB_NATS_LISTEN), or accept that with --nats-listen-tls=off (EVENTHUB_NATS_LISTEN_TLS)", cmd.NATSListen)
}

// snapshotTopics returns the topics of snapshots, each with the topic of which they are made.
func snapshotTopics(rules []topics.Rule) map[string]string {
	topics := make(map[string]string)
	for _, r := range rules {
		if r.Snapshot != nil {
			topics[r.Snapshot.Topic] = r.Pattern
		}
	}
	return topics
}

// checkPublic rejects addresses that other hosts can reach if no operator has chosen a credential.
func (cmd *serveCmd) checkPublic(set *settings) (faults []error) {
	public := cmd.public()
	if host, natsPublic := cmd.natsPublic(); natsPublic {
		public = append(public, [2]string{host, "--nats-listen, EVENTHUB_NATS_LISTEN"})
	}
	if set.makesToken {
		for _, place := range public {
			faults = append(faults, fmt.Errorf("address %q is reachable from other hosts, but no token is configured; set WS_TOKEN (openssl rand -hex 32 creates one), JWT_SECRET or JWT_JWKS_URL, or use 127.0.0.1 (%s)", place[0], place[1]))
		}
	}
	if n := len(set.token); n > 0 && n < minPublicToken && len(public) > 0 {
		faults = append(faults, fmt.Errorf("address %q is reachable from other hosts, but the hub's token has only %d bytes and can be guessed; use at least %d bytes, for example from openssl rand -hex 32 (--token, WS_TOKEN, WS_TOKEN_FILE)", public[0][0], n, minPublicToken))
	}
	return faults
}
