package ops

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
)

const (
	// lagTimeout is the timeout of reading the lag of all groups. Servers wait 4 s for leaders that
	// do not answer. A scrape that waits for that, and then for readyTimeout, is still answered.
	lagTimeout = 6 * time.Second
	// lagFresh is how old the lag may be that a scrape shows: gather has read it just before.
	lagFresh = scrapeTimeout
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
	// Stuck is since when the group is stuck, in epoch milliseconds; absent if it is not.
	Stuck int64 `json:"stuck,omitempty"`
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
	found, err := s.cfg.Groups.Group(topic, group).Info(ctx)
	var newest []*jetstream.Event
	if err == nil {
		newest, err = s.cfg.Groups.History(topic).Newest(ctx, 1)
	}
	if err != nil {
		s.fail(w, r, err, "group on this topic", "read the lag of the group")
		return
	}
	said := lagging{
		Topic: topic, Group: group, LagMS: found.OldestUnackedMS, Pending: found.Pending, InFlight: found.InFlight,
		Backlog: found.Pending + found.InFlight, OldestUnackedMS: found.OldestUnackedMS, Stuck: found.Stuck,
	}
	if found.LastID != "" {
		said.LastCursor = &position{topic, found.LastID, found.LastTS}
	}
	if len(newest) > 0 {
		said.Tail = &newest[0].ID
	}
	answer(w, said)
}

// cursors answers GET /cursors.
func (s *Server) cursors(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", jetstream.MaxCursorsPage, 1, jetstream.MaxCursorsPage)
	if fault := cmp.Or(checkQuery(q, "topic", "limit", "next"), badLimit); fault != "" {
		badQuery(w, fault)
		return
	}
	page := jetstream.GroupsPage{Topic: q.Get("topic"), Limit: int(limit), Next: q.Get("next")}
	ctx, cancel := context.WithTimeout(r.Context(), moveTimeout)
	defer cancel()
	found, next, err := s.cfg.Groups.Admin().Groups().Cursors(ctx, page)
	if err != nil {
		s.fail(w, r, err, "topic", "list the cursors")
		return
	}
	answer(w, struct {
		Topic   string                  `json:"topic"`
		Cursors []jetstream.GroupCursor `json:"cursors"`
		Next    string                  `json:"next,omitempty"`
	}{page.Topic, append([]jetstream.GroupCursor{}, found...), next})
}

// lags collects the lag of all groups at each scrape, from the server's own figures. All hubs of a
// NATS report the same.
type lags struct {
	groups Groups
	// chosen returns which pairs have series of their own; nil stands for all.
	chosen  func() func(pair) bool
	logger  *slog.Logger
	pending *prometheus.Desc
	unacked *prometheus.Desc
	oldest  *prometheus.Desc
	stuck   *prometheus.Desc

	mu   sync.Mutex
	read time.Time
	last []jetstream.Lag
	// complete says that last has all groups that there are.
	complete bool
}

// lagMetrics are the metrics that lags collects.
var lagMetrics = []string{"eventhub_group_oldest_unacked_seconds", "eventhub_group_pending", "eventhub_group_stuck", "eventhub_group_unacked"}

// registerLags adds the metrics of groups to a registry.
func registerLags(reg prometheus.Registerer, groups Groups, logger *slog.Logger, observed *Metrics) *lags {
	l := &lags{
		groups: groups, logger: logger, pending: desc("eventhub_group_pending"), unacked: desc("eventhub_group_unacked"),
		oldest: desc("eventhub_group_oldest_unacked_seconds"), stuck: desc("eventhub_group_stuck"),
	}
	if observed != nil {
		l.chosen = observed.chosen
	}
	reg.MustRegister(l)
	return l
}

// Describe implements prometheus.Collector.
func (l *lags) Describe(descs chan<- *prometheus.Desc) {
	descs <- l.pending
	descs <- l.unacked
	descs <- l.oldest
	descs <- l.stuck
}

// Collect implements prometheus.Collector. While NATS does not answer, the series are absent.
func (l *lags) Collect(metrics chan<- prometheus.Metric) {
	own := func(pair) bool { return true }
	if l.chosen != nil {
		own = l.chosen()
	}
	for _, lag := range summed(l.all(lagFresh), own) {
		metrics <- prometheus.MustNewConstMetric(l.pending, prometheus.GaugeValue, float64(lag.Pending), lag.Topic, lag.Group)
		metrics <- prometheus.MustNewConstMetric(l.unacked, prometheus.GaugeValue, float64(lag.InFlight), lag.Topic, lag.Group)
		metrics <- prometheus.MustNewConstMetric(l.oldest, prometheus.GaugeValue, lag.OldestUnacked.Seconds(), lag.Topic, lag.Group)
		stuck := 0.0
		if !lag.StuckSince.IsZero() {
			stuck = 1
		}
		metrics <- prometheus.MustNewConstMetric(l.stuck, prometheus.GaugeValue, stuck, lag.Topic, lag.Group)
	}
}

// summed returns the lags with one entry per topic for all groups with a TTL, of which there may be
// very many. Beyond MaxPairs, and without series of their own, these share one entry, and all other
// pairs share another.
func summed(all []jetstream.Lag, own func(pair) bool) []jetstream.Lag {
	var kept []jetstream.Lag
	sums := make(map[pair]int)
	for _, lag := range all {
		at, rest := pair{lag.Topic, lag.Group}, pair{OtherLabel, OtherLabel}
		ephemeral := lag.Ephemeral || lag.Group == EphemeralLabel // clients may use that name
		if ephemeral {
			at.group, rest.group = EphemeralLabel, EphemeralLabel
		}
		if _, ok := sums[at]; at == rest || !own(at) || len(kept) >= MaxPairs && !ok {
			at = rest
		} else if !ephemeral {
			kept = append(kept, lag)
			continue
		}
		i, ok := sums[at]
		if !ok {
			i = len(kept)
			sums[at] = i
			kept = append(kept, jetstream.Lag{Topic: at.topic, Group: at.group})
		}
		sum := &kept[i]
		sum.Pending += lag.Pending
		sum.InFlight += lag.InFlight
		sum.OldestUnacked = max(sum.OldestUnacked, lag.OldestUnacked)
		if sum.StuckSince.IsZero() {
			sum.StuckSince = lag.StuckSince
		}
	}
	return kept
}

// all returns the lag of all groups, read less than maxAge ago.
func (l *lags) all(maxAge time.Duration) []jetstream.Lag {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.read) < maxAge {
		return l.last
	}
	ctx, cancel := context.WithTimeout(context.Background(), lagTimeout)
	defer cancel()
	found, err := l.groups.Admin().Groups().Lags(ctx, jetstream.MaxLags)
	switch {
	case err != nil:
		l.logger.LogAttrs(ctx, slog.LevelWarn, "failed to read the lag of groups; leaving them out of the metrics", slog.Any("error", err))
	case found.Unknown > 0:
		l.logger.LogAttrs(ctx, slog.LevelWarn, "the leaders of some groups do not answer; leaving these groups out of the metrics", slog.Int("groups", found.Unknown))
	case found.More:
		l.logger.LogAttrs(ctx, slog.LevelWarn, "there are more groups than the metrics show", slog.Int("limit", jetstream.MaxLags))
	}
	l.last, l.read = found.Lags, time.Now()
	l.complete = err == nil && found.Unknown == 0 && !found.More
	return l.last
}
