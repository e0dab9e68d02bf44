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

// The bounds of a JWKS.
const (
	// MaxJWKSBytes bounds the answer of the JWKS server, after decompression.
	MaxJWKSBytes = 1 << 20
	// MaxJWKSKeys bounds the keys in it.
	MaxJWKSKeys = 100

	// fetchTimeout bounds one fetch. It is shorter than the time in which AUTH is answered.
	fetchTimeout = 5 * time.Second
	// maxRedirects bounds the redirects of one fetch.
	maxRedirects = 3
	// maxHeaderBytes bounds the header of the server's answer.
	maxHeaderBytes = 64 << 10
)

// The sizes of RSA keys that are used: below, they can be factored; above, one check takes too
// long.
const (
	minRSABits = 2048
	maxRSABits = 8192
)

// jwksAlgorithms are those of keys that have a public half. A key that could verify an HMAC is
// never taken from a JWKS.
var jwksAlgorithms = []string{
	"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
}

// newClient makes a client that leaves no connection open between fetches.
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
				return errors.New("a redirect from https to http")
			}
			return nil
		},
	}
}

// fetchKeys asks a JWKS server for its keys. The error holds nothing of the answer, and of the URL
// neither.
func fetchKeys(ctx context.Context, client *http.Client, from string) ([]jwkset.JWK, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, errors.New("the URL is not one")
	}
	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	resp, err := client.Do(req)
	if err != nil {
		if e, ok := errors.AsType[*url.Error](err); ok {
			err = e.Err // the rest of it is the whole URL
		}
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the server answered with status %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, MaxJWKSBytes+1))
	if err != nil {
		return nil, fmt.Errorf("the answer broke off: %w", err)
	}
	if len(body) > MaxJWKSBytes {
		return nil, fmt.Errorf("the answer has more than %d bytes", MaxJWKSBytes)
	}
	return parseKeys(body)
}

// parseKeys returns the keys of a JWKS that can verify a token. It is an error when there are none:
// whatever sent that, it must not take the keys away that are known.
func parseKeys(body []byte) ([]jwkset.JWK, error) {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(body, &set); err != nil {
		return nil, errors.New("the answer is no JWKS")
	}
	if len(set.Keys) > MaxJWKSKeys {
		return nil, fmt.Errorf("the answer has %d keys: %d are allowed", len(set.Keys), MaxJWKSKeys)
	}
	var keys []jwkset.JWK
	for _, raw := range set.Keys {
		if key, ok := parseKey(raw); ok {
			keys = append(keys, key)
		}
	}
	if len(keys) == 0 {
		return nil, errors.New("the answer has no key that could verify a token")
	}
	return keys, nil
}

// parseKey reads one key. One that is of no use to us is none; the others of its set may be.
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
	// Certificates prove nothing here: the URL is what is trusted.
	m.X5C, m.X5T, m.X5TS256, m.X5U = nil, "", "", ""
	// Without the private halves, a symmetric key is none at all.
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

// fitting refuses a key that is not for the algorithm. A signature by another curve than the
// algorithm's is none.
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
		return nil, errors.New("the key is for another algorithm")
	}
	return key, nil
}
