package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/jetstream/pacedlog"
	"eventhub/ops"
)

// Times of revoking tokens.
const (
	// revokeWait is the timeout of `eventhub token revoke`.
	revokeWait = 15 * time.Second
	// revokedLoadWait is the time that the start of a hub spends on loading the revoked tokens.
	revokedLoadWait = 15 * time.Second
	// revokedPrune is the interval at which a hub forgets revocations that have ended.
	revokedPrune = time.Minute
)

// maxNamedToken is the number of bytes read of a token to revoke, one more than allowed.
const maxNamedToken = acl.MaxTokenBytes + 1

// lifeFlags configure how long tokens live.
type lifeFlags struct {
	TokenLife time.Duration `name:"token-life" env:"EVENTHUB_TOKEN_LIFE" default:"8760h" help:"Longest life of a JWT, from iat to exp. The hub refuses others. Revocations end after this time."`
}

// validate returns an error for a life that no token can have.
func (f lifeFlags) validate() error {
	if f.TokenLife < time.Minute {
		return fmt.Errorf("token life %v: must be at least 1m (--token-life, EVENTHUB_TOKEN_LIFE)", f.TokenLife)
	}
	return nil
}

// revoke stores a revocation for all hubs, and returns it with its defaults filled in.
func (f lifeFlags) revoke(ctx context.Context, bus *jetstream.Bus, r acl.Revocation) (acl.Revocation, error) {
	now := time.Now()
	if r.Subject != "" && r.IssuedBefore == 0 {
		r.IssuedBefore = now.UnixMilli()
	}
	if err := r.Validate(); err != nil {
		return r, &ops.RevocationError{Err: err}
	}
	// Tokens that are issued before a moment to come need longer than those of now.
	longest := time.UnixMilli(max(r.IssuedBefore, now.UnixMilli())).Add(f.TokenLife + 2*acl.Leeway)
	until := cmp.Or(r.Until, longest.UnixMilli())
	if r.Until != 0 && r.Subject != "" {
		until = max(until, longest.UnixMilli())
	}
	r.Until = until
	text, err := json.Marshal(r)
	if err != nil {
		return r, err
	}
	return r, bus.Admin().Revocations().Put(ctx, r.Key(), text, time.UnixMilli(r.Until).Sub(now))
}

// followRevocations loads the revocations, and observes new ones until the hub is closed. Without
// JWTs there is nothing to revoke.
func (h *hub) followRevocations(ctx context.Context) error {
	if h.auth.Revocations == nil {
		return nil
	}
	list, limited := h.auth.Revocations, h.metrics
	following, end := context.WithCancel(context.WithoutCancel(ctx))
	h.unfollow = end
	loaded := make(chan struct{})
	var first sync.Once
	often := pacedlog.New(h.log) // a list is read anew after each reconnect
	h.wg.Go(func() { often.Run(following) })
	h.wg.Go(func() {
		h.bus.Admin().Revocations().Follow(following, func() { first.Do(func() { close(loaded) }) }, func(key string, value []byte) {
			err := list.Set(key, value)
			if errors.Is(err, acl.ErrRevocationsFull) {
				limited.LimitReached("revocations")
			}
			if err != nil {
				often.Log(following, slog.LevelError, "cannot observe a revocation", "", slog.String("key", key), slog.Any("error", err))
			}
			limited.Revocations(list.Len())
		})
	})
	h.wg.Go(func() {
		tick := time.NewTicker(revokedPrune)
		defer tick.Stop()
		for {
			select {
			case <-following.Done():
				return
			case now := <-tick.C:
				list.Prune(now)
				limited.Revocations(list.Len())
			}
		}
	})
	wait := time.NewTimer(revokedLoadWait)
	defer wait.Stop()
	select {
	case <-loaded:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-wait.C:
		return fmt.Errorf("the list of revoked tokens was not read within %v; see the log", revokedLoadWait)
	}
}

// revocations returns what serves the revocation of tokens to operators, or nil without JWTs.
func (h *hub) revocations() *ops.Revocations {
	if h.auth.Revocations == nil {
		return nil
	}
	return &ops.Revocations{Revoke: func(ctx context.Context, r acl.Revocation) (acl.Revocation, error) {
		return h.cmd.lifeFlags.revoke(ctx, h.bus, r)
	}}
}

// tokenRevokeCmd is `eventhub token revoke`.
type tokenRevokeCmd struct {
	opsFlags
	lifeFlags

	NATSURL    string `name:"nats-url" env:"NATS_URL" help:"NATS of the hubs. Default: ask the hub at --ops-url, which needs a token with admin on eventhub.tokens."`
	NATSCreds  string `name:"nats-creds" env:"NATS_CREDS" placeholder:"FILE" help:"Credentials for NATS_URL."`
	NATSNKey   string `name:"nats-nkey-seed" env:"NATS_NKEY_SEED" placeholder:"FILE" help:"NKey seed for NATS_URL."`
	NATSCA     string `name:"nats-tls-ca" env:"NATS_TLS_CA" placeholder:"FILE" help:"CA certificates for NATS_URL."`
	NATSCert   string `name:"nats-tls-cert" env:"NATS_TLS_CERT" placeholder:"FILE" help:"Client certificate for NATS_URL."`
	NATSKey    string `name:"nats-tls-key" env:"NATS_TLS_KEY" placeholder:"FILE" help:"Private key of the client certificate."`
	NATSDomain string `name:"nats-domain" env:"NATS_DOMAIN" help:"JetStream domain at NATS_URL."`
	Replicas   int    `env:"EVENTHUB_REPLICAS" default:"1" help:"Replicas of the list of revoked tokens, if it has to be made."`

	ID           string    `name:"jti" help:"Revoke the JWT with this jti."`
	Subject      string    `name:"sub" help:"Revoke the JWTs of this subject that were issued before --issued-before."`
	IssuedBefore time.Time `placeholder:"TIME" help:"For --sub, such as 2026-01-31T12:00:00Z. Default: now."`
	JWT          string    `arg:"" optional:"" help:"Revoke this JWT, by its jti; - reads it from standard input. Other users of this host can see command lines."`
}

