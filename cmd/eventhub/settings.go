package main

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"eventhub/acl"
	"eventhub/jetstream"
)

// minPublicToken is the least length of a token that other hosts can try to guess.
const minPublicToken = 16

// settings are what a hub is started with, beyond its flags.
type settings struct {
	// token is the hub's own, "" when there is none. makesToken: it is the one in the data directory.
	token      string
	makesToken bool
	auth       acl.Config
	// cert is nil without TLS.
	cert    *certificate
	certOps bool
	// topics are the rules of the topics file.
	topics []jetstream.TopicRule
	// outbox is that of OUTBOX_DSN, nil without one.
	outbox *outboxDSN
}

// opsCert is the certificate of the operations port, nil when it does not use it.
func (s *settings) opsCert() *certificate {
	if s.certOps {
		return s.cert
	}
	return nil
}

// prepare reads the whole configuration, files included, and finds everything that is wrong with it. Nothing is changed.
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
	own := set.token
	if set.makesToken {
		own = "(made when the hub starts)"
	}
	set.auth, err = cmd.authFlags.config(own)
	fault(err)
	if len(set.auth.Static) > 0 || set.auth.Secret != nil || set.auth.JWKSURL != "" { // else there is a fault already
		if err := set.auth.Validate(); err != nil {
			fault(fmt.Errorf("%w (WS_TOKEN, JWT_SECRET, JWT_JWKS_URL)", err))
		}
	}
	if own == "" && !unknown && cmd.TokenPolicy != "" {
		fault(errors.New("there is a policy for the hub's own token, but no such token beside JWTs: set WS_TOKEN, or leave the policy out (--token-policy, WS_TOKEN_POLICY)"))
	}
	faults = append(faults, cmd.checkPublic(&set)...)

	set.cert, err = cmd.certificate()
	fault(err)
	set.certOps = cmd.tlsFlags.Ops
	faults = append(faults, cmd.busFlags.validate()...)
	faults = append(faults, cmd.limitFlags.validate()...)
	set.topics, err = cmd.rules()
	fault(err)
	set.outbox, err = cmd.outboxDSN()
	fault(err)
	fault(checkSkew(cmd.Skew, "--outbox-clock-skew"))
	return set, faults
}

// checkPublic refuses what would listen beyond this host without a credential that somebody chose, and native clients that
// may do more than the hub's token.
func (cmd *serveCmd) checkPublic(set *settings) (faults []error) {
	public := cmd.public()
	host, _, err := net.SplitHostPort(cmd.NATSListen)
	natsPublic := cmd.NATSListen != "" && err == nil && !isLoopback(host)
	if natsPublic {
		public = append(public, [2]string{host, "--nats-listen, EVENTHUB_NATS_LISTEN"})
	}
	if set.makesToken {
		for _, place := range public {
			faults = append(faults, fmt.Errorf("address %q is reached from other hosts, and no token was chosen: set WS_TOKEN (openssl rand -hex 32 makes one), JWT_SECRET or JWT_JWKS_URL, or use 127.0.0.1 (%s)", place[0], place[1]))
		}
	}
	if n := len(set.token); n > 0 && n < minPublicToken && len(public) > 0 {
		faults = append(faults, fmt.Errorf("address %q is reached from other hosts, and the hub's token has %d bytes, which can be guessed: at least %d are needed there: make one with openssl rand -hex 32 (--token, WS_TOKEN, WS_TOKEN_FILE)", public[0][0], n, minPublicToken))
	}
	if cmd.NATSListen == "" {
		return faults
	}
	if cmd.jwt() && set.token == "" {
		faults = append(faults, errors.New("native NATS clients need the hub's own token, and there is none beside JWTs: set WS_TOKEN, or do not listen for them (--nats-listen, EVENTHUB_NATS_LISTEN)"))
	}
	if cmd.TokenPolicy != "" {
		faults = append(faults, errors.New("native NATS clients may do everything with the hub's token, whatever its policy says: leave out the policy, or do not listen for them (--token-policy, WS_TOKEN_POLICY; --nats-listen, EVENTHUB_NATS_LISTEN)"))
	}
	return faults
}
