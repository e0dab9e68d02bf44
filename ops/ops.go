// Package ops serves the operators of a hub: health probes and metrics over HTTP, on a separate
// port. The probes need no credential. The metrics need one only if Config.Metrics is set. A Guard
// protects every handler that shows events of a topic or changes something.
package ops

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"maps"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
)

// readyTimeout is the timeout of a readiness check of the bus. It is shorter than common probe
// timeouts, so that the response arrives in time.
const readyTimeout = 2 * time.Second

// Bus is checked by the readiness probes. *jetstream.Bus implements it.
type Bus interface {
	// Ready returns nil if the bus can serve.
	Ready(ctx context.Context) error
}

// Config configures a Server.
type Config struct {
	// Bus is checked by the readiness probes. Required.
	Bus Bus
	// Registry holds the metrics that /metrics serves. Required.
	Registry *prometheus.Registry
	// Observed, if not nil, is the Metrics in Registry. At each scrape it gets the series of all
	// topics and groups that exist, also of those that this hub has not used.
	Observed *Metrics
	// Series is how many topics and groups of Observed, and how many streams, have series of their
	// own. Leave it at AllSeries unless their number is a burden: alerts then name OtherLabel for
	// some of them.
	Series Series
	// Outbound, if not nil, returns what waits to be sent to WebSocket clients, for the metrics.
	Outbound func() Outbound
	// Broadcasts, if not nil, returns the state of the broadcasts, for the metrics.
	Broadcasts func() Broadcasts
	// KeysAge, if not nil, returns how old the keys of JWTs are, for the metrics.
	KeysAge func() time.Duration
	// Groups, if not nil, is managed at /groups.
	Groups Groups
	// Connections, if not nil, are managed at /connections.
	Connections Connections
	// Events, if not nil, are shown at /events, /keys and /latest-by-key and published at /publish.
	// *jetstream.Bus implements it.
	Events Events
	// Follow, if not nil, serves GET /follow/{topic}: the events of a topic as they come, as
	// server-sent events. The token of id allows it. If hide is not nil, each EVENT frame must be
	// sent as hide returns it.
	Follow func(w http.ResponseWriter, r *http.Request, id *acl.Identity, topic string, hide func(frame []byte) []byte)
	// NATS, if not nil, is described by /overview, /nats and the metrics of storage.
	NATS NATS
	// Outboxes, if not nil, are shown and changed at /outboxes.
	Outboxes Outboxes
	// Addresses are shown by /overview. Optional.
	Addresses Addresses
	// Topics, if not nil, is managed at /topics.
	Topics Topics
	// DeadLetters, if not nil, is managed at /dlq.
	DeadLetters DeadLetters
	// Guard protects everything but the probes and the metrics. Required with Groups,
	// Topics, DeadLetters, Connections, Events, NATS, Outboxes or Revocations.
	Guard Guard
	// Throttle, if not nil, takes one publish of a client to a topic from their quotas, or says why
	// it is refused. POST /publish asks it, so that a client has one quota on all ports.
	Throttle func(id *acl.Identity, topic string) *Refusal
	// LimitReached counts a wait or a refusal because of the named limit. Optional.
	LimitReached func(limit string)
	// Status returns the HTTP status of an error code of the protocol. By default, all codes have
	// 503.
	Status func(code string) int
	// Metrics, if not nil, makes /metrics require a token that grants subscribe on MetricsTopic. By
	// default, /metrics is open; it shows names of topics and groups, but no events.
	Metrics *Guard
	// Revocations, if not nil, serves POST /revocations.
	Revocations *Revocations
	// Backups, if not nil, serves POST /backup.
	Backups *Backups
	// Local restricts /metrics to requests that address this host by an IP address or as localhost.
	// Set it if /metrics is open because the port is bound to loopback.
	Local bool
	// Documents serve GET requests for /openapi.yaml and /asyncapi.yaml without a token. They must
	// show nothing secret. Defaults to none.
	Documents map[string]http.Handler
	// Ready, if not nil, is an additional readiness check. The hub is not ready while Ready returns
	// an error, for example while the hub drains. The text of the error is public.
	Ready func() error
	// Parts, if not nil, returns the state of optional parts of the hub by name: PartOK, or a text
	// that says what the part waits for. The texts are public. They do not affect readiness.
	Parts func() map[string]string
	// Logger receives changes of readiness and their causes. By default, nothing is logged.
	Logger *slog.Logger
}

