package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"eventhub/acl"
	"eventhub/projections/process"
)

// maxPolicyFile is the number of bytes read from a policy file, one more than allowed, so that an
// oversized file is detected.
const maxPolicyFile = acl.MaxPolicyBytes + 1

// secretFlags configure the secret that signs tokens.
type secretFlags struct {
	Secret     string `name:"jwt-secret" env:"JWT_SECRET" help:"Secret that signs tokens with HS256, at least 32 bytes. Other users of this host can see command lines; use JWT_SECRET or a file instead."`
	SecretFile string `name:"jwt-secret-file" env:"JWT_SECRET_FILE" placeholder:"FILE" help:"File with the secret."`
}

// secret returns the secret, or nil if there is none.
func (f secretFlags) secret() ([]byte, error) {
	switch {
	case f.Secret != "" && f.SecretFile != "":
		return nil, errors.New("JWT secret set twice; use either --jwt-secret or --jwt-secret-file (JWT_SECRET, JWT_SECRET_FILE)")
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

// tokenFlags configure the hub's own token.
type tokenFlags struct {
	Token     string `env:"WS_TOKEN" help:"The hub's own token. Other users of this host can see command lines; use WS_TOKEN or a file instead."`
	TokenFile string `name:"token-file" env:"WS_TOKEN_FILE" placeholder:"FILE" help:"File with the hub's own token."`
}

// configured returns the configured token, or "" if there is none.
func (f tokenFlags) configured() (string, error) {
	switch {
	case f.Token != "" && f.TokenFile != "":
		return "", errors.New("token set twice; use either --token or --token-file (WS_TOKEN, WS_TOKEN_FILE)")
	case f.TokenFile != "":
		token, err := acl.ReadSecret(f.TokenFile)
		if err != nil {
			return "", fmt.Errorf("%w (--token-file, WS_TOKEN_FILE)", err)
		}
		return string(token), nil
	}
	return f.Token, nil
}

// looksLikeJWT reports whether a token is a JWT, signed or not.
func looksLikeJWT(token string) bool {
	_, _, err := jwt.NewParser().ParseUnverified(token, jwt.MapClaims{})
	return err == nil
}

// claimFlags configure the claims of JWTs.
type claimFlags struct {
	Audience string `name:"jwt-aud" env:"JWT_AUD" help:"Required aud claim of tokens. Default: any."`
	Issuer   string `name:"jwt-iss" env:"JWT_ISS" help:"Required iss claim of tokens. Default: any."`
}

// authFlags configure the tokens that a hub accepts besides its own.
type authFlags struct {
	secretFlags
	claimFlags
	lifeFlags

	JWKSURL     string `name:"jwt-jwks-url" env:"JWT_JWKS_URL" help:"URL of the public keys (JWKS) that verify JWTs."`
	TokenPolicy string `name:"token-policy" env:"WS_TOKEN_POLICY" placeholder:"FILE" help:"Policy of the hub's own token, as JSON. Default: full access."`
}

// jwt reports whether the hub accepts JWTs.
func (f authFlags) jwt() bool { return f.Secret != "" || f.SecretFile != "" || f.JWKSURL != "" }

// config returns the configuration of the verifier. static is the hub's own token, or "" for none.
// The error lists all invalid flags and files; the configuration then holds the valid rest.
func (f authFlags) config(static string) (acl.Config, error) {
	cfg := acl.Config{JWKSURL: f.JWKSURL, Audience: f.Audience, Issuer: f.Issuer, MaxLife: f.TokenLife, Proxy: http.ProxyFromEnvironment}
	var errs []error
	fault := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	fault(f.lifeFlags.validate())
	var err error
	cfg.Secret, err = f.secret()
	fault(err)
	if cfg.Secret != nil && cfg.JWKSURL != "" {
		fault(errors.New("both a JWT secret and a JWKS URL are set; choose one (JWT_SECRET, JWT_JWKS_URL)"))
		cfg.JWKSURL = ""
	}
	policy, err := f.policy()
	fault(err)
	if static != "" {
		cfg.Static = []acl.StaticToken{{Token: static, Policy: policy}}
	}
	return cfg, errors.Join(errs...)
}

// policy returns the policy of the hub's own token, or nil for full access.
func (f authFlags) policy() (*acl.Policy, error) {
	if f.TokenPolicy == "" {
		return nil, nil //nolint:nilnil // no policy is not an error
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
	defer func() { _ = f.Close() }() // read-only
	text, err := io.ReadAll(io.LimitReader(f, maxPolicyFile))
	if err != nil {
		return nil, fmt.Errorf("policy file %s: %w", path, cause(err))
	}
	return text, nil
}

// examples are the scopes for the examples in the documentation.
var examples = map[string][]string{
	// For a publisher of heartbeats and a page that shows the state of processes.
	"heartbeat": {"publish:" + process.TopicHeartbeat, "subscribe:" + process.TopicState},
}

// tokenCmd is `eventhub token`.
type tokenCmd struct {
	Sign   tokenSignCmd   `cmd:"" default:"withargs" help:"Sign a token (JWT) for development and tests (the default command)."`
	Revoke tokenRevokeCmd `cmd:"" help:"Revoke a token, or all tokens of a subject. Hubs then refuse them, and end their connections."`
}

// tokenSignCmd is `eventhub token sign`.
type tokenSignCmd struct {
	secretFlags
	claimFlags

	Sub     string        `default:"dev" help:"Subject of the token (sub)."`
	Scope   []string      `sep:"none" placeholder:"ACTION:PATTERN" help:"Scope, such as publish:heartbeat.* or subscribe:process.**; may be repeated."`
	Policy  string        `placeholder:"FILE" help:"File with a policy as JSON, instead of scopes."`
	Example string        `enum:"heartbeat," default:"" help:"Scopes of an example: heartbeat allows publishing heartbeats and showing the state of processes."`
	TTL     time.Duration `name:"ttl" default:"1h" help:"Lifetime of the token."`
}

// Run prints a token that a hub with the same secret accepts.
func (cmd *tokenSignCmd) Run(std streams) error {
	secret, err := cmd.secret()
	if err != nil {
		return err
	}
	if secret == nil {
		return errors.New("no secret to sign with; set JWT_SECRET to the hub's secret, or --jwt-secret-file to its file; openssl rand -hex 32 creates a secret")
	}
	grant := acl.Grant{Subject: cmd.Sub, ID: rand.Text(), TTL: cmd.TTL, Audience: cmd.Audience, Issuer: cmd.Issuer}
	grant.Scopes = append(append(grant.Scopes, examples[cmd.Example]...), cmd.Scope...)
	switch {
	case cmd.Policy != "" && grant.Scopes != nil:
		return errors.New("--policy excludes --scope and --example")
	case cmd.Policy != "":
		if grant.Policy, err = readPolicy(cmd.Policy); err != nil {
			return err
		}
	case grant.Scopes == nil:
		return errors.New("token would have no rights; set --scope, --policy or --example")
	}
	token, err := acl.Sign(secret, grant)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(std.out, token)
	return err
}
