package acl

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// maxNameBytes is the maximum length of the name of a principal.
const maxNameBytes = 256

// maxDate is the last second of the year 9999. Larger values would risk an overflow.
const maxDate = 253_402_300_799

// claims holds the supported claims of a JWT. Other claims are ignored.
type claims struct {
	id        string
	subject   string
	issuer    string
	audience  jwt.ClaimStrings
	expires   *jwt.NumericDate
	notBefore *jwt.NumericDate
	issuedAt  *jwt.NumericDate

	// scopes and policy are parsed only after the signature has been checked. Each is nil if the
	// token lacks it.
	scopes json.RawMessage
	policy json.RawMessage
}

var _ jwt.Claims = (*claims)(nil)

// claimError is the name of a registered claim whose value has the wrong form.
type claimError string

func (e claimError) Error() string { return "claim " + string(e) + " has a value of the wrong form" }

func (c *claims) GetExpirationTime() (*jwt.NumericDate, error) { return c.expires, nil }
func (c *claims) GetIssuedAt() (*jwt.NumericDate, error)       { return c.issuedAt, nil }
func (c *claims) GetNotBefore() (*jwt.NumericDate, error)      { return c.notBefore, nil }
func (c *claims) GetIssuer() (string, error)                   { return c.issuer, nil }
func (c *claims) GetSubject() (string, error)                  { return c.subject, nil }
func (c *claims) GetAudience() (jwt.ClaimStrings, error)       { return c.audience, nil }

// UnmarshalJSON parses the payload of a JWT. A claim with the value null counts as missing.
func (c *claims) UnmarshalJSON(data []byte) error {
	fields, err := objectFields(data)
	if err != nil {
		return fmt.Errorf("the payload %w", err)
	}
	for _, f := range fields {
		if isNull(f.value) {
			continue
		}
		ok := true
		switch f.name {
		case "sub":
			c.subject, ok = decodeString(f.value)
			ok = ok && len(c.subject) <= maxNameBytes && !hasControl(c.subject)
		case "jti":
			c.id, ok = decodeString(f.value)
			ok = ok && len(c.id) <= maxNameBytes // a longer one could not be revoked
		case "iss":
			c.issuer, ok = decodeString(f.value)
		case "aud":
			c.audience, ok = decodeAudience(f.value)
		case "exp":
			c.expires, ok = decodeDate(f.value)
		case "nbf":
			c.notBefore, ok = decodeDate(f.value)
		case "iat":
			c.issuedAt, ok = decodeDate(f.value)
		case "scopes":
			c.scopes = f.value
		case "policy":
			c.policy = f.value
		}
		if !ok {
			return claimError(f.name)
		}
	}
	return nil
}

// grant returns the policy of the token. Its error contains no part of the claims.
func (c *claims) grant() (*Policy, error) {
	if c.policy != nil {
		p, err := parsePolicy(c.policy)
		if err != nil {
			return nil, fmt.Errorf("policy: %w", err)
		}
		return p, nil
	}
	if c.scopes == nil {
		return &Policy{}, nil
	}
	values, ok := decodeArray(c.scopes)
	if !ok {
		return nil, errors.New("scopes is not an array of strings")
	}
	scopes := make([]string, len(values))
	for i, v := range values {
		if scopes[i], ok = decodeString(v); !ok {
			return nil, errors.New("scopes is not an array of strings")
		}
	}
	return ParseScopes(scopes)
}

// decodeAudience reads a string or an array of strings.
func decodeAudience(data []byte) (jwt.ClaimStrings, bool) {
	if one, ok := decodeString(data); ok {
		return jwt.ClaimStrings{one}, true
	}
	values, ok := decodeArray(data)
	if !ok {
		return nil, false
	}
	all := make(jwt.ClaimStrings, len(values))
	for i, v := range values {
		if all[i], ok = decodeString(v); !ok {
			return nil, false
		}
	}
	return all, true
}

// decodeDate parses seconds since 1970, with an optional fraction.
func decodeDate(data []byte) (*jwt.NumericDate, bool) {
	var seconds float64
	if err := json.Unmarshal(data, &seconds); err != nil || seconds < 0 || seconds > maxDate {
		return nil, false
	}
	return &jwt.NumericDate{Time: time.UnixMilli(int64(seconds * 1000))}, true
}