// PartOK is the state of a working part in Config.Parts.
const PartOK = "ok"

// Server serves probes and metrics. Its methods may be called concurrently.
type Server struct {
	cfg     Config
	often   *pacedlog.Log // lines that operators can repeat
	started time.Time
	handler http.Handler
	// unready holds the last result, so that only changes are logged.
	unready atomic.Bool
	places  *quota.Places // requests that are being served
	lags    *lags         // nil without Config.Groups
	storage *storage      // nil without Config.NATS
	// asked has the metrics of groups, for which NATS is asked at each scrape.
	asked *prometheus.Registry
	swept time.Time // when gather last looked for what is gone
	rates rates
}

// New returns a Server. It needs no Close: only requests start goroutines, which end by themselves.
func New(cfg Config) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.LimitReached == nil {
		cfg.LimitReached = func(string) {}
	}
	if cfg.Status == nil {
		cfg.Status = func(string) int { return http.StatusServiceUnavailable }
	}
	s := &Server{cfg: cfg, often: pacedlog.New(cfg.Logger), started: time.Now(), places: quota.NewPlaces(MaxRequests, MaxPrincipalRequests), asked: prometheus.NewRegistry()}
	if cfg.Observed != nil {
		cfg.Observed.limit(cfg.Series)
	}
	if cfg.Groups != nil {
		s.lags = registerLags(s.asked, cfg.Groups, cfg.Logger, cfg.Observed)
	}
	if cfg.NATS != nil {
		s.storage = newStorage(cfg.Registry, cfg.NATS, cfg.Series, cfg.Logger)
	}
	s.registerStates()
	s.handler = s.router(s.routes())
	return s
}

// Handler serves the operations port: probes, metrics, and what Config has besides.
//
// /livez returns 200 as long as the process responds. /readyz and /healthz return 200 while the hub
// can work, and 503 otherwise. Their body names the failed check and the parts that are waiting,
// without internal details.
func (s *Server) Handler() http.Handler { return s.handler }

func livez(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("ok"))
}

// health is the body of a /readyz response.
type health struct {
	Status string            `json:"status"`
	Checks map[string]string `json:"checks"`
}

func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	state, cause := s.health(r.Context())
	if r.Context().Err() != nil {
		return // the caller disconnected, which says nothing about the bus
	}
	status := http.StatusOK
	if cause != nil {
		status = http.StatusServiceUnavailable
	}
	if was := s.unready.Swap(cause != nil); was != (cause != nil) {
		if cause != nil {
			s.cfg.Logger.LogAttrs(r.Context(), slog.LevelWarn, "not ready", slog.Any("error", cause))
		} else {
			s.cfg.Logger.LogAttrs(r.Context(), slog.LevelInfo, "ready")
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(state)
}

// health checks whether the hub can work, and returns why it cannot.
func (s *Server) health(ctx context.Context) (answer health, cause error) {
	answer = health{Status: "ok", Checks: map[string]string{"bus": "ok", "hub": "ok"}}
	if s.cfg.Parts != nil {
		maps.Copy(answer.Checks, s.cfg.Parts())
	}
	if s.cfg.Ready != nil {
		if err := s.cfg.Ready(); err != nil {
			cause = err
			answer.Checks["hub"] = err.Error()
		}
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	if err := s.cfg.Bus.Ready(ctx); err != nil {
		cause = err
		answer.Checks["bus"] = "unavailable"
		if unstored, ok := errors.AsType[*jetstream.StorageError](err); ok {
			answer.Checks["bus"] = unstored.Error()
		}
	}
	if cause != nil {
		answer.Status = "unavailable"
	}
	return answer, cause
}
