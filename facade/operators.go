package facade

import (
	"context"
	"net/http"
	"time"
)

// Refusal says why a request to another port of the hub is refused.
type Refusal struct {
	// Status is the HTTP status.
	Status int
	// Code is the error code of the protocol, and Msg is for people. Both may be shown.
	Code, Msg string
	// Wait is the time after which a retry may succeed; 0 when unknown.
	Wait time.Duration
	// Ends says that the connection must end.
	Ends bool
}

func (f *fault) refusal() *Refusal {
	if f == nil {
		return nil
	}
	return &Refusal{f.rule().status, string(f.code), f.msg, f.wait, f.ends}
}

// Identify returns the owner of the token of a request to the operations port. A refused token
// counts and waits as one of a client does (Limits.BadTokenRate, Limits.TokenCheckRate). A valid
// token is verified at each request.
func (s *Server) Identify(r *http.Request, token string) (Principal, *Refusal) {
	p, fail := s.authenticateRequest(r, token, "ops")
	return p, fail.refusal()
}

// IdentifyNative returns the owner of the token of a native NATS client at an address, without its
// port. A refused token counts and waits as one of any other client does.
func (s *Server) IdentifyNative(ctx context.Context, address, token string) (Principal, *Refusal) {
	p, fail := s.authenticate(ctx, token, guesser{address: sourceOf(address), overHTTP: true})
	if fail != nil {
		s.refusedToken(ctx, address, "nats", fail)
	}
	return p, fail.refusal()
}

// Throttle takes one publish over the operations port from the quotas of its principal and its
// topic (Limits.PrincipalRate, Limits.TopicRate).
func (s *Server) Throttle(p Principal, topic string) *Refusal { return s.throttle(p, topic).refusal() }
