package ops

import (
	"context"
	"encoding/json"
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
	// Guard protects the endpoint. Required.
	Guard Guard
	// Revoke stores a revocation for all hubs, and returns it with its defaults filled in. The
	// revocation has not been validated. Required.
	Revoke func(ctx context.Context, r acl.Revocation) (acl.Revocation, error)
	// Logger receives the failures of Revoke. Required.
	Logger *slog.Logger
}

// RevocationError is an error of Revocations.Revoke about the request. Its text is shown.
type RevocationError struct{ Err error }

func (e *RevocationError) Error() string { return e.Err.Error() }
func (e *RevocationError) Unwrap() error { return e.Err }

// handler serves POST /revocations.
func (c *Revocations) handler() http.Handler {
	target := func(*http.Request) (topic, group string) { return TokensTopic, "" }
	return c.Guard.Changes(target, http.HandlerFunc(c.serve))
}

func (c *Revocations) serve(w http.ResponseWriter, r *http.Request) {
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
	stored, err := c.Revoke(ctx, given)
	if bad, ok := errors.AsType[*RevocationError](err); ok {
		writeError(w, http.StatusBadRequest, "bad_options", "The body is not a revocation: "+bad.Error()+".")
		return
	}
	if err != nil {
		c.Logger.LogAttrs(ctx, slog.LevelError, "failed to revoke tokens", slog.Any("error", err))
		w.Header().Set("Retry-After", "1")
		if errors.Is(err, jetstream.ErrRevocationsFull) {
			writeError(w, http.StatusServiceUnavailable, "overloaded", "The list of revoked tokens is full (limit revocations).")
			return
		}
		writeError(w, http.StatusServiceUnavailable, "internal", "The revocation could not be stored. Nothing is known to be revoked: try again.")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(stored)
}
