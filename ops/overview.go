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
)

// overview is the answer to GET /overview.
type overview struct {
	Now     int64  `json:"now"`
	Started int64  `json:"started"`
	Version string `json:"version,omitempty"`
	// Addresses are those of Config.
	Addresses Addresses `json:"addresses"`
	// Checks are those of /readyz.
	Checks map[string]string `json:"checks"`
	// Totals are the metrics of this hub by name, each summed over its series, also over those that
	// have ended. A histogram counts its observations.
	Totals map[string]float64 `json:"totals"`
	// Outboxes and Projections are those of this hub.
	Outboxes    []outboxFigures     `json:"outboxes"`
	Projections []projectionFigures `json:"projections"`
	// NATS is absent while NATS does not answer.
	NATS *natsOverview `json:"nats,omitempty"`
}

// Addresses say where clients reach the hub, so that the dashboard can tell a first visitor. An
// address without a host stands for the host at which the visitor reaches the operations port.
type Addresses struct {
	WebSocket string `json:"websocket,omitempty"`
	HTTP      string `json:"http,omitempty"`
}

// outboxFigures are the metrics of an outbox.
type outboxFigures struct {
	Outbox      string  `json:"outbox"`
	Pending     float64 `json:"pending"`
	Parked      float64 `json:"parked"`
	OldestAgeMS float64 `json:"oldestAgeMs"`
	Published   float64 `json:"published"`
	Failures    float64 `json:"failures"`
	// Waiting says that the database cannot be used.
	Waiting bool `json:"waiting"`
}

// projectionFigures are the metrics of a projection.
type projectionFigures struct {
	Projection string `json:"projection"`
	// Events counts the events by what became of them.
	Events    map[string]float64 `json:"events"`
	StalledMS float64            `json:"stalledMs"`
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
	// FileLeft is how much the disk has left; absent if that is not known.
	FileLeft    *int64 `json:"fileLeft,omitempty"`
	MemoryBytes uint64 `json:"memoryBytes"`
	MemoryLimit int64  `json:"memoryLimit"`
	Errors      uint64 `json:"errors"`
}

// shownTotals are the prefixes of the metrics that /overview has: those of the hub itself.
var shownTotals = []string{"events_", "eventhub_", "ws_"}

// overview answers GET /overview. It shows no names of topics and groups. It does not ask NATS for
// each group, as /metrics does: a dashboard asks every two seconds.
func (s *Server) overview(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	health, _ := s.health(r.Context())
	o := overview{
		Now: time.Now().UnixMilli(), Started: s.started.UnixMilli(), Version: buildVersion(), Addresses: s.cfg.Addresses, Checks: health.Checks,
		Totals: make(map[string]float64),
	}
	families, err := s.cfg.Registry.Gather()
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
	if s.cfg.Observed != nil {
		for name, n := range s.cfg.Observed.counted() {
			o.Totals[name] += n
		}
	}
	o.Outboxes, o.Projections = outboxesOf(families), projectionsOf(families)
	if s.cfg.NATS != nil {
		ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
		defer cancel()
		if n, err := s.cfg.NATS.Info(ctx); err == nil {
			o.NATS = &natsOverview{
				n.Server, n.Version, n.Cluster, n.Connected, n.Connections, milliseconds(n.RoundTrip), n.Streams, n.Consumers,
				n.FileBytes, n.FileLimit, storageOf(n.FileBytes, n.FileLimit, n.FileLeft).Left, n.MemoryBytes, n.MemoryLimit, n.Errors,
			}
		}
	}
	answer(w, o)
}

// total sums the series of a metric.
func total(f *dto.MetricFamily) (sum float64) {
	for _, m := range f.GetMetric() {
		sum += reading(m)
	}
	return sum
}

// reading is the value of a series; for a histogram, the number of its observations.
func reading(m *dto.Metric) float64 {
	return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
}

// label returns the value of a label, or "".
func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// outboxesOf returns the figures of each outbox, in order of their names.
func outboxesOf(families []*dto.MetricFamily) []outboxFigures {
	found := []outboxFigures{}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "eventhub_outbox_") {
			continue
		}
		for _, m := range f.GetMetric() {
			name := label(m, "outbox")
			i := slices.IndexFunc(found, func(o outboxFigures) bool { return o.Outbox == name })
			if i < 0 {
				i = len(found)
				found = append(found, outboxFigures{Outbox: name})
			}
			switch o, v := &found[i], reading(m); f.GetName() {
			case "eventhub_outbox_pending":
				o.Pending = v
			case "eventhub_outbox_parked":
				o.Parked = v
			case "eventhub_outbox_oldest_age_seconds":
				o.OldestAgeMS = 1000 * v
			case "eventhub_outbox_published_total":
				o.Published = v
			case "eventhub_outbox_failures_total":
				o.Failures = v
			case "eventhub_outbox_waiting":
				o.Waiting = v > 0
			}
		}
	}
	slices.SortFunc(found, func(a, b outboxFigures) int { return strings.Compare(a.Outbox, b.Outbox) })
	return found
}

// projectionsOf returns the figures of each projection, in order of their names.
func projectionsOf(families []*dto.MetricFamily) []projectionFigures {
	found := []projectionFigures{}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "eventhub_project") {
			continue
		}
		for _, m := range f.GetMetric() {
			name := label(m, "projection")
			i := slices.IndexFunc(found, func(p projectionFigures) bool { return p.Projection == name })
			if i < 0 {
				i = len(found)
				found = append(found, projectionFigures{Projection: name, Events: make(map[string]float64)})
			}
			switch f.GetName() {
			case "eventhub_projected_total":
				found[i].Events[label(m, "outcome")] = reading(m)
			case "eventhub_projection_stalled_seconds":
				found[i].StalledMS = 1000 * reading(m)
			}
		}
	}
	slices.SortFunc(found, func(a, b projectionFigures) int { return strings.Compare(a.Projection, b.Projection) })
	return found
}
