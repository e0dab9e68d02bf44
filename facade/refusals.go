package facade

import (
	"context"
	"log/slog"
)

// refusedToken logs that a token was refused, if the token is at fault. The log never gets any part
// of the token.
func (s *Server) refusedToken(ctx context.Context, remote, over string, f *fault) {
	switch f.code {
	case codeNoToken, codeBadToken, codeJWTInvalid:
	default:
		return
	}
	s.often.Log(ctx, slog.LevelWarn, "refused a token", sourceOf(remote), slog.String("remote", remote), slog.String("over", over),
		slog.String("code", string(f.code)), slog.String("reason", f.msg))
}

// attrs describes a client in the log.
func (s *session) attrs(p Principal) slog.Attr {
	return slog.Group("", slog.String("principal", p.Key()), slog.String("remote", s.remote))
}
