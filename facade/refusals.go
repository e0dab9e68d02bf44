package facade

import (
	"context"
	"log/slog"
	"sync/atomic"

	"golang.org/x/time/rate"
)

// Refused tokens that are logged: refusalBurst at once, then refusalRate a second. The rest is
// counted, so that a client that guesses tokens does not fill the log.
const (
	refusalRate  = 1
	refusalBurst = 10
)

// refusals logs refused tokens. Its methods may be called concurrently.
type refusals struct {
	pace    *rate.Limiter
	skipped atomic.Int64
}

func newRefusals() *refusals { return &refusals{pace: rate.NewLimiter(refusalRate, refusalBurst)} }

// refusedToken logs that a token was refused, if the token is at fault. The log never gets any part
// of the token.
func (s *Server) refusedToken(ctx context.Context, remote, over string, f *fault) {
	switch f.code {
	case codeNoToken, codeBadToken, codeJWTInvalid:
	default:
		return
	}
	if !s.refusals.pace.Allow() {
		s.refusals.skipped.Add(1)
		return
	}
	s.log.LogAttrs(ctx, slog.LevelWarn, "refused a token", slog.String("remote", remote), slog.String("over", over),
		slog.String("code", string(f.code)), slog.String("reason", f.msg), slog.Int64("not_logged", s.refusals.skipped.Swap(0)))
}

// client describes a client in the log.
func (s *session) client(p Principal) slog.Attr {
	return slog.Group("", slog.String("principal", p.Key()), slog.String("remote", s.remote))
}
