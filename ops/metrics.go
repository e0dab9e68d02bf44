package ops

import (
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// Limits on the number of series. They prevent clients with many topics or groups from filling the
// memory of the hub or of Prometheus. Each time a limit applies, eventhub_limit_reached_total
// counts it.
const (
	// MaxTopics ("metric_topics") is the maximum number of topics with their own label. Further
	// topics share OtherLabel.
	MaxTopics = 1_000
	// MaxPairs ("metric_groups") is the maximum number of pairs of topic and group with their own
	// labels. Further pairs share OtherLabel for both.
	MaxPairs = 5_000

	limitTopics = "metric_topics"
	limitPairs  = "metric_groups"
)

// Labels that stand for several topics or groups.
const (
	// OtherLabel stands for topics beyond MaxTopics and pairs beyond MaxPairs.
	OtherLabel = "other"
	// EphemeralLabel stands for all groups of a topic that were created with a TTL.
	EphemeralLabel = "(ephemeral)"
)

// Metrics exports the reports of the bus and the facade as Prometheus metrics. Its methods may be
// called concurrently.
//
// Labels are resolved once, when an observer is created, so each report costs only a few atomic
// operations.
type Metrics struct {
	traffic
	outboxes

	published     *prometheus.CounterVec
	publishFailed *prometheus.CounterVec
	publishTook   *prometheus.HistogramVec
	ignored       *prometheus.CounterVec
	schemas       *prometheus.CounterVec
	unversioned   *prometheus.CounterVec

	delivered    *prometheus.CounterVec
	redelivered  *prometheus.CounterVec
	outcomes     map[jetstream.Outcome]*prometheus.CounterVec
	topicOutcome map[jetstream.Outcome]*prometheus.CounterVec // with a label for the topic alone
	resets       *prometheus.CounterVec
	lost         *prometheus.CounterVec
	inFlight     *prometheus.GaugeVec
	wsInFlight   *prometheus.GaugeVec
	polled       *prometheus.HistogramVec
	handled      *prometheus.HistogramVec
	latency      *prometheus.HistogramVec
	restarts     prometheus.Counter
	limitReached *prometheus.CounterVec
	jetstream    jetstreamErrors
	revocations  prometheus.Gauge
	native       map[string]prometheus.Counter
	narrowed     prometheus.Counter
	projected    *prometheus.CounterVec
	snapshots    *prometheus.CounterVec
	stalled      *prometheus.GaugeVec
	spans        prometheus.Counter
	spansDropped *prometheus.CounterVec
	gauges       map[string]prometheus.Gauge

	mu     sync.Mutex
	topics map[string]struct{}
	pairs  map[pair]*pairUse
}

var _ jetstream.Observer = (*Metrics)(nil)

// pair holds the labels of a group's series.
type pair struct{ topic, group string }

// pairUse counts the observers of a pair.
type pairUse struct {
	observers int
	// durable pairs keep their series without observers, because a durable group outlives its
	// members.
	durable bool
}

// NewMetrics registers all metrics with reg, including those of the Go runtime and the process. It
// panics if reg already has a Metrics.
func NewMetrics(reg *prometheus.Registry) *Metrics {
	m := &Metrics{
		traffic:       newTraffic(reg),
		outboxes:      newOutboxes(reg),
		published:     newCounter(reg, "events_published_total"),
		publishFailed: newCounter(reg, "eventhub_publish_failures_total"),
		publishTook:   newHistogram(reg, "eventhub_publish_duration_seconds"),
		ignored:       newCounter(reg, "eventhub_groups_ignored_total"),
		schemas:       newCounter(reg, "eventhub_schema_violations_total"),
		unversioned:   newCounter(reg, "eventhub_schema_unversioned_total"),
		delivered:     newCounter(reg, "events_delivered_total"),
		redelivered:   newCounter(reg, "eventhub_redeliveries_total"),
		outcomes: map[jetstream.Outcome]*prometheus.CounterVec{
			jetstream.Acked:        newCounter(reg, "events_acked_total"),
			jetstream.Nacked:       newCounter(reg, "events_nacked_total"),
			jetstream.Expired:      newCounter(reg, "eventhub_leases_expired_total"),
			jetstream.DeadLettered: newCounter(reg, "events_dead_lettered_total"),
		},
		topicOutcome: map[jetstream.Outcome]*prometheus.CounterVec{
			jetstream.Returned: newCounter(reg, "eventhub_leases_returned_total"),
			jetstream.Dropped:  newCounter(reg, "eventhub_leases_dropped_total"),
		},
		jetstream:    newJetStreamErrors(reg),
		resets:       newCounter(reg, "eventhub_group_resets_total"),
		lost:         newCounter(reg, "eventhub_events_lost_total"),
		inFlight:     newGauge(reg, "events_inflight"),
		wsInFlight:   newGauge(reg, "ws_inflight"),
		polled:       newHistogram(reg, "subscribe_poll_duration_ms"),
		handled:      newHistogram(reg, "delivery_handler_duration_ms"),
		latency:      newHistogram(reg, "delivery_latency_ms"),
		restarts:     newCounter(reg, "eventhub_server_restarts_total").WithLabelValues(),
		limitReached: newLimits(reg),
		revocations:  newGauge(reg, "eventhub_revocations").WithLabelValues(),
		native:       make(map[string]prometheus.Counter),
		narrowed:     newCounter(reg, "eventhub_native_narrowed_total").WithLabelValues(),
		projected:    newCounter(reg, "eventhub_projected_total"),
		snapshots:    newCounter(reg, "eventhub_snapshots_total"),
		stalled:      newGauge(reg, "eventhub_projection_stalled_seconds"),
		spans:        newCounter(reg, "eventhub_spans_exported_total").WithLabelValues(),
		spansDropped: newCounter(reg, "eventhub_spans_dropped_total"),
		gauges: map[string]prometheus.Gauge{
			jetstream.GaugeConnected:     newGauge(reg, "eventhub_nats_connected").WithLabelValues(),
			jetstream.GaugeTopics:        newGauge(reg, "eventhub_topics").WithLabelValues(),
			jetstream.GaugeSubscriptions: newGauge(reg, "eventhub_subscriptions").WithLabelValues(),
			jetstream.GaugeBucketsBroken: newGauge(reg, "eventhub_buckets_broken").WithLabelValues(),
			jetstream.GaugeKeysRemoved:   newGauge(reg, "eventhub_keys_removed").WithLabelValues(),
			jetstream.GaugeStreamsFailed: newGauge(reg, "eventhub_streams_failed").WithLabelValues(),
			jetstream.GaugeDelayed:       newGauge(reg, "eventhub_delayed").WithLabelValues(),
		},
		topics: make(map[string]struct{}),
		pairs:  make(map[pair]*pairUse),
	}
	clients := newCounter(reg, "eventhub_native_clients_total")
	for _, outcome := range []string{jetstream.CalloutAllowed, jetstream.CalloutRefused, jetstream.CalloutFailed, jetstream.CalloutKicked} {
		m.native[outcome] = clients.WithLabelValues(outcome)
	}
	survived := define("eventhub_panics_total", counter)
	reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: survived.name, Help: survived.help},
		func() float64 { return float64(panics.Count()) }))
	newGauge(reg, "eventhub_build_info").WithLabelValues(buildVersion(), runtime.Version()).Set(1)
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func buildVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// Topic returns the observer for publishes to a topic.
func (m *Metrics) Topic(topic string) jetstream.TopicObserver {
	m.mu.Lock()
	defer m.mu.Unlock()
	topic = m.topicLabel(topic)
	for _, v := range m.topicOutcome {
		v.WithLabelValues(topic)
	}
	return &topicObserver{
		published: m.published.WithLabelValues(topic),
		failed:    m.publishFailed.WithLabelValues(topic),
		took:      m.publishTook.WithLabelValues(topic),
		ignored:   m.ignored.WithLabelValues(topic),
		broken:    func(action string) { m.schemas.WithLabelValues(topic, action).Inc() },
		bare:      func() { m.unversioned.WithLabelValues(topic).Inc() },
	}
}

