package ops

import (
	"cmp"
	"context"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
)

// A need is what a route asks of the token of a request.
type need int

const (
	// A route that says nothing is a mistake, which a test finds.
	_ need = iota
	// open needs no token.
	open
	// shows needs inspect, subscribe or admin on the target. The handler shows no events.
	shows
	// reads needs subscribe or admin on the target. The handler hides what the masks of the token
	// name; see hide.
	reads
	// follows is reads for an answer that does not end. It takes no turn: what serves it has limits
	// of its own.
	follows
	// changes needs admin on the target.
	changes
	// lists needs a token. The handler shows only what identity(r) may see. With a topic in the
	// request, it needs what shows needs.
	lists
	// publishes needs publish on the target.
	publishes
	// scrapes is for the metrics: it needs what shows needs if Config.Metrics is set.
	scrapes
)

// A route is one route of the operations port.
type route struct {
	method, pattern string
	need            need
	// target takes the topic and the group from a request. Required unless the route is open.
	target Target
	serve  http.HandlerFunc
	// off says that the configuration leaves the route out.
	off bool
}

// routes returns all routes. The router, the table of docs/protocol.md and the test of permissions
// follow this table.
func (s *Server) routes() []route {
	noNATS, noOutboxes := s.cfg.NATS == nil, s.cfg.Outboxes == nil
	noTopics, noLetters, noConnections, noEvents := s.cfg.Topics == nil, s.cfg.DeadLetters == nil, s.cfg.Connections == nil, s.cfg.Events == nil
	return slices.Concat([]route{
		{http.MethodGet, "/livez", open, nil, livez, false},
		{http.MethodGet, "/readyz", open, nil, s.readyz, false},
		{http.MethodGet, "/healthz", open, nil, s.readyz, false},
		{http.MethodGet, openAPI, open, nil, s.document(openAPI), s.cfg.Documents[openAPI] == nil},
		{http.MethodGet, asyncAPI, open, nil, s.document(asyncAPI), s.cfg.Documents[asyncAPI] == nil},
		{http.MethodGet, "/metrics", scrapes, fixedTarget(MetricsTopic), newScraper(prometheus.GathererFunc(s.gather), s.cfg.Logger).ServeHTTP, false},
		{http.MethodGet, "/", open, nil, s.dashboard, false},
		{http.MethodGet, "/dashboard/{file}", open, nil, s.dashboard, false},
		{http.MethodGet, "/overview", scrapes, fixedTarget(MetricsTopic), s.overview, false},
		{http.MethodGet, "/cursors", scrapes, topicTarget, s.cursors, s.cfg.Groups == nil},
		{http.MethodGet, "/lag", scrapes, QueryTarget, s.lag, s.cfg.Groups == nil},
		{http.MethodGet, "/events", reads, topicTarget, s.events, noEvents},
		{http.MethodGet, "/follow/{topic}", follows, pathTarget, s.follow, s.cfg.Follow == nil},
		{http.MethodGet, "/keys", reads, topicTarget, s.keys, noEvents},
		{http.MethodGet, "/latest-by-key", reads, topicTarget, s.latestByKey, noEvents},
		{http.MethodPost, "/publish/{topic}", publishes, pathTarget, s.publish, noEvents},
		{http.MethodPost, "/revocations", changes, fixedTarget(TokensTopic), s.revoke, s.cfg.Revocations == nil},
		{http.MethodPost, "/backup", changes, fixedTarget(BackupTopic), s.backup, s.cfg.Backups == nil},
		{http.MethodGet, "/topics", lists, QueryTarget, s.listTopics, noTopics},
		{http.MethodGet, "/topics/{topic}", shows, pathTarget, s.showTopic, noTopics},
		{http.MethodPut, "/topics/{topic}", changes, pathTarget, s.createTopic, noTopics},
		{http.MethodDelete, "/topics/{topic}", changes, pathTarget, s.deleteTopic, noTopics},
		{http.MethodPost, "/topics/{topic}/purge", changes, pathTarget, s.purgeTopic, noTopics},
		{http.MethodGet, "/topics/{topic}/delayed", shows, pathTarget, s.listDelayed, noTopics},
		{http.MethodDelete, "/topics/{topic}/delayed/{id}", changes, pathTarget, s.cancelDelayed, noTopics},
		{http.MethodGet, "/connections", shows, fixedTarget(ConnectionsTopic), s.connections, noConnections},
		{http.MethodDelete, "/connections/{id}", changes, fixedTarget(ConnectionsTopic), s.closeConnection, noConnections},
		{http.MethodGet, "/nats", shows, fixedTarget(NATSTopic), s.nats, noNATS},
		{http.MethodGet, "/outboxes/{name}", shows, fixedTarget(OutboxTopic), s.listRecords, noOutboxes},
		{http.MethodPost, "/outboxes/{name}/retry", changes, fixedTarget(OutboxTopic), s.retryRecords, noOutboxes},
		{http.MethodPost, "/outboxes/{name}/discard", changes, fixedTarget(OutboxTopic), s.discardRecord, noOutboxes},
		{http.MethodGet, "/dlq", lists, QueryTarget, s.listLetters, noLetters},
		{http.MethodGet, "/dlq/counts", lists, QueryTarget, s.countLetters, noLetters},
		{http.MethodPost, "/dlq/redrive", changes, QueryTarget, s.redriveLetters, noLetters},
		{http.MethodPost, "/dlq/discard", changes, QueryTarget, s.discardLetters, noLetters},
	}, s.groupRoutes())
}

