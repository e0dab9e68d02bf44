package acl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Leeway is by how much clocks may differ: exp, nbf and iat are taken with it.
const Leeway = 5 * time.Second

// MaxTokenBytes bounds a token. A policy of about 200 rules fits in.
const MaxTokenBytes = 16 << 10

// The defaults of Config.
const (
	DefaultRefreshInterval = 10 * time.Minute
	DefaultFetchInterval   = 10 * time.Second
)

// Config says which tokens a Verifier takes. At least one of Static, Secret and JWKSURL must be
// set, and only one of the last two: a hub that took both could be told by a token which of them to
// ask.
type Config struct {
	// Static are tokens that are configured. They are looked at first.
	Static []StaticToken

	// Secret verifies JWTs that are signed with HS256, and no other algorithm. Whoever knows it can
	// sign them.
	Secret []byte
	// JWKSURL is where the public keys are that verify JWTs signed with RS256, RS384, RS512, PS256,
	// PS384, PS512, ES256, ES384, ES512 or EdDSA, and no other algorithm.
	JWKSURL string
	// Audience must be in the aud of a JWT. Default: aud is not looked at.
	Audience string
	// Issuer must be the iss of a JWT. Default: iss is not looked at.
	Issuer string

	// RefreshInterval is how often the keys are fetched, and so how long one that was withdrawn may
	// still be in use. Default: DefaultRefreshInterval.
	RefreshInterval time.Duration
	// FetchInterval is the least time between two fetches because of a key that is not known, and
	// how long it takes to the next try after one that failed. Default: DefaultFetchInterval.
	FetchInterval time.Duration
	// Proxy chooses the proxy on the way to the JWKS server, as that of http.Transport does.
	// Default: none.
	Proxy func(*http.Request) (*url.URL, error)
	// HTTPClient fetches the keys. Default: one that uses Proxy, keeps no connections and follows
	// few redirects. Set it for a CA of your own.
	HTTPClient *http.Client

	// Logger is told when the keys cannot be fetched. Default: nobody is told.
	Logger *slog.Logger
}

