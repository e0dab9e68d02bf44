package facade

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"eventhub/jetstream"
)

// logCause logs an error whose cause the client is not told. ctx is cancelled when the client
// leaves. topic is "" if it is unknown.
func (s *Server) logCause(ctx context.Context, topic, client string, err error) {
	known, ok := errors.AsType[*jetstream.Error](err)
	if ok && known.Err == nil {
		return // the client's own mistake
	}
	s.logFailure(ctx, slog.LevelWarn, "request failed", client, slog.String("topic", topic), slog.String("client", client), slog.Any("error", err))
}

// logFailed is logCause for a request over HTTP.
func (s *Server) logFailed(r *http.Request, topic string, err error) {
	client := s.remoteOf(r)
	if p := principalOf(r); p != nil {
		client = p.Key()
	}
	s.logCause(r.Context(), topic, client, err)
}

// logFailure logs what failed for a client. A client that has left may be the cause, so that the
// line is for debugging then. The hub's own deadlines do not cancel ctx.
func (s *Server) logFailure(ctx context.Context, level slog.Level, msg, client string, attrs ...slog.Attr) {
	if errors.Is(ctx.Err(), context.Canceled) {
		level = slog.LevelDebug
	}
	s.often.Log(ctx, level, msg, client, attrs...)
}

// client names the client in lines about its requests.
func (s *session) client() string {
	if p := s.who.Load(); p != nil {
		return (*p).Key()
	}
	return s.remote
}
