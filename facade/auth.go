package facade

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
)

// Action is what a client wants to do with a topic.
type Action = acl.Action

// The actions that a policy can allow.
const (
	ActionPublish   = acl.Publish
	ActionSubscribe = acl.Subscribe
	ActionPresence  = acl.Presence
	ActionSchema    = acl.Schema
	ActionAdmin     = acl.Admin
)

// Authenticator turns a credential into a Principal. Its method is called concurrently and must
// return within 10 s, when the context ends.
type Authenticator interface {
	// Authenticate returns the principal of token, which is "" when the client sent none. An
	// *AuthError is shown to the client. The client gets internal for any other error, which goes
	// to the log.
	Authenticate(ctx context.Context, token string) (Principal, error)
}

// AuthError is returned by an Authenticator that refuses a token. Msg is shown to the client and
// must reveal nothing about the secret.
type AuthError struct {
	// Code is no_token, bad_token or jwt_invalid. It is internal when the token cannot be checked
	// now and the same token may be accepted later.
	Code string
	// Msg is for people.
	Msg string
}

// Error returns code and message.
func (e *AuthError) Error() string { return e.Code + ": " + e.Msg }

// Principal is an authenticated client and its policy. It belongs to one connection, or to the HTTP
// requests with one token. It is immutable: a connection caches its answers until the next AUTH.
// Its methods may be called concurrently.
type Principal interface {
	// Name is for logs.
	Name() string
	// Key identifies the principal: all Principals with the same Key share one quota. It is never
	// "".
	Key() string
	// Allows reports whether the client may do a on topic. group is "" unless a is ActionSubscribe.
	Allows(a Action, topic, group string) bool
	// Expires is when the credential, and the connection with it, ends. The zero time means never.
	Expires() time.Time
	// A Principal may also have a method Revoked() bool, which reports whether the credential was
	// withdrawn. The hub then ends the connection within a second.
}

var _ Principal = (*acl.Identity)(nil)

// Tokens returns an Authenticator that accepts the tokens that v accepts. The caller closes v after
// the Server.
func Tokens(v *acl.Verifier) Authenticator { return tokens{v} }

type tokens struct{ verifier *acl.Verifier }

func (t tokens) Authenticate(ctx context.Context, token string) (Principal, error) {
	id, err := t.verifier.Verify(ctx, token)
	if err == nil {
		return id, nil
	}
	refused, ok := errors.AsType[*acl.Error](err)
	if !ok {
		return nil, err
	}
	c := codeJWTInvalid
	switch refused.Reason {
	case acl.NoToken:
		c = codeNoToken
	case acl.BadToken:
		c = codeBadToken
	case acl.Unavailable:
		c = codeInternal
	default: // an expired token is an invalid one: the connection never had it
	}
	return nil, &AuthError{Code: string(c), Msg: refused.Msg}
}

// StaticToken returns an Authenticator that grants full access to clients with token. It panics
// when token is not allowed as a token: an empty one would admit everybody.
func StaticToken(token string) Authenticator {
	v, err := acl.NewVerifier(context.Background(), acl.Config{Static: []acl.StaticToken{{Token: token}}})
	if err != nil {
		panic("facade: StaticToken: " + err.Error())
	}
	return Tokens(v) // without JWTs there is nothing to close
}

// verify returns the principal of a token. The principal has not expired.
func (s *Server) verify(ctx context.Context, token, address string) (Principal, *fault) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	p, err := s.cfg.Auth.Authenticate(ctx, token)
	if err == nil {
		if expired(p, time.Now()) {
			return nil, &fault{code: codeJWTInvalid, msg: "The token has expired."}
		}
		return p, nil
	}
	if known, ok := errors.AsType[*AuthError](err); ok {
		return nil, &fault{code: code(known.Code), msg: known.Msg}
	}
	s.logFailure(ctx, slog.LevelError, "failed to check a token", address, slog.String("remote", address), slog.Any("error", err))
	return nil, &fault{code: codeInternal, msg: "The token could not be checked."}
}

// revocable is a Principal whose credential may be withdrawn while the client uses it.
type revocable interface {
	// Revoked reports whether the credential has been withdrawn. It is called often, and
	// concurrently.
	Revoked() bool
}

var _ revocable = (*acl.Identity)(nil)

// tokenRevoked is the message for a client whose credential was withdrawn while it was used.
const tokenRevoked = "The token has been revoked."

func revoked(p Principal) bool {
	r, ok := p.(revocable)
	return ok && r.Revoked()
}

func expired(p Principal, now time.Time) bool {
	at := p.Expires()
	return !at.IsZero() && !now.Before(at)
}

// allows asks the policy. The names must be well formed: a policy sees only names that can exist.
func (s *Server) allows(p Principal, a Action, topic, group string) bool {
	if p.Allows(a, topic, group) {
		return true
	}
	if s.log.Enabled(s.ctx, slog.LevelDebug) {
		why := "denied"
		if id, ok := p.(*acl.Identity); ok {
			why = id.Policy().Decide(a, topic, group).String()
		}
		s.log.Debug("denied an action", slog.String("principal", p.Name()), slog.String("action", string(a)),
			slog.String("topic", topic), slog.String("group", group), slog.String("decision", why))
	}
	return false
}

// mayPublish checks the topic's form, then the policy.
func (s *Server) mayPublish(p Principal, topic string) *fault {
	return s.may(p, ActionPublish, topic, "publish to")
}

// mayRead checks the topic's form, then whether the policy lets the client subscribe to the topic
// without naming a group.
func (s *Server) mayRead(p Principal, topic string) *fault {
	return s.may(p, ActionSubscribe, topic, "read")
}

func (s *Server) may(p Principal, a Action, topic, what string) *fault {
	if err := jetstream.ValidTopic(topic); err != nil {
		return busFault(err, codeBadTopic, "The topic is not well formed.")
	}
	if !s.allows(p, a, topic, "") {
		return &fault{code: codeForbidden, msg: "The policy does not allow to " + what + " " + topic + "."}
	}
	return nil
}

// deniedTopic returns the first topic of a subscription that the policy does not allow, or "".
func (s *Server) deniedTopic(p Principal, sub *subscription) string {
	if !s.allows(p, ActionSubscribe, sub.topic, sub.group) {
		return sub.topic
	}
	for _, topic := range sub.more {
		if !s.allows(p, ActionSubscribe, topic, sub.group) {
			return topic
		}
	}
	return ""
}
