package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
)

// minNativeLife is the shortest life of a connection of a native client.
const minNativeLife = time.Minute

// calloutFlags configure who decides about native NATS clients.
type calloutFlags struct {
	AuthCallout   bool          `name:"auth-callout" env:"EVENTHUB_AUTH_CALLOUT" help:"Answer the auth callouts of the NATS servers at --nats-url, so that native clients connect with the tokens of this hub. The embedded server asks in any case."`
	Issuer        string        `name:"auth-callout-issuer" env:"EVENTHUB_AUTH_CALLOUT_ISSUER" placeholder:"FILE" help:"Seed of the account key that signs the answers."`
	XKey          string        `name:"auth-callout-xkey" env:"EVENTHUB_AUTH_CALLOUT_XKEY" placeholder:"FILE" help:"Seed of the curve key that decrypts the questions. Default: they are not encrypted."`
	HubAccount    string        `name:"auth-callout-hub-account" env:"EVENTHUB_AUTH_CALLOUT_HUB_ACCOUNT" default:"EVENTHUB" help:"NATS account of the hub."`
	ClientAccount string        `name:"auth-callout-client-account" env:"EVENTHUB_AUTH_CALLOUT_CLIENT_ACCOUNT" default:"EVENTHUB_CLIENTS" help:"NATS account of native clients, unless --nats-isolation=off."`
	NativeLife    time.Duration `name:"auth-callout-life" env:"EVENTHUB_AUTH_CALLOUT_LIFE" help:"Longest life of the connection of a native client, which then connects again; at least 1m. Default: that of its token."`
}

// validate returns every contradiction and every unreadable file.
func (f calloutFlags) validate(bus *busFlags) (faults []error) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Errorf(format, args...)) }
	switch {
	case f.AuthCallout && bus.NATSURL == "":
		fault("auth callouts of other servers require an external NATS; set its address (--nats-url, NATS_URL), or leave --auth-callout out: the embedded server asks in any case (EVENTHUB_AUTH_CALLOUT)")
	case f.AuthCallout && f.Issuer == "":
		fault("answers to auth callouts must be signed; set the file with the seed (--auth-callout-issuer, EVENTHUB_AUTH_CALLOUT_ISSUER); eventhub auth-callout config makes one")
	}
	for _, given := range [][2]string{{f.Issuer, "--auth-callout-issuer, EVENTHUB_AUTH_CALLOUT_ISSUER"}, {f.XKey, "--auth-callout-xkey, EVENTHUB_AUTH_CALLOUT_XKEY"}} {
		if given[0] == "" {
			continue
		}
		if !f.AuthCallout {
			fault("%s has no effect without --auth-callout; set it or leave the file out (EVENTHUB_AUTH_CALLOUT)", given[1])
		} else if err := readable(given[0], true); err != nil {
			fault("%w (%s)", err, given[1])
		}
	}
	if f.NativeLife != 0 && f.NativeLife < minNativeLife {
		fault("life of native connections %v: must be at least %v (--auth-callout-life, EVENTHUB_AUTH_CALLOUT_LIFE)", f.NativeLife, minNativeLife)
	}
	return faults
}

// prepareCallouts makes the keys of the embedded server's auth callouts. They live as long as the
// process, in which both sides are.
func (h *hub) prepareCallouts() error {
	if h.cmd.NATSURL != "" || h.cmd.NATSListen == "" {
		return nil
	}
	issuer, err := jetstream.NewKey(jetstream.IssuerKey)
	if err != nil {
		return err
	}
	xkey, err := jetstream.NewKey(jetstream.EncryptionKey)
	if err != nil {
		return err
	}
	h.answers = &jetstream.CalloutConfig{Issuer: issuer.Seed, XKey: xkey.Seed, HubAccount: embedded.HubAccount, Account: embedded.HubAccount, Guarded: h.cmd.Isolation == "on"}
	h.cmd.strangers, h.cmd.limitReached = h.cmd.Unauthenticated, h.metrics.LimitReached
	h.cmd.rates = h.cmd.native(h.metrics.LimitReached)
	h.cmd.callout = &embedded.Callout{Issuer: issuer.Public, XKey: xkey.Public, System: jetstream.KickSubject, Guarded: h.cmd.Isolation == "on"}
	return nil
}

