package acl

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
)

// MaxStaticTokens is the maximum number of static tokens of a hub. Each received token is compared
// with all of them.
const MaxStaticTokens = 100

// StaticToken is a configured token. It never expires.
type StaticToken struct {
	// Name is the name of the owner in logs and quotas. Defaults to "static".
	Name string
	// Token is the secret token. Required.
	Token string
	// Policy holds the rights of the owner. Defaults to full access.
	Policy *Policy
	// Limited applies the quotas of new groups to the owner, as to the subject of a JWT. Set it for
	// a token that others than the operator can have. Defaults to no quotas.
	Limited bool
}

// staticToken is the stored form of a StaticToken, with a hash in place of the token.
type staticToken struct {
	hash  [sha256.Size]byte
	owner *Identity
}

func newStaticTokens(configured []StaticToken) ([]staticToken, error) {
	if len(configured) > MaxStaticTokens {
		return nil, fmt.Errorf("%d static tokens; at most %d are allowed", len(configured), MaxStaticTokens)
	}
	tokens := make([]staticToken, 0, len(configured))
	seen := make(map[[sha256.Size]byte]struct{})
	for i, c := range configured {
		if c.Name == "" {
			c.Name = "static"
		}
		full := c.Policy == nil
		if full {
			c.Policy = FullRights()
		}
		hash := sha256.Sum256([]byte(c.Token))
		_, twice := seen[hash]
		var err error
		switch {
		case c.Token == "":
			err = errors.New("it is empty, which would grant access to everyone")
		case len(c.Token) > MaxSecretBytes:
			err = fmt.Errorf("it has %d bytes; at most %d are allowed", len(c.Token), MaxSecretBytes)
		case strings.TrimSpace(c.Token) != c.Token || hasControl(c.Token):
			err = errors.New("it has surrounding spaces or a control character, so clients cannot send it in a header")
		case twice:
			err = errors.New("it is a duplicate of another static token")
		case len(c.Name) > maxNameBytes || hasControl(c.Name):
			err = fmt.Errorf("name has more than %d bytes or a control character", maxNameBytes)
		}
		if err != nil {
			return nil, fmt.Errorf("static token %d: %w", i+1, err)
		}
		seen[hash] = struct{}{}
		tokens = append(tokens, staticToken{hash, &Identity{kind: KindStatic, name: c.Name, policy: c.Policy, full: full, limited: c.Limited}})
	}
	return tokens, nil
}

// findStatic returns the owner of a token, or nil. Its time does not depend on the token: it
// compares hashes of equal length in constant time and always compares all of them.
func findStatic(tokens []staticToken, token string) *Identity {
	hash := sha256.Sum256([]byte(token))
	var owner *Identity
	for i := range tokens {
		if subtle.ConstantTimeCompare(hash[:], tokens[i].hash[:]) == 1 {
			owner = tokens[i].owner
		}
	}
	return owner
}
