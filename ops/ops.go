// Package ops is the operators' side of a hub: health probes and metrics over HTTP, on a port of
// their own. The probes ask for no credential, the metrics only where Config.Metrics says so. What
// shows a topic's events or changes something is behind a Guard.
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

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"eventhub/jetstream"
)

const (
	// readyTimeout bounds one question to the bus: shorter than the probe timeouts in use, so that
	// the answer arrives.
	readyTimeout = 2 * time.Second
	// maxScrapes is the most /metrics requests answered at a time; more get 503.
	maxScrapes = 4
	// scrapeTimeout bounds the answer to one /metrics request.
	scrapeTimeout = 10 * time.Second
)

// Bus is what the probes ask. *jetstream.Bus is one.
type Bus interface {
	// Ready reports nil while the bus can serve.
	Ready(ctx context.Context) error
}

// Config configures a Server.
type Config struct {
	// Bus is asked by the readiness probes. Required.
	Bus Bus
	// Registry is what /metrics shows. Required.
	Registry *prometheus.Registry
	// Metrics, when not nil, makes /metrics ask for a token that allows to subscribe to
	// MetricsTopic. Default: everybody reads them; they name topics and groups, and hold no events.
	Metrics *Guard
	// Local makes /metrics answer only requests that name this host by an address or as localhost.
	// It is for metrics that are open because the port is bound to loopback.
	Local bool
	// Ready, when not nil, is asked too: the hub is not ready while it returns an error, such as
	// while draining. The error's text is shown to whoever asks.
	Ready func() error
	// Parts, when not nil, says how parts of the hub are that it can do without for a while, by
	// their names: what they wait for, or PartOK. They are shown to whoever asks, and do not make
	// the hub unready.
	Parts func() map[string]string
	// Logger is told when readiness changes, and why. Default: nothing is logged.
	Logger *slog.Logger
}

// PartOK is what Config.Parts says of a part that works.
const PartOK = "ok"

// Server answers operators. Its methods may be called concurrently.
type Server struct {
	cfg     Config
	handler http.Handler
	// unready is the last answer, so that only changes are logged.
	unready atomic.Bool
}

// New makes a Server. It starts nothing and needs no Close.
func New(cfg Config) *Server {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg}
	r := chi.NewRouter()
	r.Use(middleware.GetHead)
	r.Get("/livez", livez)
	r.Get("/readyz", s.readyz)
	r.Get("/healthz", s.readyz)
	metrics := promhttp.HandlerFor(cfg.Registry, promhttp.HandlerOpts{
		ErrorLog:            scrapeLog{cfg.Logger},
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
	})
	if cfg.Metrics != nil {
		metrics = cfg.Metrics.Shows(func(*http.Request) (topic, group string) { return MetricsTopic, "" }, metrics)
	}
	if cfg.Local {
		metrics = local(metrics)
	}
	r.Method(http.MethodGet, "/metrics", metrics)
	s.handler = r
	return s
}

// Handler serves /livez, /readyz, /healthz and /metrics.
//
// /livez answers 200 for as long as the process can answer at all. /readyz and /healthz answer 200
// while the hub can do its work, else 503; the body says which check failed, and which parts of the
// hub wait, in words that give nothing internal away.
func (s *Server) Handler() http.Handler { return s.handler }

func livez(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("ok"))
}

// health is the body of /readyz.
type health struct {
	Status string            `json:"status"`
	Checks map[string]string `json:"checks"`
}

func (s *Server) readyz(w http.ResponseWriter, r *http.Request) {
	answer := health{Status: "ok", Checks: map[string]string{"bus": "ok", "hub": "ok"}}
	if s.cfg.Parts != nil {
		maps.Copy(answer.Checks, s.cfg.Parts())
	}
	var cause error
	if s.cfg.Ready != nil {
		if err := s.cfg.Ready(); err != nil {
			cause = err
			answer.Checks["hub"] = err.Error()
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	if err := s.cfg.Bus.Ready(ctx); err != nil {
		if r.Context().Err() != nil {
			return // the asker has gone; this says nothing about the bus
		}
		cause = err
		answer.Checks["bus"] = "unavailable"
		if unstored, ok := errors.AsType[*jetstream.StorageError](err); ok {
			answer.Checks["bus"] = unstored.Error()
		}
	}
	status := http.StatusOK
	if cause != nil {
		status = http.StatusServiceUnavailable
		answer.Status = "unavailable"
	}
	if was := s.unready.Swap(cause != nil); was != (cause != nil) {
		if cause != nil {
			s.cfg.Logger.LogAttrs(r.Context(), slog.LevelWarn, "not ready", slog.String("cause", cause.Error()))
		} else {
			s.cfg.Logger.LogAttrs(r.Context(), slog.LevelInfo, "ready")
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(answer)
}

// scrapeLog hands what promhttp has to say to the logger.
type scrapeLog struct{ logger *slog.Logger }

func (l scrapeLog) Println(v ...any) {
	l.logger.LogAttrs(context.Background(), slog.LevelWarn, "metrics were not all readable", slog.Any("cause", v))
}
