package ops

import (
	"cmp"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

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
// Labels are resolved when an observer is created, and again when its series have ended. Each
// report in between costs only a few atomic operations.
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

	// topicVecs and pairVecs are the metrics whose labels are those of a topic, and of a pair.
	topicVecs, pairVecs map[string]*prometheus.MetricVec

	mu        sync.Mutex
	series    Series
	topics    table[string, topicSeries]
	pairs     table[pair, pairSeries]
	observers map[*groupObserver]struct{}
	members   map[pair]int       // observers of each pair
	ended     map[string]float64 // what series that have ended counted, by metric
}

var _ jetstream.Observer = (*Metrics)(nil)

// pair holds the labels of a group's series.
type pair struct{ topic, group string }

// topicSeries are the series in which a topic is counted.
type topicSeries struct {
	published prometheus.Counter
	failed    prometheus.Counter
	ignored   prometheus.Counter
	took      prometheus.Observer
	outcomes  [jetstream.Dropped + 1]prometheus.Counter
	// The series of schemas and snapshots begin with their first use, for most topics have none.
	refused, stored, bare, snapshots func() prometheus.Counter
}

// pairSeries are the series in which a pair is counted.
type pairSeries struct {
	delivered   prometheus.Counter
	redelivered prometheus.Counter
	resets      prometheus.Counter
	lost        prometheus.Counter
	outcomes    [jetstream.Dropped + 1]prometheus.Counter
	polled      prometheus.Observer
	handled     prometheus.Observer
	latency     prometheus.Observer
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
		observers: make(map[*groupObserver]struct{}),
		members:   make(map[pair]int),
		ended:     make(map[string]float64),
	}
	m.topicVecs = map[string]*prometheus.MetricVec{
		"events_published_total": m.published.MetricVec, "eventhub_publish_failures_total": m.publishFailed.MetricVec,
		"eventhub_publish_duration_seconds": m.publishTook.MetricVec, "eventhub_groups_ignored_total": m.ignored.MetricVec,
		"eventhub_schema_unversioned_total": m.unversioned.MetricVec, "eventhub_snapshots_total": m.snapshots.MetricVec,
		"eventhub_leases_returned_total": m.topicOutcome[jetstream.Returned].MetricVec,
		"eventhub_leases_dropped_total":  m.topicOutcome[jetstream.Dropped].MetricVec,
	}
	m.pairVecs = map[string]*prometheus.MetricVec{
		"events_delivered_total": m.delivered.MetricVec, "eventhub_redeliveries_total": m.redelivered.MetricVec,
		"eventhub_group_resets_total": m.resets.MetricVec, "eventhub_events_lost_total": m.lost.MetricVec,
		"subscribe_poll_duration_ms": m.polled.MetricVec, "delivery_handler_duration_ms": m.handled.MetricVec, "delivery_latency_ms": m.latency.MetricVec,
		"events_acked_total": m.outcomes[jetstream.Acked].MetricVec, "events_nacked_total": m.outcomes[jetstream.Nacked].MetricVec,
		"eventhub_leases_expired_total": m.outcomes[jetstream.Expired].MetricVec, "events_dead_lettered_total": m.outcomes[jetstream.DeadLettered].MetricVec,
	}
	m.topics = table[string, topicSeries]{
		max: MaxTopics, room: 2 * MaxTopics, other: OtherLabel, resolve: m.seriesOfTopic, end: m.endTopic, entries: make(map[string]*entry[topicSeries]),
		compare: strings.Compare,
	}
	m.pairs = table[pair, pairSeries]{
		max: MaxPairs, room: 2 * MaxPairs, other: pair{OtherLabel, OtherLabel}, resolve: m.seriesOfPair, end: m.endPair, entries: make(map[pair]*entry[pairSeries]),
		compare: func(a, b pair) int {
			return cmp.Or(strings.Compare(a.topic, b.topic), strings.Compare(a.group, b.group))
		},
	}
	held, wsHeld := desc("events_inflight"), desc("ws_inflight")
	reg.MustRegister(collected{[]*prometheus.Desc{held, wsHeld}, func(set func(*prometheus.Desc, float64, ...string)) {
		for p, n := range m.held() {
			set(held, float64(n), p.topic, p.group)
			set(wsHeld, float64(n), p.topic, p.group)
		}
	}})
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
	return m.topic(topic)
}

// topic is Topic with m.mu held.
func (m *Metrics) topic(topic string) *topicObserver {
	o := &topicObserver{metrics: m, topic: topic}
	e := m.topics.get(topic)
	if !e.own && topic != m.topics.other && m.series == AllSeries {
		m.limitReached.WithLabelValues(limitTopics).Inc()
	}
	o.at.Store(e)
	return o
}

