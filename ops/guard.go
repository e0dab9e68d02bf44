package ops

import (
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"eventhub/acl"
	"eventhub/jetstream"
)

// MetricsTopic is the topic that represents the metrics in policies. Where the metrics require a
// token, the token must grant inspect, subscribe or admin on this topic. Nothing needs to be
// published there.
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
	// Tokens verifies the bearer tokens. Required unless Identify is set.
	Tokens Verifier
	// Identify, if not nil, takes the place of Tokens: it returns the owner of the token of a
	// request, "" for none, or why the token is refused. A hub that rations refused tokens does so
	// here.
	Identify func(r *http.Request, token string) (*acl.Identity, *Refusal)
}

// Refusal says why a request is refused.
type Refusal struct {
	// Status is the HTTP status.
	Status int
	// Code is the error code of the protocol, and Msg is for people. Both are shown.
	Code, Msg string
	// Wait is the time after which a retry may succeed; 0 when unknown.
	Wait time.Duration
	// Ends says that the connection must end.
	Ends bool
}

// write answers a request with the refusal.
func (f *Refusal) write(w http.ResponseWriter) {
	if f.Status == http.StatusUnauthorized {
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	if f.Wait > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(f.Wait.Seconds()))))
	}
	if f.Ends {
		w.Header().Set("Connection", "close")
	}
	writeError(w, f.Status, f.Code, f.Msg)
}

// Shows protects a handler that shows figures of a topic. It requires the right to inspect the
// topic, to subscribe to it or to administer it.
func (g Guard) Shows(of Target, next http.Handler) http.Handler {
	return g.guard(next, of, func(id *acl.Identity, topic, group string) bool {
		return id.Inspects(topic, group)
	})
}

// Reads protects a handler that shows events of a topic. It requires the right to subscribe to the
// topic or to administer it.
func (g Guard) Reads(of Target, next http.Handler) http.Handler {
	return g.guard(next, of, func(id *acl.Identity, topic, group string) bool {
		_, ok := id.Shows(topic, group)
		return ok
	})
}

// Lists protects a handler that shows of several topics what the token may see. It requires a
// token, and with a topic in the request the same right as Shows.
func (g Guard) Lists(of Target, next http.Handler) http.Handler {
	one := g.Shows(of, next)
	all := g.guard(next, nil, func(*acl.Identity, string, string) bool { return true })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if topic, _ := of(r); topic != "" {
			one.ServeHTTP(w, r)
			return
		}
		all.ServeHTTP(w, r)
	})
}

// Publishes protects a handler that publishes to a topic. It requires the right to do so.
func (g Guard) Publishes(of Target, next http.Handler) http.Handler {
	return g.guard(next, of, func(id *acl.Identity, topic, _ string) bool {
		return id.Allows(acl.Publish, topic, "")
	})
}

// Changes protects a handler that changes a topic or one of its groups. It requires the right to
// administer the topic.
func (g Guard) Changes(of Target, next http.Handler) http.Handler {
	return g.guard(next, of, func(id *acl.Identity, topic, _ string) bool {
		return id.Allows(acl.Admin, topic, "")
	})
}

// guard asks for the token first. A topic or a group that cannot exist is refused before the
// question of rights: its form says nothing about the topics that there are. A nil Target is for
// requests about no topic.
func (g Guard) guard(next http.Handler, of Target, allowed func(id *acl.Identity, topic, group string) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if len(r.Header["Authorization"]) > 1 {
			writeError(w, http.StatusBadRequest, "bad_options", "The header Authorization is given more than once.")
			return
		}
		id, refused := g.identify(r)
		if refused != nil {
			refused.write(w)
			return
		}
		topic, group := "", ""
		if of != nil {
			topic, group = of(r)
			if fault := checkNames(topic, group); fault != nil {
				fault.write(w)
				return
			}
		}
		if !allowed(id, topic, group) {
			writeError(w, http.StatusForbidden, "forbidden", "The token does not allow this.")
			return
		}
		next.ServeHTTP(w, withIdentity(r, id))
	})
}

// wellFormed refuses requests about a topic or a group that cannot exist, where no Guard does.
func wellFormed(of Target, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fault := checkNames(of(r)); fault != nil {
			fault.write(w)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// checkNames says what is wrong with the names in a request, by the rules of the bus. A request
// about a topic may be about none of its groups.
func checkNames(topic, group string) *Refusal {
	if topic == "" {
		return &Refusal{Status: http.StatusBadRequest, Code: jetstream.CodeBadTopic, Msg: "topic required"}
	}
	err := jetstream.ValidTopic(topic)
	if err == nil && group != "" {
		err = jetstream.ValidGroup(group)
	}
	if bad, ok := errors.AsType[*jetstream.Error](err); ok {
		return &Refusal{Status: http.StatusBadRequest, Code: bad.Code, Msg: bad.Msg}
	}
	return nil
}

// bearer returns the bearer token of a request, or "".
func bearer(r *http.Request) string {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// identify returns the owner of the token of a request.
func (g Guard) identify(r *http.Request) (*acl.Identity, *Refusal) {
	if g.Identify != nil {
		return g.Identify(r, bearer(r))
	}
	id, err := g.Tokens.Verify(r.Context(), bearer(r))
	if err == nil {
		return id, nil
	}
	known, ok := errors.AsType[*acl.Error](err)
	if !ok || known.Reason == acl.Unavailable {
		return nil, &Refusal{Status: http.StatusServiceUnavailable, Code: jetstream.CodeInternal, Msg: "The token cannot be checked now: try again later."}
	}
	reason := known.Reason
	if reason == acl.Expired {
		reason = acl.InvalidJWT // the protocol code for a token that was never accepted here
	}
	return nil, &Refusal{Status: http.StatusUnauthorized, Code: string(reason), Msg: known.Msg}
}