// Paths of the documents that Config.Documents may have.
const (
	openAPI  = "/openapi.yaml"
	asyncAPI = "/asyncapi.yaml"
)

// document returns the handler of a document.
func (s *Server) document(path string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { s.cfg.Documents[path].ServeHTTP(w, r) }
}

// router serves routes.
func (s *Server) router(routes []route) http.Handler {
	r := chi.NewRouter()
	r.Use(middleware.GetHead)
	r.NotFound(func(w http.ResponseWriter, _ *http.Request) {
		writeError(w, http.StatusNotFound, "not_found", "There is nothing at this path.")
	})
	r.MethodNotAllowed(func(w http.ResponseWriter, req *http.Request) {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodPost, http.MethodDelete} {
			if r.Match(chi.NewRouteContext(), method, cmp.Or(req.URL.RawPath, req.URL.Path)) {
				w.Header().Add("Allow", method)
			}
		}
		writeError(w, http.StatusMethodNotAllowed, "not_found", "This path does not take this method.")
	})
	for _, at := range routes {
		if !at.off {
			r.Method(at.method, at.pattern, s.guarded(&at))
		}
	}
	return r
}

// guarded returns the handler of a route behind the check of its need.
func (s *Server) guarded(at *route) http.Handler {
	switch at.need {
	case open:
		return at.serve
	case shows:
		return s.cfg.Guard.Shows(at.target, s.inTurn(at.serve))
	case reads:
		return s.cfg.Guard.Reads(at.target, s.inTurn(at.serve))
	case follows:
		return s.cfg.Guard.Reads(at.target, at.serve)
	case publishes:
		return s.cfg.Guard.Publishes(at.target, s.inTurn(at.serve))
	case changes:
		return s.cfg.Guard.Changes(at.target, at.serve)
	case lists:
		return s.cfg.Guard.Lists(at.target, s.inTurn(at.serve))
	case scrapes:
		var h http.Handler = at.serve
		if at.pattern != "/metrics" { // which has a limit of its own
			h = s.inTurn(at.serve)
		}
		if s.cfg.Metrics != nil {
			h = s.cfg.Metrics.Shows(at.target, h)
		} else {
			h = wellFormed(at.target, h)
		}
		if s.cfg.Local {
			h = local(h)
		}
		return h
	default:
		panic("ops: " + at.method + " " + at.pattern + " has no need")
	}
}

// Limits of requests that read or publish. A change needs admin, and redrives have their own limit.
const (
	// MaxRequests ("ops_requests") is how many requests are served at a time.
	MaxRequests = 16
	// MaxPrincipalRequests is how many of them may be of one principal.
	MaxPrincipalRequests = 4
	// maxWaits is how many further requests of a principal wait for their turn, and turnWait is how
	// long.
	maxWaits = 32
	turnWait = 5 * time.Second
)

// inTurn serves a bounded number of requests at a time, in all and for each principal. Others wait,
// and then get overloaded.
func (s *Server) inTurn(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		who := "" // on loopback, figures need no token
		if id := identity(r); id != nil {
			who = id.Key()
		}
		ctx, cancel := context.WithTimeout(r.Context(), turnWait)
		entered := s.places.Enter(ctx, who, maxWaits, func() { s.cfg.LimitReached("ops_requests") })
		cancel()
		if !entered {
			writeError(w, http.StatusServiceUnavailable, "overloaded", "Too many requests are being served: try again later.")
			return
		}
		defer s.places.Leave(who)
		next.ServeHTTP(w, r)
	})
}

// pathTarget is the Target of a path with {topic} and perhaps {group}.
func pathTarget(r *http.Request) (topic, group string) {
	return pathParam(r, "topic"), pathParam(r, "group")
}

// topicTarget is the Target of a query with the parameter topic.
func topicTarget(r *http.Request) (topic, group string) { return r.URL.Query().Get("topic"), "" }

// fixedTarget is the Target of a route about no topic, which a reserved name represents.
func fixedTarget(topic string) Target {
	return func(*http.Request) (string, string) { return topic, "" }
}

// pathParam returns a segment of the path, URL-decoded once.
func pathParam(r *http.Request, name string) string {
	value := chi.URLParam(r, name)
	if r.URL.RawPath == "" {
		return value // chi took the value from the decoded path
	}
	decoded, err := url.PathUnescape(value)
	if err != nil {
		return "" // which is no name; net/http refuses such a path
	}
	return decoded
}

type identityKey struct{}

// identity returns whose request it is. Only routes with a need other than open have one.
func identity(r *http.Request) *acl.Identity {
	id, _ := r.Context().Value(identityKey{}).(*acl.Identity)
	return id
}

func withIdentity(r *http.Request, id *acl.Identity) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), identityKey{}, id))
}
