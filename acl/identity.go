package acl

import "time"

// Kind says how somebody proved who they are.
type Kind string

// The kinds of identities.
const (
	// KindStatic is whoever knows a configured token.
	KindStatic Kind = "static"
	// KindJWT is the subject of a JWT.
	KindJWT Kind = "jwt"
)

// Identity is who a token belongs to, and what its owner may do. It does not change and may be used
// concurrently.
type Identity struct {
	kind    Kind
	name    string
	policy  *Policy
	expires time.Time
}

// Kind says what was verified.
func (id *Identity) Kind() Kind { return id.kind }

// Name is the subject of the JWT, "" when it has none, or the configured name of the static token.
// It has no control characters, and at most 256 bytes.
func (id *Identity) Name() string { return id.name }

// Key tells principals apart, for quotas and counters. A JWT cannot take the name of a static
// token: its kind is part of it.
func (id *Identity) Key() string { return string(id.kind) + ":" + id.name }

// Allows reports whether the owner may do a on topic. group is "" unless a is Subscribe. It does
// not allocate.
func (id *Identity) Allows(a Action, topic, group string) bool {
	return id.policy.Decide(a, topic, group).Allowed
}

// Policy returns the policy, which says more about a decision than Allows.
func (id *Identity) Policy() *Policy { return id.policy }

// Expires is when the identity ends: Leeway after the JWT's exp, just when Verify would begin to
// refuse it. The zero time means never.
func (id *Identity) Expires() time.Time { return id.expires }
