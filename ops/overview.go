package ops

import (
	"context"
	"log/slog"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"

	"eventhub/jetstream"
)

// NATS describes the NATS behind the hub. jetstream.NATS implements it.
type NATS interface {
	Info(ctx context.Context) (jetstream.ServerInfo, error)
	// Streams lists what the streams of topics store.
	Streams(ctx context.Context) ([]jetstream.StreamStorage, error)
}

// overview is the answer to GET /overview.
type overview struct {
	Now     int64  `json:"now"`
	Started int64  `json:"started"`
	Version string `json:"version,omitempty"`
	// Checks are those of /readyz.
	Checks map[string]string `json:"checks"`
	// Totals are the metrics of this hub by name, each summed over its series. A histogram counts
	// its observations.
	Totals map[string]float64 `json:"totals"`
	// NATS is absent while NATS does not answer.
	NATS *natsOverview `json:"nats,omitempty"`
}

type natsOverview struct {
	Server      string  `json:"server"`
	Version     string  `json:"version"`
	Cluster     string  `json:"cluster,omitempty"`
	Connected   int     `json:"connected"`
	Connections int     `json:"connections"`
	RoundTripMS float64 `json:"roundTripMs"`
	Streams     int     `json:"streams"`
	Consumers   int     `json:"consumers"`
	FileBytes   uint64  `json:"fileBytes"`
	FileLimit   int64   `json:"fileLimit"`
	MemoryBytes uint64  `json:"memoryBytes"`
	MemoryLimit int64   `json:"memoryLimit"`
	Errors      uint64  `json:"errors"`
}

// shownTotals are the prefixes of the metrics that /overview has: those of the hub itself.
var shownTotals = []string{"events_", "eventhub_", "ws_"}

// overview answers GET /overview. It shows no names of topics and groups.
func (s *Server) overview(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	health, _ := s.health(r.Context())
	o := overview{Now: time.Now().UnixMilli(), Started: s.started.UnixMilli(), Version: buildVersion(), Checks: health.Checks, Totals: make(map[string]float64)}
	families, err := s.gather()
	if err != nil {
		s.cfg.Logger.LogAttrs(r.Context(), slog.LevelWarn, "failed to collect some metrics", slog.Any("error", err))
	}
	for _, f := range families {
		if slices.ContainsFunc(shownTotals, func(prefix string) bool { return strings.HasPrefix(f.GetName(), prefix) }) {
			// JSON has no number for a bound that is not known.
			if sum := total(f); !math.IsInf(sum, 0) {
				o.Totals[f.GetName()] = sum
			}
		}
	}
	if s.cfg.NATS != nil {
		ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
		defer cancel()
		if n, err := s.cfg.NATS.Info(ctx); err == nil {
			o.NATS = &natsOverview{
				n.Server, n.Version, n.Cluster, n.Connected, n.Connections, milliseconds(n.RoundTrip), n.Streams, n.Consumers,
				n.FileBytes, n.FileLimit, n.MemoryBytes, n.MemoryLimit, n.Errors,
			}
		}
	}
	answer(w, o)
}

// total sums the series of a metric.
func total(f *dto.MetricFamily) (sum float64) {
	for _, m := range f.GetMetric() {
		sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
	}
	return sum
}
