package ops

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"eventhub/acl"
)

// MetricsTopic stands for the metrics in policies: who may subscribe to it, or is its admin, may
// read them where they ask for a token. It is a name only; nothing need be published there.
const MetricsTopic = "eventhub.metrics"

// Verifier says whose a token is. *acl.Verifier is one.
type Verifier interface {
	// Verify returns the owner of a token, or an *acl.Error.
	Verify(ctx context.Context, token string) (*acl.Identity, error)
}

// Target says which topic a request is about, and which of its groups, "" for none.
type Target func(r *http.Request) (topic, group string)

// QueryTarget takes both from the query: ?topic=&group=.
func QueryTarget(r *http.Request) (topic, group string) {
	q := r.URL.Query()
	return q.Get("topic"), q.Get("group")
}

// Guard lets requests through whose bearer token allows what they ask for. Others are answered as
// over the clients' HTTP: with 401, 403, or 503 while the token cannot be checked, and {"error",
// "code"}.
type Guard struct {
	// Tokens checks them. Required.
	Tokens Verifier
}

// Shows guards what shows something of a topic: it takes the right to subscribe to it, or to
// administer it.
func (g Guard) Shows(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		topic, group := of(r)
		return id.Allows(acl.Subscribe, topic, group) || id.Allows(acl.Admin, topic, "")
	})
}

// Changes guards what changes a topic or one of its groups: it takes the right to administer the
// topic.
func (g Guard) Changes(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		topic, _ := of(r)
		return id.Allows(acl.Admin, topic, "")
	})
}

func (g Guard) guard(next http.Handler, allowed func(*acl.Identity, *http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := g.Tokens.Verify(r.Context(), bearer(r))
		if err != nil {
			refuse(w, err)
			return
		}
		if !allowed(id, r) {
			writeError(w, http.StatusForbidden, "forbidden", "The token does not allow this.")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// bearer returns the token of a request, "" when there is none.
func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// refuse answers a token that is not taken.
func refuse(w http.ResponseWriter, err error) {
	known, ok := errors.AsType[*acl.Error](err)
	if !ok || known.Reason == acl.Unavailable {
		w.Header().Set("Retry-After", "1")
		writeError(w, http.StatusServiceUnavailable, "internal", "The token cannot be checked now: try again later.")
		return
	}
	reason := known.Reason
	if reason == acl.Expired {
		reason = acl.InvalidJWT // it never was valid here
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	writeError(w, http.StatusUnauthorized, string(reason), known.Msg)
}

// writeError answers {"error": msg, "code": code}.
func writeError(w http.ResponseWriter, status int, code, msg string) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(struct {
		Error string `json:"error"`
		Code  string `json:"code"`
	}{msg, code})
}
