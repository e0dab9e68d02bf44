package acl

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Grant is what Sign puts into a JWT.
type Grant struct {
	// Subject is the sub.
	Subject string
	// Scopes are the scopes; see ParseScopes.
	Scopes []string
	// Policy is the JSON of a policy, which wins over Scopes; see ParsePolicy. Default: none.
	Policy []byte
	// TTL is how long it is valid, from now on. It is at least a second.
	TTL time.Duration
	// Audience and Issuer are the aud and iss. Default: none.
	Audience string
	Issuer   string
}

// Sign makes a JWT that a Verifier with the same Secret takes, for development and tests: where it
// counts, another service signs them. It refuses what Verify would refuse.
func Sign(secret []byte, g Grant) (string, error) {
	if err := checkSecret(secret); err != nil {
		return "", err
	}
	if g.TTL < time.Second {
		return "", errors.New("the time to live is below a second")
	}
	if len(g.Subject) > maxNameBytes || hasControl(g.Subject) {
		return "", fmt.Errorf("the subject has more than %d bytes or a control character", maxNameBytes)
	}
	now := time.Now()
	c := jwt.MapClaims{"iat": now.Unix(), "exp": now.Add(g.TTL).Unix()}
	for name, value := range map[string]string{"sub": g.Subject, "aud": g.Audience, "iss": g.Issuer} {
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
		return "", fmt.Errorf("sign the token: %w", err)
	}
	if len(token) > MaxTokenBytes {
		return "", fmt.Errorf("the token has %d bytes: %d are allowed: use wildcards for fewer rules", len(token), MaxTokenBytes)
	}
	return token, nil
}
