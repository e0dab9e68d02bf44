package acl

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Leeway is the tolerated clock difference when exp, nbf, and iat are checked.
const Leeway = 5 * time.Second

// MaxTokenBytes is the maximum length of a token. A policy of about 200 rules fits.
const MaxTokenBytes = 16 << 10

// Defaults of Config.
const (
	DefaultRefreshInterval = 10 * time.Minute
	DefaultFetchInterval   = 10 * time.Second
)

// Config selects the tokens that a Verifier accepts. At least one of Static, Secret, and JWKSURL
// must be set. Secret and JWKSURL exclude each other; otherwise a token could choose which one
// checks it.
type Config struct {
	// Static lists the configured tokens. They are checked before JWTs.
	Static []StaticToken

	// Secret verifies JWTs that are signed with HS256. It also allows its holder to sign them.
	Secret []byte
	// JWKSURL is the address of the public keys for JWTs that are signed with RS256, RS384, RS512,
	// PS256, PS384, PS512, ES256, ES384, ES512, or EdDSA.
	JWKSURL string
	// Audience must occur in the aud claim of a JWT. By default, aud is not checked.
	Audience string
	// Issuer must equal the iss claim of a JWT. By default, iss is not checked.
	Issuer string

	// Snapshots maps snapshot topics to the topics of which they are made. A rule that denies such
	// a topic also denies its snapshots; see Policy.Decide. Topics with the suffix .snapshot need
	// no entry.
	Snapshots map[string]string

	// MaxLife is the maximum time from the iat claim of a JWT, or from now if there is none, to its
	// exp claim. By default, there is no maximum.
	MaxLife time.Duration
	// Revocations holds the JWTs that are refused although they have not expired. By default, none
	// are. A JWT with neither jti nor sub cannot be revoked.
	Revocations *Revocations

	// RefreshInterval is the interval between fetches of the keys. A withdrawn key stays in use for
	// up to this long. Defaults to DefaultRefreshInterval.
	RefreshInterval time.Duration
	// FetchInterval is the minimum interval between fetches for unknown keys, and the delay before
	// the retry of a failed fetch. Defaults to DefaultFetchInterval.
	FetchInterval time.Duration
	// Proxy selects the proxy for the JWKS server, like http.Transport.Proxy. By default, no proxy
	// is used.
	Proxy func(*http.Request) (*url.URL, error)
	// HTTPClient fetches the keys. Set it to use a private CA. Defaults to a client that uses
	// Proxy, keeps no connections open, and follows at most 3 redirects.
	HTTPClient *http.Client

	// Logger receives failures to fetch keys. By default, nothing is logged.
	Logger *slog.Logger
}

// complete sets defaults and rejects invalid combinations.
func (cfg *Config) complete() error {
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
		return errors.New("no token would be accepted; configure a static token, a JWT secret or a JWKS URL")
	case cfg.Secret != nil && cfg.JWKSURL != "":
		return errors.New("both a JWT secret and a JWKS URL are configured; choose one")
	case cfg.Secret == nil && cfg.JWKSURL == "" && cfg.Audience+cfg.Issuer != "":
		return errors.New("an audience or an issuer is configured without a way to verify JWTs; configure a JWT secret or a JWKS URL")
	case cfg.MaxLife < 0:
		return errors.New("maximum life of a token must be positive")
	case cfg.RefreshInterval < 0 || cfg.FetchInterval < 0:
		return errors.New("JWKS intervals must be positive")
	case cfg.Secret != nil:
		return checkSecret(cfg.Secret)
	}
	return nil
}

// Validate returns every error that NewVerifier would return, without fetching keys.
func (cfg Config) Validate() error {
	_, tokens := newStaticTokens(cfg.Static)
	var keys error
	if cfg.JWKSURL != "" {
		_, keys = parseJWKSURL(cfg.JWKSURL)
	}
	if err := errors.Join(cfg.complete(), tokens, keys); err != nil {
		return fmt.Errorf("tokens: %w", err)
	}
	return nil
}

// Verifier verifies tokens. Its methods may be called concurrently.
type Verifier struct {
	static []staticToken
	parser *jwt.Parser // nil if JWTs are not accepted
	secret []byte      // nil if a JWKS is used
	keys   *keySet     // nil if a secret is used

	snapshots   map[string]string
	maxLife     time.Duration // 0 for none
	revocations *Revocations  // nil for none
}

// NewVerifier returns a Verifier. With a JWKS URL it fetches the keys once, for at most 5 seconds
// or until ctx ends, and starts a goroutine that Close ends. A failed fetch is logged and retried
// later; it is not an error.
func NewVerifier(ctx context.Context, cfg Config) (*Verifier, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	v := &Verifier{snapshots: maps.Clone(cfg.Snapshots), maxLife: cfg.MaxLife, revocations: cfg.Revocations}
	var err error
	if v.static, err = newStaticTokens(cfg.Static); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	for i := range v.static {
		v.static[i].owner.policy = v.static[i].owner.policy.with(v.snapshots)
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

// unverified parses tokens that are not verified.
var unverified = jwt.NewParser()

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

// Close ends the goroutine of the Verifier and waits for it. It may be called more than once.
// Verify still works afterwards, with the known keys.
func (v *Verifier) Close() {
	if v.keys != nil {
		v.keys.close()
	}
}

// KeysAge returns the time since the keys were last fetched from the JWKS server, or since the
// start if they never were. It is 0 without a JWKS URL.
func (v *Verifier) KeysAge() time.Duration {
	if v.keys == nil {
		return 0
	}
	return v.keys.age()
}

// Verify returns the owner of a token, or an *Error. It takes microseconds unless the token names
// an unknown key and a fetch from the JWKS server is due. It then waits for the fetch, at most
// until ctx ends.
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
	begins := time.Now()
	if c.issuedAt != nil {
		begins = c.issuedAt.Time
	}
	if v.maxLife > 0 && c.expires.Sub(begins) > v.maxLife+Leeway {
		return nil, invalid(fmt.Sprintf("The token lives for too long: there may be at most %v between iat and exp.", v.maxLife))
	}
	id := &Identity{
		kind: KindJWT, name: c.subject, policy: policy.with(v.snapshots), expires: c.expires.Add(Leeway),
		revocations: v.revocations, id: c.id,
	}
	if c.issuedAt != nil {
		id.issued = c.issuedAt.Time
	}
	if id.Revoked() {
		return nil, invalid("The token has been revoked.")
	}
	return id, nil
}

// refuse returns the error for a token that was not parsed.
func (v *Verifier) refuse(msg string) *Error {
	if v.parser == nil {
		return &Error{BadToken, msg}
	}
	return invalid(msg)
}

// key returns the function that finds the key of a JWT whose algorithm was already checked.
func (v *Verifier) key(ctx context.Context) jwt.Keyfunc {
	return func(t *jwt.Token) (any, error) {
		// crit lists extensions that a verifier must understand, and none are supported.
		if _, ok := t.Header["crit"]; ok {
			return nil, errors.New("token has critical extensions")
		}
		if v.keys == nil {
			return v.secret, nil
		}
		return v.keys.find(ctx, t)
	}
}

// refusal maps an error of the JWT library to a fixed message, because err may contain parts of the
// token.
func refusal(err error) *Error {
	if claim, ok := errors.AsType[claimError](err); ok {
		return invalid("The claim " + string(claim) + " of the token has a value of the wrong form.")
	}
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
