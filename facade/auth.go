package facade

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"time"
)

// Action is what a client wants to do with a topic.
type Action string

// The actions that a policy can allow.
const (
	ActionPublish   Action = "publish"
	ActionSubscribe Action = "subscribe"
	ActionAdmin     Action = "admin"
)

// Authenticator turns a credential into a Principal. It is called concurrently, and must answer within 10 s: the
// context ends then.
type Authenticator interface {
	// Authenticate returns the owner of token, which is "" when the client sent none. The error is an *AuthError for
	// whatever the client may be told; any other error is answered with internal and goes to the log.
	Authenticate(ctx context.Context, token string) (Principal, error)
}

// AuthError is returned by an Authenticator that refuses a token. Msg is shown to the client and says nothing about the
// secret.
type AuthError struct {
	// Code is no_token, bad_token or jwt_invalid.
	Code string
	// Msg is for people.
	Msg string
}

// Error gives code and message.
func (e *AuthError) Error() string { return e.Code + ": " + e.Msg }

// Principal is an authenticated client and its policy. It belongs to one connection, or to one HTTP request. It does
// not change: a connection remembers its answers until the next AUTH. Its methods may be called concurrently.
type Principal interface {
	// Name is for logs.
	Name() string
	// Allows reports whether the client may do a on topic. group is "" unless a is ActionSubscribe.
	Allows(a Action, topic, group string) bool
	// Expires is when the credential ends and the connection with it; the zero time means never.
	Expires() time.Time
}

// StaticToken returns an Authenticator that gives full rights to whoever knows token. It panics when token is empty,
// which would let everybody in.
func StaticToken(token string) Authenticator {
	if token == "" {
		panic("facade: StaticToken needs a token")
	}
	return staticToken(sha256.Sum256([]byte(token)))
}

type staticToken [sha256.Size]byte

func (want staticToken) Authenticate(_ context.Context, token string) (Principal, error) {
	if token == "" {
		return nil, &AuthError{Code: string(codeNoToken), Msg: "A token is required."}
	}
	// The hashes have one length, so the comparison tells nothing about the length of the token either.
	got := sha256.Sum256([]byte(token))
	if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
		return nil, &AuthError{Code: string(codeBadToken), Msg: "The token is not valid."}
	}
	return fullRights{}, nil
}

type fullRights struct{}

func (fullRights) Name() string                       { return "static" }
func (fullRights) Allows(Action, string, string) bool { return true }
func (fullRights) Expires() time.Time                 { return time.Time{} }