// seriesOfTopic makes the series with the label of a topic.
func (m *Metrics) seriesOfTopic(topic string) topicSeries {
	s := topicSeries{
		published: m.published.WithLabelValues(topic),
		failed:    m.publishFailed.WithLabelValues(topic),
		took:      m.publishTook.WithLabelValues(topic),
		ignored:   m.ignored.WithLabelValues(topic),
		refused:   sync.OnceValue(func() prometheus.Counter { return m.schemas.WithLabelValues(topic, "refused") }),
		stored:    sync.OnceValue(func() prometheus.Counter { return m.schemas.WithLabelValues(topic, "stored") }),
		bare:      sync.OnceValue(func() prometheus.Counter { return m.unversioned.WithLabelValues(topic) }),
		snapshots: sync.OnceValue(func() prometheus.Counter { return m.snapshots.WithLabelValues(topic) }),
	}
	for how, v := range m.topicOutcome {
		s.outcomes[how] = v.WithLabelValues(topic)
	}
	return s
}

// seriesOfPair makes the series with the labels of a pair.
func (m *Metrics) seriesOfPair(p pair) pairSeries {
	s := pairSeries{
		delivered:   m.delivered.WithLabelValues(p.topic, p.group),
		redelivered: m.redelivered.WithLabelValues(p.topic, p.group),
		resets:      m.resets.WithLabelValues(p.topic, p.group),
		lost:        m.lost.WithLabelValues(p.topic, p.group),
		polled:      m.polled.WithLabelValues(p.topic, p.group),
		handled:     m.handled.WithLabelValues(p.topic, p.group),
		latency:     m.latency.WithLabelValues(p.topic, p.group),
	}
	for how, v := range m.outcomes {
		s.outcomes[how] = v.WithLabelValues(p.topic, p.group)
	}
	return s
}

// endTopic removes the series of a topic. m.mu is held.
func (m *Metrics) endTopic(topic string) {
	for name, v := range m.topicVecs {
		m.endSeries(name, v, topic)
	}
	for _, action := range []string{"refused", "stored"} {
		m.endSeries("eventhub_schema_violations_total", m.schemas.MetricVec, topic, action)
	}
}

// endPair removes the series of a pair. m.mu is held.
func (m *Metrics) endPair(p pair) {
	for name, v := range m.pairVecs {
		m.endSeries(name, v, p.topic, p.group)
	}
}

func (m *Metrics) endSeries(name string, v *prometheus.MetricVec, labels ...string) {
	if series, err := v.GetMetricWithLabelValues(labels...); err == nil {
		var last dto.Metric
		if series.Write(&last) == nil {
			m.ended[name] += reading(&last)
		}
	}
	v.DeleteLabelValues(labels...)
}

// Group returns the observer for one subscription.
func (m *Metrics) Group(topic, group string, ephemeral bool) jetstream.GroupObserver {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ephemeral {
		group = EphemeralLabel
	}
	o := &groupObserver{metrics: m, pair: pair{topic, strings.ToValidUTF8(group, "?")}, durable: !ephemeral, topic: m.topic(topic)}
	if !o.look().own && o.pair != m.pairs.other && m.series == AllSeries {
		m.limitReached.WithLabelValues(limitPairs).Inc()
	}
	m.observers[o] = struct{}{}
	m.members[o.pair]++
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

// limit sets how many topics and groups have series of their own, from the next exist on.
func (m *Metrics) limit(series Series) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.series = series
	m.topics.max, m.pairs.max = series.upTo(MaxTopics), series.upTo(MaxPairs)
	m.topics.ranked, m.pairs.ranked = series > AllSeries, series > AllSeries
}

// exist decides which topics and groups have series of their own, now that all are known that
// exist: this hub may not have used them yet.
func (m *Metrics) exist(topics []string, lags []jetstream.Lag) {
	m.mu.Lock()
	defer m.mu.Unlock()
	ofTopics, ofPairs := make(map[string]rank), make(map[pair]rank)
	for _, topic := range topics {
		ofTopics[topic] = rank{}
	}
	var durable []pair
	for i := range lags {
		lag := &lags[i]
		p := pair{lag.Topic, lag.Group}
		if lag.Ephemeral {
			p.group = EphemeralLabel
		} else {
			durable = append(durable, p)
		}
		ofTopics[p.topic] = ofTopics[p.topic].add(lag)
		ofPairs[p] = ofPairs[p].add(lag)
	}
	m.topics.choose(slices.Collect(maps.Keys(ofTopics)), ofTopics)
	m.pairs.choose(durable, ofPairs)
}

// chosen returns a function that reports whether the lag of a pair has series of its own. Other
// hubs may have members of groups with a TTL that this hub has not met.
func (m *Metrics) chosen() func(pair) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	own := make(map[pair]bool, m.pairs.own)
	for p, e := range m.pairs.entries {
		own[p] = e.own
	}
	all := m.series == AllSeries
	return func(p pair) bool { return own[p] || all && p.group == EphemeralLabel }
}