// Group returns the observer for one subscription.
func (m *Metrics) Group(topic, group string, ephemeral bool) jetstream.GroupObserver {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ephemeral {
		group = EphemeralLabel
	}
	p := pair{m.topicLabel(topic), strings.ToValidUTF8(group, "?")}
	use, ok := m.pairs[p]
	switch {
	case ok:
	case len(m.pairs) >= MaxPairs:
		m.limitReached.WithLabelValues(limitPairs).Inc()
		// Shared pair: not counted in m.pairs, and never removed.
		p, use = pair{OtherLabel, OtherLabel}, nil
	default:
		use = &pairUse{}
		m.pairs[p] = use
	}
	if use != nil {
		use.observers++
		use.durable = use.durable || !ephemeral
	}
	o := &groupObserver{
		metrics: m, pair: p, use: use,
		delivered:   m.delivered.WithLabelValues(p.topic, p.group),
		redelivered: m.redelivered.WithLabelValues(p.topic, p.group),
		resets:      m.resets.WithLabelValues(p.topic, p.group),
		lost:        m.lost.WithLabelValues(p.topic, p.group),
		inFlight:    m.inFlight.WithLabelValues(p.topic, p.group),
		wsInFlight:  m.wsInFlight.WithLabelValues(p.topic, p.group),
		polled:      m.polled.WithLabelValues(p.topic, p.group),
		handled:     m.handled.WithLabelValues(p.topic, p.group),
		latency:     m.latency.WithLabelValues(p.topic, p.group),
	}
	for how, v := range m.outcomes {
		o.outcomes[how] = v.WithLabelValues(p.topic, p.group)
	}
	for how, v := range m.topicOutcome {
		o.outcomes[how] = v.WithLabelValues(p.topic)
	}
	return o
}

