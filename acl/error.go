package acl

// Reason is why a token was refused.
type Reason string

// The reasons. But for the last two they are the codes that a client gets.
const (
	// NoToken: none was given.
	NoToken Reason = "no_token"
	// BadToken: it is not a configured one, and it cannot be a JWT, or none are taken.
	BadToken Reason = "bad_token"
	// InvalidJWT: it is malformed, not for this hub, not signed by a trusted key, or asks for
	// rights in a way that is not understood.
	InvalidJWT Reason = "jwt_invalid"
	// Expired: it was valid once. To a client that wants to authenticate this is jwt_invalid.
	Expired Reason = "token_expired"
	// Unavailable: nobody can tell now, because the keys cannot be fetched. The same token may be
	// taken later.
	Unavailable Reason = "unavailable"
)

// Error is returned by Verify for a token that it does not take. It holds nothing of the token, and
// it wraps nothing, so it may be shown and logged.
type Error struct {
	// Reason is for programs.
	Reason Reason
	// Msg is for people, the client's included.
	Msg string
}

// Error gives reason and message.
func (e *Error) Error() string { return string(e.Reason) + ": " + e.Msg }

func invalid(msg string) *Error { return &Error{InvalidJWT, msg} }
