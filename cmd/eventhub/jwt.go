package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"eventhub/acl"
	"eventhub/projections/process"
)

// maxPolicyFile is how much of a policy file is read. It is enough to see that there is too much.
const maxPolicyFile = acl.MaxPolicyBytes + 1

// secretFlags say which secret signs tokens.
type secretFlags struct {
	Secret     string `name:"jwt-secret" env:"JWT_SECRET" help:"Secret that signs tokens with HS256, 32 bytes at least. Other users of this host can read it on a command line: set JWT_SECRET or name a file."`
	SecretFile string `name:"jwt-secret-file" env:"JWT_SECRET_FILE" placeholder:"FILE" help:"File that holds the secret."`
}

// secret returns the secret, nil when there is none.
func (f secretFlags) secret() ([]byte, error) {
	switch {
	case f.Secret != "" && f.SecretFile != "":
		return nil, errors.New("the secret is given twice: choose --jwt-secret or --jwt-secret-file (JWT_SECRET, JWT_SECRET_FILE)")
	case f.SecretFile != "":
		secret, err := acl.ReadSecret(f.SecretFile)
		if err != nil {
			return nil, fmt.Errorf("%w (--jwt-secret-file, JWT_SECRET_FILE)", err)
		}
		return secret, nil
	case f.Secret != "":
		return []byte(f.Secret), nil
	}
	return nil, nil
}

// tokenFlags say which token a hub has of its own.
type tokenFlags struct {
	Token     string `env:"WS_TOKEN" help:"The hub's own token. Other users of this host can read it on a command line: set WS_TOKEN or name a file."`
	TokenFile string `name:"token-file" env:"WS_TOKEN_FILE" placeholder:"FILE" help:"File that holds the hub's own token."`
}

// configured returns the token, "" when there is none.
func (f tokenFlags) configured() (string, error) {
	switch {
	case f.Token != "" && f.TokenFile != "":
		return "", errors.New("the token is given twice: choose --token or --token-file (WS_TOKEN, WS_TOKEN_FILE)")
	case f.TokenFile != "":
		token, err := acl.ReadSecret(f.TokenFile)
		if err != nil {
			return "", fmt.Errorf("%w (--token-file, WS_TOKEN_FILE)", err)
		}
		return string(token), nil
	}
	return f.Token, nil
}

// claimFlags are what a hub wants to find in a token.
type claimFlags struct {
	Audience string `name:"jwt-aud" env:"JWT_AUD" help:"The aud of tokens. Default: any."`
	Issuer   string `name:"jwt-iss" env:"JWT_ISS" help:"The iss of tokens. Default: any."`
}

// authFlags say which tokens a hub takes, besides its own.
type authFlags struct {
	secretFlags
	claimFlags

	JWKSURL     string `name:"jwt-jwks-url" env:"JWT_JWKS_URL" help:"Where the public keys are that verify tokens (JWTs)."`
	TokenPolicy string `name:"token-policy" env:"WS_TOKEN_POLICY" placeholder:"FILE" help:"Policy of the hub's own token, as JSON. Default: it may do everything."`
}

// jwt reports whether tokens are taken that somebody else signs.
func (f authFlags) jwt() bool { return f.Secret != "" || f.SecretFile != "" || f.JWKSURL != "" }

// config is the verifier's configuration for a hub whose own token is static; "" is none. The error is all that is wrong
// with the flags and the files that they name; the configuration is what else there is.
func (f authFlags) config(static string) (acl.Config, error) {
	cfg := acl.Config{JWKSURL: f.JWKSURL, Audience: f.Audience, Issuer: f.Issuer, Proxy: http.ProxyFromEnvironment}
	var errs []error
	fault := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	var err error
	cfg.Secret, err = f.secret()
	fault(err)
	if cfg.Secret != nil && cfg.JWKSURL != "" {
		fault(errors.New("both a secret and a JWKS URL for tokens: choose one of them (JWT_SECRET, JWT_JWKS_URL)"))
		cfg.JWKSURL = ""
	}
	policy, err := f.policy()
	fault(err)
	if static != "" {
		cfg.Static = []acl.StaticToken{{Token: static, Policy: policy}}
	}
	return cfg, errors.Join(errs...)
}

// policy is that of the hub's own token; nil is full rights.
func (f authFlags) policy() (*acl.Policy, error) {
	if f.TokenPolicy == "" {
		return nil, nil //nolint:nilnil // having none is not an error
	}
	text, err := readPolicy(f.TokenPolicy)
	if err != nil {
		return nil, fmt.Errorf("%w (--token-policy, WS_TOKEN_POLICY)", err)
	}
	p, err := acl.ParsePolicy(text)
	if err != nil {
		return nil, fmt.Errorf("policy file %s: %w (--token-policy, WS_TOKEN_POLICY)", f.TokenPolicy, err)
	}
	return p, nil
}

func readPolicy(path string) ([]byte, error) {
	f, err := os.Open(path) //nolint:gosec // the file is the operator's choice
	if err != nil {
		return nil, fmt.Errorf("policy file %s: %w", path, cause(err))
	}
	defer func() { _ = f.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(f, maxPolicyFile))
	if err != nil {
		return nil, fmt.Errorf("policy file %s: %w", path, cause(err))
	}
	return text, nil
}

// examples are the scopes that go with the examples of the documentation.
var examples = map[string][]string{
	// A publisher of heartbeats, and a page that shows the state of processes.
	"heartbeat": {"publish:" + process.TopicHeartbeat, "subscribe:" + process.TopicState},
}

// tokenCmd is `eventhub token`.
type tokenCmd struct {
	secretFlags
	claimFlags

	Sub     string        `default:"dev" help:"Whose token it is (sub)."`
	Scope   []string      `sep:"none" placeholder:"ACTION:PATTERN" help:"What it allows, such as publish:heartbeat.* or subscribe:process.**; may be repeated."`
	Policy  string        `placeholder:"FILE" help:"A policy as JSON instead of scopes."`
	Example string        `enum:"heartbeat," default:"" help:"The scopes of an example: heartbeat publishes heartbeats and shows the state of processes."`
	TTL     time.Duration `name:"ttl" default:"1h" help:"How long it is valid."`
}

// Run prints a token that a hub with the same secret takes.
func (cmd *tokenCmd) Run(std streams) error {
	secret, err := cmd.secret()
	if err != nil {
		return err
	}
	if secret == nil {
		return errors.New("no secret to sign with: set JWT_SECRET to that of the hub, or name its file with --jwt-secret-file; openssl rand -hex 32 makes one")
	}
	grant := acl.Grant{Subject: cmd.Sub, TTL: cmd.TTL, Audience: cmd.Audience, Issuer: cmd.Issuer}
	grant.Scopes = append(append(grant.Scopes, examples[cmd.Example]...), cmd.Scope...)
	switch {
	case cmd.Policy != "" && grant.Scopes != nil:
		return errors.New("--policy wins over scopes: leave out --scope and --example")
	case cmd.Policy != "":
		if grant.Policy, err = readPolicy(cmd.Policy); err != nil {
			return err
		}
	case grant.Scopes == nil:
		return errors.New("a token without rights is of no use: give --scope, --policy or --example")
	}
	token, err := acl.Sign(secret, grant)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(std.out, token)
	return err
}
