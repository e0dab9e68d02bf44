package ops

import (
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
)

const (
	// lagTimeout is the timeout of reading the lag of all groups.
	lagTimeout = 5 * time.Second
	// lagKept is how long the lag of all groups is kept for further scrapes.
	lagKept = time.Second
	// maxCursors is the maximum number of groups in the answer to GET /cursors.
	maxCursors = 10_000
)

// position is where a group is, as the answer to GET /lag shows it.
type position struct {
	Topic  string `json:"topic"`
	LastID string `json:"lastId"`
	LastTS int64  `json:"lastTs"`
}

// lagging is the answer to GET /lag.
type lagging struct {
	Topic string `json:"topic"`
	Group string `json:"group"`
	// LastCursor is the newest event up to which all are settled, or null.
	LastCursor *position `json:"lastCursor"`
	// Tail is the id of the newest event of the topic, or null.
	Tail *string `json:"tail"`
	// LagMS is how long ago the oldest event was stored that is not settled; 0 if there is none.
	LagMS int64 `json:"lagMs"`
	// Pending events were not delivered yet. InFlight ones were delivered and are not settled.
	// Backlog is the sum, by which consumers can be scaled.
	Pending  uint64 `json:"pending"`
	InFlight uint64 `json:"inflight"`
	Backlog  uint64 `json:"backlog"`
	// OldestUnackedMS is LagMS under the name that it has elsewhere.
	OldestUnackedMS int64 `json:"oldestUnackedMs"`
}

// lag answers GET /lag. Its figures are those of the consumer's leader. An unknown group is an
// error, so that nothing scales by a number that means nothing.
func (s *Server) lag(w http.ResponseWriter, r *http.Request) {
	topic, group := QueryTarget(r)
	if fault := checkQuery(r.URL.Query(), "topic", "group"); fault != "" {
		badQuery(w, fault)
		return
	}
	if group == "" {
		badQuery(w, "topic and group required")
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), groupTimeout)
	defer cancel()
	of := s.cfg.Groups.Group(topic, group)
	found, err := of.Lag(ctx)
	var at jetstream.Cursor
	if err == nil {
		at, err = of.Cursor(ctx)
	}
	var newest []*jetstream.Event
	if err == nil {
		newest, err = s.cfg.Groups.History(topic).Newest(ctx, 1)
	}
	if err != nil {
		s.fail(w, r, err, "group on this topic", "read the lag of the group")
		return
	}
	said := lagging{
		Topic: topic, Group: group, LagMS: found.OldestUnacked.Milliseconds(), Pending: found.Pending, InFlight: found.InFlight,
		Backlog: found.Pending + found.InFlight, OldestUnackedMS: found.OldestUnacked.Milliseconds(),
	}
	if at.LastID != "" {
		said.LastCursor = &position{topic, at.LastID, at.LastTS}
	}
	if len(newest) > 0 {
		said.Tail = &newest[0].ID
	}
	answer(w, said)
}

// cursors answers GET /cursors.
func (s *Server) cursors(w http.ResponseWriter, r *http.Request) {
	topic, _ := topicTarget(r)
	if fault := checkQuery(r.URL.Query(), "topic"); fault != "" {
		badQuery(w, fault)
		return
	}
	type at struct {
		Group  string `json:"group"`
		LastID string `json:"lastId"`
		LastTS int64  `json:"lastTs"`
	}
	said := struct {
		Topic   string `json:"topic"`
		Cursors []at   `json:"cursors"`
	}{topic, []at{}}
	ctx, cancel := context.WithTimeout(r.Context(), moveTimeout)
	defer cancel()
	page := jetstream.GroupsPage{Topic: topic, Limit: jetstream.MaxGroupsPage}
	for len(said.Cursors) < maxCursors {
		groups, next, err := s.cfg.Groups.Admin().Groups().List(ctx, page)
		if err != nil {
			s.fail(w, r, err, "topic", "list the cursors")
			return
		}
		for i := range groups {
			said.Cursors = append(said.Cursors, at{groups[i].Group, groups[i].LastID, groups[i].LastTS})
		}
		if page.Next = next; next == "" {
			break
		}
	}
	answer(w, said)
}

