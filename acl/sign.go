package acl

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Grant is the content of a JWT that Sign makes.
type Grant struct {
	// Subject is the sub claim.
	Subject string
	// ID is the jti claim, by which the JWT can be revoked. Optional.
	ID string
	// Scopes is the scopes claim; see ParseScopes.
	Scopes []string
	// Policy is the policy claim in JSON, which takes precedence over Scopes; see ParsePolicy.
	// Optional.
	Policy []byte
	// TTL is the lifetime of the JWT. At least 1 second.
	TTL time.Duration
	// Audience and Issuer are the aud and iss claims. Optional.
	Audience string
	Issuer   string
}

// Sign returns a JWT that a Verifier with the same Secret accepts. It is intended for development
// and tests; in production, a separate service should sign tokens. Sign returns an error for a
// grant that Verify would refuse.
func Sign(secret []byte, g Grant) (string, error) {
	if err := checkSecret(secret); err != nil {
		return "", err
	}
	if g.TTL < time.Second {
		return "", errors.New("time to live is below 1 second")
	}
	if len(g.Subject) > maxNameBytes || hasControl(g.Subject) {
		return "", fmt.Errorf("subject has more than %d bytes or a control character", maxNameBytes)
	}
	if len(g.ID) > maxNameBytes {
		return "", fmt.Errorf("id has more than %d bytes", maxNameBytes)
	}
	now := time.Now()
	c := jwt.MapClaims{"iat": now.Unix(), "exp": now.Add(g.TTL).Unix()}
	for name, value := range map[string]string{"sub": g.Subject, "jti": g.ID, "aud": g.Audience, "iss": g.Issuer} {
		if value != "" {
			c[name] = value
		}
	}
	if g.Scopes != nil {
		if _, err := ParseScopes(g.Scopes); err != nil {
			return "", err
		}
		c["scopes"] = g.Scopes
	}
	if g.Policy != nil {
		if _, err := ParsePolicy(g.Policy); err != nil {
			return "", err
		}
		c["policy"] = json.RawMessage(g.Policy)
	}
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, c).SignedString(secret)
	if err != nil {
		return "", fmt.Errorf("sign token: %w", err)
	}
	if len(token) > MaxTokenBytes {
		return "", fmt.Errorf("token has %d bytes; at most %d are allowed; use wildcards for fewer rules", len(token), MaxTokenBytes)
	}
	return token, nil
}