// known returns the topics that have series, or share some.
func (m *Metrics) known() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.topics.entries))
}

// sweep ends the series of topics that are gone, and of groups of which there reports false. Groups
// that have members on this hub, and the pair of dead letters of delayed events, which is no group,
// end with their topic at the earliest.
func (m *Metrics) sweep(gone map[string]bool, there func(pair) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.topics.sweep(func(topic string) bool { return !gone[topic] })
	m.pairs.sweep(func(p pair) bool {
		return m.members[p] > 0 || !gone[p.topic] && (p.group == jetstream.DelayedGroup || there(p))
	})
}

// held returns the leases that are held through this hub.
func (m *Metrics) held() map[pair]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	sums := make(map[pair]int64)
	for p, e := range m.pairs.entries {
		if e.own {
			sums[p] = 0
		}
	}
	if m.pairs.shared {
		sums[m.pairs.other] = 0
	}
	for o := range m.observers {
		at := o.pair
		if _, own := sums[at]; !own {
			at = m.pairs.other
		}
		sums[at] += o.held.Load()
	}
	return sums
}

// release ends an observer. With the last one of a pair, it ends the series of an ephemeral pair. A
// durable group outlives its members.
func (m *Metrics) release(o *groupObserver) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, open := m.observers[o]; !open {
		return
	}
	delete(m.observers, o)
	m.members[o.pair]--
	if m.members[o.pair] > 0 {
		return
	}
	delete(m.members, o.pair)
	if e, ok := m.pairs.entries[o.pair]; ok && (!e.own || !e.durable) {
		m.pairs.drop(o.pair)
	}
}

// counted returns what series that have ended counted, by the name of their metric.
func (m *Metrics) counted() map[string]float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.ended)
}

// topicObserver counts for one topic.
type topicObserver struct {
	metrics *Metrics
	topic   string
	at      atomic.Pointer[entry[topicSeries]]
}

// series returns the series in which the topic is counted now.
func (o *topicObserver) series() *topicSeries {
	e := o.at.Load()
	if e.ended.Load() {
		o.metrics.mu.Lock()
		e = o.metrics.topics.get(o.topic)
		o.metrics.mu.Unlock()
		o.at.Store(e)
	}
	return &e.series
}

func (o *topicObserver) Published(took time.Duration) {
	s := o.series()
	s.published.Inc()
	s.took.Observe(took.Seconds())
}

func (o *topicObserver) PublishFailed() { o.series().failed.Inc() }

func (o *topicObserver) GroupIgnored() { o.series().ignored.Inc() }

func (o *topicObserver) SchemaUnversioned() { o.series().bare().Inc() }

func (o *topicObserver) SchemaBroken(refused bool) {
	if refused {
		o.series().refused().Inc()
	} else {
		o.series().stored().Inc()
	}
}

// groupObserver counts for one subscription.
type groupObserver struct {
	metrics *Metrics
	pair    pair
	durable bool
	topic   *topicObserver
	at      atomic.Pointer[entry[pairSeries]]
	held    atomic.Int64 // leases
}

// look looks the entry of the pair up. metrics.mu is held.
func (o *groupObserver) look() *entry[pairSeries] {
	e := o.metrics.pairs.get(o.pair)
	e.durable = e.durable || o.durable
	o.at.Store(e)
	return e
}

// series returns the series in which the pair is counted now.
func (o *groupObserver) series() *pairSeries {
	e := o.at.Load()
	if e.ended.Load() {
		o.metrics.mu.Lock()
		e = o.look()
		o.metrics.mu.Unlock()
	}
	return &e.series
}

func (o *groupObserver) Delivered(attempt int) {
	s := o.series()
	s.delivered.Inc()
	if attempt > 1 {
		s.redelivered.Inc()
	}
}

func (o *groupObserver) Settled(how jetstream.Outcome, held, age time.Duration) {
	s := o.series()
	if c := s.outcomes[how]; c != nil {
		c.Inc()
	} else {
		o.topic.series().outcomes[how].Inc()
	}
	s.handled.Observe(milliseconds(held))
	if how == jetstream.Acked {
		s.latency.Observe(milliseconds(age))
	}
}

func (o *groupObserver) InFlight(delta int) { o.held.Add(int64(delta)) }

func (o *groupObserver) Polled(took time.Duration) { o.series().polled.Observe(milliseconds(took)) }

func (o *groupObserver) Reset() { o.series().resets.Inc() }

func (o *groupObserver) Lost(events uint64) { o.series().lost.Add(float64(events)) }

func (o *groupObserver) Close() { o.metrics.release(o) }

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

// Snapshots counts keys that a compactor wrote.
func (m *Metrics) Snapshots(topic string, keys int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.topics.get(topic).series.snapshots().Add(float64(keys))
}
