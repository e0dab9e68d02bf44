package acl

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"strings"
)

// MaxStaticTokens bounds the static tokens of a hub: each is compared with every token that comes.
const MaxStaticTokens = 100

// StaticToken is a token that is configured, and known to whoever may use it. It never expires.
type StaticToken struct {
	// Name is the name of its owner, for logs and quotas. Default: static.
	Name string
	// Token is the secret.
	Token string
	// Policy is what its owner may do. Default: everything.
	Policy *Policy
}

// staticToken is a StaticToken as it is kept: without the token.
type staticToken struct {
	hash  [sha256.Size]byte
	owner *Identity
}

func newStaticTokens(configured []StaticToken) ([]staticToken, error) {
	if len(configured) > MaxStaticTokens {
		return nil, fmt.Errorf("%d static tokens: %d are allowed", len(configured), MaxStaticTokens)
	}
	tokens := make([]staticToken, 0, len(configured))
	seen := make(map[[sha256.Size]byte]struct{})
	for i, c := range configured {
		if c.Name == "" {
			c.Name = "static"
		}
		if c.Policy == nil {
			c.Policy = FullRights()
		}
		hash := sha256.Sum256([]byte(c.Token))
		_, twice := seen[hash]
		var err error
		switch {
		case c.Token == "":
			err = errors.New("it is empty, which would let everybody in")
		case len(c.Token) > MaxSecretBytes:
			err = fmt.Errorf("it has %d bytes: %d are allowed", len(c.Token), MaxSecretBytes)
		case strings.TrimSpace(c.Token) != c.Token || hasControl(c.Token):
			err = errors.New("it has blanks around it or a control character: clients could not send it in a header")
		case twice:
			err = errors.New("another one is the same: whose is it?")
		case len(c.Name) > maxNameBytes || hasControl(c.Name):
			err = fmt.Errorf("its name has more than %d bytes or a control character", maxNameBytes)
		}
		if err != nil {
			return nil, fmt.Errorf("static token %d: %w", i+1, err)
		}
		seen[hash] = struct{}{}
		tokens = append(tokens, staticToken{hash, &Identity{kind: KindStatic, name: c.Name, policy: c.Policy}})
	}
	return tokens, nil
}

// findStatic returns the owner of a token, or nil. How long it takes does not depend on the token:
// hashes have one length, each is compared in constant time, and all of them are.
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
