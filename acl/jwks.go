package acl

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/MicahParks/jwkset"
)

// Limits of a JWKS.
const (
	// MaxJWKSBytes is the maximum size of the response of a JWKS server in bytes, after
	// decompression.
	MaxJWKSBytes = 1 << 20
	// MaxJWKSKeys is the maximum number of keys in a JWKS.
	MaxJWKSKeys = 100

	// fetchTimeout is the timeout of one fetch. It is shorter than the deadline for answering AUTH.
	fetchTimeout = 5 * time.Second
	// maxRedirects is the maximum number of redirects per fetch.
	maxRedirects = 3
	// maxHeaderBytes is the maximum size of the response header in bytes.
	maxHeaderBytes = 64 << 10
)

// Accepted sizes of RSA keys. Smaller keys can be factored; larger keys make a signature check too
// slow.
const (
	minRSABits = 2048
	maxRSABits = 8192
)

// jwksAlgorithms lists the accepted algorithms, all with public keys. An HMAC key is never accepted
// from a JWKS.
var jwksAlgorithms = []string{
	"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
}

// newClient returns an HTTP client that keeps no connection open between fetches.
func newClient(cfg Config) *http.Client {
	transport := &http.Transport{
		Proxy:                  cfg.Proxy,
		DisableKeepAlives:      true,
		ForceAttemptHTTP2:      true,
		MaxResponseHeaderBytes: maxHeaderBytes,
	}
	return &http.Client{
		Transport: transport,
		CheckRedirect: func(req *http.Request, via []*http.Request) error {
			switch {
			case len(via) > maxRedirects:
				return fmt.Errorf("more than %d redirects", maxRedirects)
			case via[0].URL.Scheme == "https" && req.URL.Scheme != "https":
				return errors.New("redirected from https to http")
			}
			return nil
		},
	}
}

// fetchKeys fetches the keys of a JWKS server. Its error contains neither the response nor the URL.
func fetchKeys(ctx context.Context, client *http.Client, from string) ([]jwkset.JWK, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, errors.New("invalid URL")
	}
	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	resp, err := client.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err // the full text of e would contain the URL
		}
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("server returned status %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, MaxJWKSBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read response: %w", err)
	}
	if len(body) > MaxJWKSBytes {
		return nil, fmt.Errorf("response exceeds %d bytes", MaxJWKSBytes)
	}
	return parseKeys(body)
}

// parseKeys returns the keys of a JWKS that can verify a token. A JWKS without such a key is an
// error, so that it never replaces the known keys.
func parseKeys(body []byte) ([]jwkset.JWK, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(body, &set); err != nil {
		return nil, errors.New("response is not a JWKS")
	}
	if len(set.Keys) > MaxJWKSKeys {
		return nil, fmt.Errorf("response has %d keys; at most %d are allowed", len(set.Keys), MaxJWKSKeys)
	}
	var keys []jwkset.JWK
	for _, raw := range set.Keys {
		if key, ok := parseKey(raw); ok {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("response has no key that can verify a token")
	}
	return keys, nil
}

// parseKey parses one key. It reports false for an unusable key, which does not affect the other
// keys of the set.
func parseKey(raw []byte) (jwkset.JWK, bool) {
	var m jwkset.JWKMarshal
	if err := json.Unmarshal(raw, &m); err != nil {
		return jwkset.JWK{}, false
	}
	if m.USE != "" && m.USE != jwkset.UseSig ||
		m.KEYOPS != nil && !slices.Contains(m.KEYOPS, jwkset.KeyOpsVerify) ||
		m.ALG != "" && !slices.Contains(jwksAlgorithms, m.ALG.String()) {
		return jwkset.JWK{}, false
	}
	// Certificates are ignored: trust comes from the URL.
	m.X5C, m.X5T, m.X5TS256, m.X5U = nil, "", "", ""
	// The default options exclude private keys, and therefore symmetric keys.
	key, err := jwkset.NewJWKFromMarshal(m, jwkset.JWKMarshalOptions{}, jwkset.JWKValidateOptions{})
	if err != nil {
		return jwkset.JWK{}, false
	}
	switch public := key.Key().(type) {
	case *rsa.PublicKey:
		bits := public.N.BitLen()
		return key, bits >= minRSABits && bits <= maxRSABits
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return key, true
	}
	return jwkset.JWK{}, false
}

// fitting returns the key if it matches the algorithm, and for ES algorithms also the curve.
func fitting(key any, alg string) (any, error) {
	ok := false
	switch public := key.(type) {
	case *rsa.PublicKey:
		ok = alg[0] == 'R' || alg[0] == 'P'
	case *ecdsa.PublicKey:
		bits := map[string]int{"ES256": 256, "ES384": 384, "ES512": 521}[alg]
		ok = public.Curve.Params().BitSize == bits
	case ed25519.PublicKey:
		ok = alg == "EdDSA"
	}
	if !ok {
		return nil, errors.New("key is for another algorithm")
	}
	return key, nil
}
