package acl

// Reason classifies why a token was refused.
type Reason string

// The reasons. All except Expired and Unavailable are error codes of the client protocol.
const (
	// NoToken: no token was given.
	NoToken Reason = "no_token"
	// BadToken: the token is not a configured one, and is not a JWT or JWTs are not accepted.
	BadToken Reason = "bad_token"
	// InvalidJWT: the JWT is malformed, meant for another audience, not signed by a trusted key, or
	// contains scopes or a policy that cannot be parsed.
	InvalidJWT Reason = "jwt_invalid"
	// Expired: the JWT was valid but has expired. Clients that authenticate see jwt_invalid.
	Expired Reason = "token_expired"
	// Unavailable: the token cannot be checked now, because the keys cannot be fetched. The same
	// token may be accepted later.
	Unavailable Reason = "unavailable"
)

// Error is returned by Verify for a token that is not accepted. It contains no part of the token
// and wraps no error, so it is safe to show and to log.
type Error struct {
	// Reason is the machine-readable cause.
	Reason Reason
	// Msg is a text for people, including the client.
	Msg string
}

// Error returns the reason and the message.
func (e *Error) Error() string { return string(e.Reason) + ": " + e.Msg }

func invalid(msg string) *Error { return &Error{InvalidJWT, msg} }
