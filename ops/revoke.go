package ops

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
)

// TokensTopic is the topic that represents the tokens in policies. Revoking a token requires admin
// on this topic. Nothing needs to be published there.
const TokensTopic = "eventhub.tokens"

// Bounds of a request to revoke tokens.
const (
	maxRevokeBytes = 16 << 10
	revokeTimeout  = 10 * time.Second
)

// Revocations revokes tokens at POST /revocations.
type Revocations struct {
	// Revoke stores a revocation for all hubs, and returns it with its defaults filled in. The
	// revocation has not been validated. Required.
	Revoke func(ctx context.Context, r acl.Revocation) (acl.Revocation, error)
}

// RevocationError is an error of Revocations.Revoke about the request. Its text is shown.
type RevocationError struct{ Err error }

func (e *RevocationError) Error() string { return e.Err.Error() }
func (e *RevocationError) Unwrap() error { return e.Err }

// revoke serves POST /revocations.
func (s *Server) revoke(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRevokeBytes))
	if err != nil {
		writeError(w, http.StatusRequestEntityTooLarge, "bad_options", "The body is too large, or did not arrive.")
		return
	}
	given, err := acl.ParseRevocation(body)
	if err != nil {
		writeError(w, http.StatusBadRequest, "bad_options", "The body is not a revocation: "+err.Error()+".")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), revokeTimeout)
	defer cancel()
	stored, err := s.cfg.Revocations.Revoke(ctx, given)
	if bad, ok := errors.AsType[*RevocationError](err); ok {
		writeError(w, http.StatusBadRequest, "bad_options", "The body is not a revocation: "+bad.Error()+".")
		return
	}
	if err != nil {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelError, "failed to revoke tokens", slog.Any("error", err))
		if errors.Is(err, jetstream.ErrRevocationsFull) {
			writeError(w, http.StatusServiceUnavailable, "overloaded", "The list of revoked tokens is full (limit revocations).")
			return
		}
		writeError(w, http.StatusServiceUnavailable, "internal", "The revocation could not be stored. Nothing is known to be revoked: try again.")
		return
	}
	answer(w, stored)
}