// validate sets what is left open and refuses what makes no sense.
func (cfg *Config) validate() error {
	if cfg.RefreshInterval == 0 {
		cfg.RefreshInterval = DefaultRefreshInterval
	}
	if cfg.FetchInterval == 0 {
		cfg.FetchInterval = DefaultFetchInterval
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	switch {
	case len(cfg.Static) == 0 && cfg.Secret == nil && cfg.JWKSURL == "":
		return errors.New("no token would be taken: configure a static token, a JWT secret or a JWKS URL")
	case cfg.Secret != nil && cfg.JWKSURL != "":
		return errors.New("both a JWT secret and a JWKS URL are configured: choose one of them")
	case cfg.Secret == nil && cfg.JWKSURL == "" && cfg.Audience+cfg.Issuer != "":
		return errors.New("an audience or an issuer is configured, but nothing to verify a JWT with: configure a JWT secret or a JWKS URL")
	case cfg.RefreshInterval < 0 || cfg.FetchInterval < 0:
		return errors.New("the intervals of the JWKS must be positive")
	case cfg.Secret != nil:
		return checkSecret(cfg.Secret)
	}
	return nil
}

// Check finds what NewVerifier would refuse, all of it, and fetches nothing.
func (cfg Config) Check() error {
	_, tokens := newStaticTokens(cfg.Static)
	var keys error
	if cfg.JWKSURL != "" {
		_, keys = parseJWKSURL(cfg.JWKSURL)
	}
	if err := errors.Join(cfg.validate(), tokens, keys); err != nil {
		return fmt.Errorf("tokens: %w", err)
	}
	return nil
}

// Verifier says whose a token is. Its methods may be called concurrently.
type Verifier struct {
	static []staticToken
	parser *jwt.Parser // nil when no JWT is taken
	secret []byte      // nil with a JWKS
	keys   *keySet     // nil with a secret
}

// NewVerifier makes a Verifier. With a JWKS URL it fetches the keys once, which ctx and 5 s bound,
// and starts a goroutine that Close ends. A JWKS server that is down is no error: it is logged, and
// the keys are fetched when it is back.
func NewVerifier(ctx context.Context, cfg Config) (*Verifier, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	v := &Verifier{}
	var err error
	if v.static, err = newStaticTokens(cfg.Static); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	switch {
	case cfg.JWKSURL != "":
		if v.keys, err = newKeySet(ctx, cfg); err != nil {
			return nil, fmt.Errorf("tokens: %w", err)
		}
		v.parser = newParser(jwksAlgorithms, cfg)
	case cfg.Secret != nil:
		v.secret = slices.Clone(cfg.Secret)
		v.parser = newParser([]string{"HS256"}, cfg)
	}
	return v, nil
}

func newParser(algorithms []string, cfg Config) *jwt.Parser {
	options := []jwt.ParserOption{
		jwt.WithValidMethods(algorithms), jwt.WithStrictDecoding(),
		jwt.WithExpirationRequired(), jwt.WithIssuedAt(), jwt.WithLeeway(Leeway),
	}
	if cfg.Audience != "" {
		options = append(options, jwt.WithAudience(cfg.Audience))
	}
	if cfg.Issuer != "" {
		options = append(options, jwt.WithIssuer(cfg.Issuer))
	}
	return jwt.NewParser(options...)
}

// Close ends what the Verifier has started and waits for it. It may be called twice. Verify works
// on with the keys that are known.
func (v *Verifier) Close() {
	if v.keys != nil {
		v.keys.close()
	}
}

// Verify returns whose token it is. The error is an *Error. It takes microseconds, unless the token
// names a key that is not known and it is time to ask the JWKS server for it: then it waits for the
// answer, until ctx ends at the latest.
func (v *Verifier) Verify(ctx context.Context, token string) (*Identity, error) {
	if token == "" {
		return nil, &Error{NoToken, "A token is required."}
	}
	if len(token) > MaxTokenBytes {
		return nil, v.refuse(fmt.Sprintf("The token has more than %d bytes.", MaxTokenBytes))
	}
	if owner := findStatic(v.static, token); owner != nil {
		return owner, nil
	}
	if len(v.static) > 0 && strings.Count(token, ".") != 2 || v.parser == nil {
		return nil, &Error{BadToken, "The token is not valid."}
	}
	c := &claims{}
	if _, err := v.parser.ParseWithClaims(token, c, v.key(ctx)); err != nil {
		return nil, refusal(err)
	}
	policy, err := c.grant()
	if err != nil {
		return nil, invalid("The token's rights are malformed: " + err.Error() + ".")
	}
	return &Identity{kind: KindJWT, name: c.subject, policy: policy, expires: c.expires.Add(Leeway)}, nil
}

// refuse is for a token that nobody looked into.
func (v *Verifier) refuse(msg string) *Error {
	if v.parser == nil {
		return &Error{BadToken, msg}
	}
	return invalid(msg)
}

// key finds the key of a JWT whose algorithm has been checked.
func (v *Verifier) key(ctx context.Context) jwt.Keyfunc {
	return func(t *jwt.Token) (any, error) {
		// crit names extensions without which the token must not be understood, and we know none.
		if _, ok := t.Header["crit"]; ok {
			return nil, errors.New("the token has critical extensions")
		}
		if v.keys == nil {
			return v.secret, nil
		}
		return v.keys.find(ctx, t)
	}
}

// refusal tells what is wrong with a JWT in words of our own: those of err may hold parts of it.
func refusal(err error) *Error {
	for _, r := range []struct {
		is     error
		reason Reason
		msg    string
	}{
		{errKeysUnavailable, Unavailable, "The token cannot be checked now: try again later."},
		{jwt.ErrTokenMalformed, InvalidJWT, "The token is not a well-formed JWT."},
		{jwt.ErrTokenSignatureInvalid, InvalidJWT, "The token is not signed by a trusted key."},
		{jwt.ErrTokenUnverifiable, InvalidJWT, "The token is not signed by a trusted key."},
		{jwt.ErrTokenRequiredClaimMissing, InvalidJWT, "The token lacks a claim: exp is required, and aud and iss where the hub checks them."},
		{jwt.ErrTokenInvalidAudience, InvalidJWT, "The token is for another audience."},
		{jwt.ErrTokenInvalidIssuer, InvalidJWT, "The token is from another issuer."},
		{jwt.ErrTokenExpired, Expired, "The token has expired."},
		{jwt.ErrTokenNotValidYet, InvalidJWT, "The token is not valid yet."},
		{jwt.ErrTokenUsedBeforeIssued, InvalidJWT, "The token was issued in the future."},
	} {
		if errors.Is(err, r.is) {
			return &Error{r.reason, r.msg}
		}
	}
	return invalid("The token is not valid.")
}
