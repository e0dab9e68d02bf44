package acl

import "time"

// Kind is the way in which an identity was proven.
type Kind string

// The kinds of identities.
const (
	// KindStatic identifies the owner of a configured token.
	KindStatic Kind = "static"
	// KindJWT identifies the subject of a JWT.
	KindJWT Kind = "jwt"
)

// Identity is the owner of a token, with the owner's rights. It is immutable and safe for
// concurrent use.
type Identity struct {
	kind    Kind
	name    string
	policy  *Policy
	full    bool // a static token for which no policy was configured
	limited bool // StaticToken.Limited
	expires time.Time

	// For revocations; unset for a static token.
	revocations *Revocations
	id          string    // the jti claim
	issued      time.Time // the iat claim; zero without one
}

// Kind returns the way in which the identity was proven.
func (id *Identity) Kind() Kind { return id.kind }

// Unlimited reports whether the identity is that of a static token for which no policy was
// configured. A policy that allows everything is a policy.
func (id *Identity) Unlimited() bool { return id.full }

// Limited reports whether quotas of new groups apply to the owner: of a JWT, and of a static token
// that says so.
func (id *Identity) Limited() bool { return id.kind != KindStatic || id.limited }

// Name returns the subject of the JWT, "" if it has none, or the configured name of the static
// token. The name has at most 256 bytes and no control characters.
func (id *Identity) Name() string { return id.name }

// Key identifies the principal in quotas and counters. The key includes the kind, so a JWT cannot
// pose as a static token.
func (id *Identity) Key() string { return string(id.kind) + ":" + id.name }

// Allows reports whether the owner may perform a on topic. group is the group of a Subscribe, and
// "" for other actions. Allows does not allocate.
func (id *Identity) Allows(a Action, topic, group string) bool {
	return id.policy.Decide(a, topic, group).Allowed
}

// Policy returns the policy of the identity. Policy.Decide explains a decision in more detail than
// Allows.
func (id *Identity) Policy() *Policy { return id.policy }

// Expires returns when the identity ends: Leeway after the exp claim of the JWT, which is also when
// Verify begins to refuse the token. The zero time means never.
func (id *Identity) Expires() time.Time { return id.expires }

// Revoked reports whether the token has been revoked since it was verified.
func (id *Identity) Revoked() bool {
	return id.revocations.revoked(id.id, id.name, id.issued, time.Now())
}