// rateLimits lists the limits beyond which clients get rate_limited. Each has a series from the
// start.
var rateLimits = []string{
	"bad_tokens", "client_groups", "client_topics", "delayed_per_client", "frame_rate", "groups_per_client", "key_share", "keys_per_client", "outbox_rate",
	"principal_rate", "principal_requests", "token_checks", "topic_rate", "topics_per_client",
}

func newLimits(reg prometheus.Registerer) *prometheus.CounterVec {
	v := newCounter(reg, "eventhub_limit_reached_total")
	for _, limit := range append([]string{limitTopics, limitPairs}, rateLimits...) {
		v.WithLabelValues(limit)
	}
	return v
}

// LimitReached counts a refusal or delay caused by the named limit.
func (m *Metrics) LimitReached(limit string) { m.limitReached.WithLabelValues(limit).Inc() }

// NativeClient counts a native NATS client by its outcome: Callout… of package jetstream.
func (m *Metrics) NativeClient(outcome string) { m.native[outcome].Inc() }

// NativeNarrowed counts a native NATS client that may do less than its token allows.
func (m *Metrics) NativeNarrowed() { m.narrowed.Inc() }

// Revocations sets the number of revocations that the hub observes.
func (m *Metrics) Revocations(n int) { m.revocations.Set(float64(n)) }

// JetStreamError counts a failed request to JetStream.
func (m *Metrics) JetStreamError(code int) { m.jetstream.count(code) }

// ServerRestarted counts a restart of the embedded NATS server by the hub.
func (m *Metrics) ServerRestarted() { m.restarts.Inc() }

// Gauge sets the gauge with the given name. Names other than jetstream's Gauge constants are
// ignored.
func (m *Metrics) Gauge(name string, value float64) {
	if g, ok := m.gauges[name]; ok {
		g.Set(value)
	}
}

// exists makes the series of a topic, and of a durable group of it if group is not "", that this
// hub may not have used yet. Beyond MaxTopics and MaxPairs, it does nothing.
func (m *Metrics) exists(topic, group string) {
	m.mu.Lock()
	_, known := m.topics[topic]
	_, observed := m.pairs[pair{topic, group}]
	room := len(m.topics) < MaxTopics
	pairRoom := len(m.pairs) < MaxPairs
	m.mu.Unlock()
	if !known && !room {
		return
	}
	if !known {
		m.Topic(topic)
	}
	if group != "" && !observed && pairRoom {
		m.Group(topic, group, false).Close()
	}
}

// topicLabel returns the label of a topic. The caller holds m.mu.
func (m *Metrics) topicLabel(topic string) string {
	if _, ok := m.topics[topic]; ok {
		return topic
	}
	if len(m.topics) >= MaxTopics {
		m.limitReached.WithLabelValues(limitTopics).Inc()
		return OtherLabel
	}
	m.topics[topic] = struct{}{}
	return topic
}

