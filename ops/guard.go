package ops

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"eventhub/acl"
)

// MetricsTopic is the topic that represents the metrics in policies. Where the metrics require a
// token, the token must grant subscribe or admin on this topic. Nothing needs to be published
// there.
const MetricsTopic = "eventhub.metrics"

// Verifier verifies tokens. *acl.Verifier implements it.
type Verifier interface {
	// Verify returns the owner of a token, or an *acl.Error.
	Verify(ctx context.Context, token string) (*acl.Identity, error)
}

// Target returns the topic of a request and its group, "" for no group.
type Target func(r *http.Request) (topic, group string)

// QueryTarget is a Target that reads the query parameters topic and group.
func QueryTarget(r *http.Request) (topic, group string) {
	q := r.URL.Query()
	return q.Get("topic"), q.Get("group")
}

// Guard lets a request pass only if its bearer token grants the required right. Otherwise it
// answers like the client HTTP API, with {"error", "code"} and status 401, 403, or, while the token
// cannot be checked, 503.
type Guard struct {
	// Tokens verifies the bearer tokens. Required.
	Tokens Verifier
}

// Shows protects a handler that shows figures of a topic. It requires the right to inspect the
// topic, to subscribe to it or to administer it.
func (g Guard) Shows(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		return id.Inspects(of(r))
	})
}

// Reads protects a handler that shows events of a topic. It requires the right to subscribe to the
// topic or to administer it.
func (g Guard) Reads(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		_, ok := id.Shows(of(r))
		return ok
	})
}

// Lists protects a handler that shows of several topics what the token may see. It requires a
// token, and with a topic in the request the same right as Shows.
func (g Guard) Lists(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		topic, group := of(r)
		return topic == "" || id.Inspects(topic, group)
	})
}

// Publishes protects a handler that publishes to a topic. It requires the right to do so.
func (g Guard) Publishes(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		topic, _ := of(r)
		return id.Allows(acl.Publish, topic, "")
	})
}

// Changes protects a handler that changes a topic or one of its groups. It requires the right to
// administer the topic.
func (g Guard) Changes(of Target, next http.Handler) http.Handler {
	return g.guard(next, func(id *acl.Identity, r *http.Request) bool {
		topic, _ := of(r)
		return id.Allows(acl.Admin, topic, "")
	})
}

func (g Guard) guard(next http.Handler, allowed func(*acl.Identity, *http.Request) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.Header["Authorization"]) > 1 {
			writeError(w, http.StatusBadRequest, "bad_options", "The header Authorization is given more than once.")
			return
		}
		id, err := g.Tokens.Verify(r.Context(), bearer(r))
		if err != nil {
			refuse(w, err)
			return
		}
		if !allowed(id, r) {
			writeError(w, http.StatusForbidden, "forbidden", "The token does not allow this.")
			return
		}
		next.ServeHTTP(w, withIdentity(r, id))
	})
}

// bearer returns the bearer token of a request, or "".
func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// refuse answers a request whose token was not accepted.
func refuse(w http.ResponseWriter, err error) {
	known, ok := errors.AsType[*acl.Error](err)
	if !ok || known.Reason == acl.Unavailable {
		writeError(w, http.StatusServiceUnavailable, "internal", "The token cannot be checked now: try again later.")
		return
	}
	reason := known.Reason
	if reason == acl.Expired {
		reason = acl.InvalidJWT // the protocol code for a token that was never accepted here
	}
	w.Header().Set("WWW-Authenticate", "Bearer")
	writeError(w, http.StatusUnauthorized, string(reason), known.Msg)
}