// serveCallouts begins to answer auth callouts, if there are servers that ask.
func (h *hub) serveCallouts(ctx context.Context) error {
	if h.cmd.AuthCallout && h.cmd.NATSURL != "" {
		h.answers = &jetstream.CalloutConfig{HubAccount: h.cmd.HubAccount, Account: h.cmd.ClientAccount}
		var err error
		if h.answers.Issuer, err = acl.ReadSecret(h.cmd.Issuer); err != nil {
			return fmt.Errorf("%w (--auth-callout-issuer, EVENTHUB_AUTH_CALLOUT_ISSUER)", err)
		}
		if h.cmd.XKey != "" {
			if h.answers.XKey, err = acl.ReadSecret(h.cmd.XKey); err != nil {
				return fmt.Errorf("%w (--auth-callout-xkey, EVENTHUB_AUTH_CALLOUT_XKEY)", err)
			}
		}
	}
	if h.answers == nil {
		return nil
	}
	if h.cmd.Isolation == "off" {
		h.answers.Account = h.answers.HubAccount
	}
	h.answers.Life, h.answers.Authorize = h.cmd.NativeLife, h.authorize
	h.answers.Counted, h.answers.Narrowed = h.metrics.NativeClient, h.metrics.NativeNarrowed
	var err error
	h.callouts, err = h.bus.Admin().NATS().ServeCallouts(ctx, *h.answers)
	return err
}

// errRefused refuses a native client. Why is in the log.
var errRefused = errors.New("the token was refused")

// authorize returns what a native client gets.
func (h *hub) authorize(ctx context.Context, c jetstream.NativeClient) (*jetstream.NativeGrant, error) {
	p, refused := h.facade.IdentifyNative(ctx, c.Address, c.Token)
	id, _ := p.(*acl.Identity) // what facade.Tokens returns
	if refused != nil || id == nil {
		return nil, errRefused
	}
	g := &jetstream.NativeGrant{Name: id.Key(), Expires: id.Expires(), Rights: nativeRights(id), Full: id.Unlimited()}
	if id.Kind() != acl.KindStatic {
		g.Revoked = id.Revoked
	}
	return g, nil
}

// nativeRights returns the rights of a token in the terms of the bus.
func nativeRights(id *acl.Identity) *jetstream.NativeRights {
	p := id.Policy()
	reaches := func(a acl.Action) (all []jetstream.NativeReach) {
		for _, r := range p.Reaches(a) {
			all = append(all, jetstream.NativeReach{Pattern: r.Pattern, Rule: r.Rule, Whole: r.Whole})
		}
		return all
	}
	topics, groups := p.Names()
	return &jetstream.NativeRights{
		Publish: func(topic string) bool { return id.Allows(acl.Publish, topic, "") },
		Read:    func(topic string) bool { return id.Allows(acl.Subscribe, topic, "") },
		Join:    func(topic, group string) bool { return id.Allows(acl.Subscribe, topic, group) },
		Inspect: id.Inspects, MayJoin: p.MayJoin,
		PublishReach: reaches(acl.Publish), ReadReach: reaches(acl.Subscribe),
		Topics: topics, Groups: groups, Administers: len(p.Reaches(acl.Admin)) > 0,
	}
}

// writeSeed writes a seed to a new file that nobody else can read.
func writeSeed(path string, k jetstream.Key) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the directory is the operator's choice
	if err != nil {
		return fmt.Errorf("file %s: %w; existing keys are never replaced: choose another directory, or remove the file", path, cause(err))
	}
	_, err = f.WriteString(strings.TrimSpace(string(k.Seed)) + "\n")
	return errors.Join(err, f.Close())
}