// release ends one use of a pair. With the last use, it removes the series of an ephemeral pair.
func (m *Metrics) release(p pair, use *pairUse) {
	m.mu.Lock()
	defer m.mu.Unlock()
	use.observers--
	if use.observers > 0 || use.durable {
		return
	}
	delete(m.pairs, p)
	m.delivered.DeleteLabelValues(p.topic, p.group)
	m.redelivered.DeleteLabelValues(p.topic, p.group)
	m.resets.DeleteLabelValues(p.topic, p.group)
	m.lost.DeleteLabelValues(p.topic, p.group)
	for _, v := range m.outcomes {
		v.DeleteLabelValues(p.topic, p.group)
	}
	for _, v := range []*prometheus.GaugeVec{m.inFlight, m.wsInFlight} {
		v.DeleteLabelValues(p.topic, p.group)
	}
	for _, v := range []*prometheus.HistogramVec{m.polled, m.handled, m.latency} {
		v.DeleteLabelValues(p.topic, p.group)
	}
}

// topicObserver holds the resolved series of one topic.
type topicObserver struct {
	published prometheus.Counter
	failed    prometheus.Counter
	ignored   prometheus.Counter
	broken    func(action string)
	bare      func()
	took      prometheus.Observer
}

func (o *topicObserver) Published(took time.Duration) {
	o.published.Inc()
	o.took.Observe(took.Seconds())
}

func (o *topicObserver) PublishFailed() { o.failed.Inc() }

func (o *topicObserver) GroupIgnored() { o.ignored.Inc() }

func (o *topicObserver) SchemaUnversioned() { o.bare() }

func (o *topicObserver) SchemaBroken(refused bool) {
	if refused {
		o.broken("refused")
	} else {
		o.broken("stored")
	}
}

// groupObserver holds the resolved series of one pair, for one subscription.
type groupObserver struct {
	metrics *Metrics
	pair    pair
	use     *pairUse
	closed  sync.Once

	delivered   prometheus.Counter
	redelivered prometheus.Counter
	resets      prometheus.Counter
	lost        prometheus.Counter
	outcomes    [jetstream.Dropped + 1]prometheus.Counter
	inFlight    prometheus.Gauge
	wsInFlight  prometheus.Gauge
	polled      prometheus.Observer
	handled     prometheus.Observer
	latency     prometheus.Observer
}

func (o *groupObserver) Delivered(attempt int) {
	o.delivered.Inc()
	if attempt > 1 {
		o.redelivered.Inc()
	}
}

func (o *groupObserver) Settled(how jetstream.Outcome, held, age time.Duration) {
	o.outcomes[how].Inc()
	o.handled.Observe(milliseconds(held))
	if how == jetstream.Acked {
		o.latency.Observe(milliseconds(age))
	}
}

func (o *groupObserver) InFlight(delta int) {
	o.inFlight.Add(float64(delta))
	o.wsInFlight.Add(float64(delta))
}

func (o *groupObserver) Polled(took time.Duration) { o.polled.Observe(milliseconds(took)) }

func (o *groupObserver) Reset() { o.resets.Inc() }

func (o *groupObserver) Lost(events uint64) { o.lost.Add(float64(events)) }

func (o *groupObserver) Close() {
	if o.use != nil {
		o.closed.Do(func() { o.metrics.release(o.pair, o.use) })
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// projectedOutcomes lists what becomes of events that projections deal with.
var projectedOutcomes = []string{"applied", "known", "poisoned", "dropped"}

// Projection makes the series of a projection of the hub.
func (m *Metrics) Projection(name string) {
	m.stalled.WithLabelValues(name)
	for _, outcome := range projectedOutcomes {
		m.projected.WithLabelValues(name, outcome)
	}
}

// Projected counts an event that a projection processed. Projection names come from the program, so
// there are few.
func (m *Metrics) Projected(projection, outcome string) {
	m.projected.WithLabelValues(projection, outcome).Inc()
}

// ProjectionStalled records for how long a projection of the hub has made no progress. Projection
// names come from the program, so there are few.
func (m *Metrics) ProjectionStalled(projection string, stalled time.Duration) {
	m.stalled.WithLabelValues(projection).Set(stalled.Seconds())
}

// SpansExported counts spans that the collector has taken.
func (m *Metrics) SpansExported(n int) { m.spans.Add(float64(n)) }

// SpansDropped counts spans that the collector does not get, by the reason.
func (m *Metrics) SpansDropped(reason string, n int) {
	m.spansDropped.WithLabelValues(reason).Add(float64(n))
}

// Snapshots counts keys that a compactor wrote. The topics come from the topics file.
func (m *Metrics) Snapshots(topic string, keys int) {
	m.snapshots.WithLabelValues(topic).Add(float64(keys))
}