// Run stores a revocation, and prints it.
func (cmd *tokenRevokeCmd) Run(ctx context.Context, std streams) error {
	r, err := cmd.revocation(std.in)
	if err != nil {
		return err
	}
	if err := cmd.lifeFlags.validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, revokeWait)
	defer cancel()
	if cmd.NATSURL != "" {
		r, err = cmd.store(ctx, std, r)
	} else {
		r, err = cmd.ask(ctx, r)
	}
	if err != nil {
		return fmt.Errorf("revoke: %w", err)
	}
	what := "the token with jti " + strconv.Quote(r.ID)
	if r.Subject != "" {
		what = "the tokens of " + strconv.Quote(r.Subject) + " issued before " + time.UnixMilli(r.IssuedBefore).UTC().Format(time.RFC3339)
	}
	_, err = fmt.Fprintf(std.out, "revoked %s, until %s\n", what, time.UnixMilli(r.Until).UTC().Format(time.RFC3339))
	return err
}

// revocation returns what the flags name.
func (cmd *tokenRevokeCmd) revocation(in io.Reader) (r acl.Revocation, err error) {
	named := 0
	for _, given := range []string{cmd.JWT, cmd.ID, cmd.Subject} {
		if given != "" {
			named++
		}
	}
	switch {
	case named != 1:
		return r, errors.New("name what to revoke: a JWT, or --jti, or --sub")
	case !cmd.IssuedBefore.IsZero() && cmd.Subject == "":
		return r, errors.New("--issued-before goes with --sub only")
	case cmd.ID != "":
		return acl.Revocation{ID: cmd.ID}, nil
	case cmd.Subject != "":
		r = acl.Revocation{Subject: cmd.Subject, IssuedBefore: time.Now().UnixMilli()}
		if !cmd.IssuedBefore.IsZero() {
			r.IssuedBefore = cmd.IssuedBefore.UnixMilli()
		}
		return r, nil
	}
	token := cmd.JWT
	if token == "-" {
		text, err := io.ReadAll(io.LimitReader(in, maxNamedToken))
		if err != nil {
			return r, fmt.Errorf("read token: %w", cause(err))
		}
		token = strings.TrimSpace(string(text))
	}
	id, subject, ends, err := acl.Names(token)
	switch {
	case err != nil:
		return r, fmt.Errorf("token to revoke: %w", err)
	case id == "" && subject == "":
		return r, errors.New("the token has neither jti nor sub, so it cannot be revoked; change the key that signs tokens, or wait until it expires")
	case id == "":
		return r, fmt.Errorf("the token has no jti; revoke all tokens of its subject instead: --sub %s", strconv.Quote(subject))
	case ends.IsZero() || ends.Before(time.Now()):
		return r, errors.New("the token has expired, or has no exp: no hub accepts it")
	}
	return acl.Revocation{ID: id, Until: ends.Add(acl.Leeway).UnixMilli()}, nil
}

// store writes the revocation to NATS.
func (cmd *tokenRevokeCmd) store(ctx context.Context, std streams, r acl.Revocation) (acl.Revocation, error) {
	flags := busFlags{
		NATSURL: cmd.NATSURL, NATSCreds: cmd.NATSCreds, NATSNKey: cmd.NATSNKey, NATSCA: cmd.NATSCA, NATSCert: cmd.NATSCert,
		NATSKey: cmd.NATSKey, NATSDomain: cmd.NATSDomain, Replicas: cmd.Replicas, AckWait: 30 * time.Second, Sync: "always",
	}
	if faults := flags.validate(); len(faults) > 0 {
		return r, errors.Join(faults...)
	}
	log := slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	bus, err := flags.open(ctx, jetstream.Config{Logger: log})
	if err != nil {
		return r, err
	}
	r, err = cmd.lifeFlags.revoke(ctx, bus, r)
	return r, errors.Join(err, bus.Close()) //nolint:contextcheck // Close limits its own duration
}

// ask has a hub store the revocation.
func (cmd *tokenRevokeCmd) ask(ctx context.Context, r acl.Revocation) (acl.Revocation, error) {
	hub, err := cmd.hub()
	if err != nil {
		return r, err
	}
	defer hub.close()
	stored := r
	err = hub.call(ctx, opsCall{method: http.MethodPost, path: []string{"revocations"}, body: r, needs: "admin on " + ops.TokensTopic}, &stored)
	return stored, err
}