// lags collects the lag of all groups at each scrape, from the server's own figures. All hubs of a
// NATS report the same.
type lags struct {
	groups  Groups
	logger  *slog.Logger
	pending *prometheus.Desc
	unacked *prometheus.Desc
	oldest  *prometheus.Desc

	mu   sync.Mutex
	read time.Time
	last []jetstream.Lag
}

// lagMetrics are the metrics that lags collects.
var lagMetrics = []string{"eventhub_group_oldest_unacked_seconds", "eventhub_group_pending", "eventhub_group_unacked"}

// registerLags adds the metrics of groups to a registry.
func registerLags(reg prometheus.Registerer, groups Groups, logger *slog.Logger) {
	desc := func(name string) *prometheus.Desc {
		d := define(name, gauge)
		return prometheus.NewDesc(d.name, d.help, d.labels, nil)
	}
	reg.MustRegister(&lags{
		groups: groups, logger: logger, pending: desc("eventhub_group_pending"), unacked: desc("eventhub_group_unacked"),
		oldest: desc("eventhub_group_oldest_unacked_seconds"),
	})
}

// Describe implements prometheus.Collector.
func (l *lags) Describe(descs chan<- *prometheus.Desc) {
	descs <- l.pending
	descs <- l.unacked
	descs <- l.oldest
}

// Collect implements prometheus.Collector. While NATS does not answer, the series are absent.
func (l *lags) Collect(metrics chan<- prometheus.Metric) {
	for _, lag := range summed(l.all()) {
		metrics <- prometheus.MustNewConstMetric(l.pending, prometheus.GaugeValue, float64(lag.Pending), lag.Topic, lag.Group)
		metrics <- prometheus.MustNewConstMetric(l.unacked, prometheus.GaugeValue, float64(lag.InFlight), lag.Topic, lag.Group)
		metrics <- prometheus.MustNewConstMetric(l.oldest, prometheus.GaugeValue, lag.OldestUnacked.Seconds(), lag.Topic, lag.Group)
	}
}

// summed returns the lags with one entry per topic for all groups with a TTL, of which there may be
// very many.
func summed(all []jetstream.Lag) []jetstream.Lag {
	var kept []jetstream.Lag
	ephemeral := make(map[string]int)
	for _, lag := range all {
		if !lag.Ephemeral {
			kept = append(kept, lag)
			continue
		}
		i, ok := ephemeral[lag.Topic]
		if !ok {
			i = len(kept)
			ephemeral[lag.Topic] = i
			kept = append(kept, jetstream.Lag{Topic: lag.Topic, Group: EphemeralLabel})
		}
		sum := &kept[i]
		sum.Pending += lag.Pending
		sum.InFlight += lag.InFlight
		sum.OldestUnacked = max(sum.OldestUnacked, lag.OldestUnacked)
	}
	return kept
}

// all reads the lag of all groups, at most once in lagKept.
func (l *lags) all() []jetstream.Lag {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.read) < lagKept {
		return l.last
	}
	ctx, cancel := context.WithTimeout(context.Background(), lagTimeout)
	defer cancel()
	found, more, err := l.groups.Admin().Groups().Lags(ctx, MaxPairs)
	switch {
	case err != nil:
		l.logger.LogAttrs(ctx, slog.LevelWarn, "failed to read the lag of groups; leaving them out of the metrics", slog.Any("error", err))
		found = nil
	case more:
		l.logger.LogAttrs(ctx, slog.LevelWarn, "there are more groups than the metrics show", slog.Int("limit", MaxPairs))
	}
	l.last, l.read = found, time.Now()
	return found
}
