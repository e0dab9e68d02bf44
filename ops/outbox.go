package ops

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// outboxes holds the metrics of drainers.
type outboxes struct {
	pending, parked, oldest *prometheus.GaugeVec
	waiting, skew           *prometheus.GaugeVec
	sent, found, failed     *prometheus.CounterVec
	unclaimed, unsettled    *prometheus.CounterVec
	claimed, latency        *prometheus.HistogramVec
}

func newOutboxes(reg prometheus.Registerer) outboxes {
	return outboxes{
		pending:   newGauge(reg, "eventhub_outbox_pending"),
		parked:    newGauge(reg, "eventhub_outbox_parked"),
		oldest:    newGauge(reg, "eventhub_outbox_oldest_age_seconds"),
		waiting:   newGauge(reg, "eventhub_outbox_waiting"),
		skew:      newGauge(reg, "eventhub_outbox_clock_skew_seconds"),
		sent:      newCounter(reg, "eventhub_outbox_published_total"),
		unclaimed: newCounter(reg, "eventhub_outbox_claim_failures_total"),
		unsettled: newCounter(reg, "eventhub_outbox_settle_failures_total"),
		found:     newCounter(reg, "eventhub_outbox_found_total"),
		failed:    newCounter(reg, "eventhub_outbox_failures_total"),
		claimed:   newHistogram(reg, "eventhub_outbox_claim_duration_seconds"),
		latency:   newHistogram(reg, "eventhub_outbox_latency_seconds"),
	}
}

// Outbox observes the drainer of one outbox. Its methods may be called concurrently.
type Outbox struct {
	pending, parked, oldest prometheus.Gauge
	waiting, skew           prometheus.Gauge
	sent, found, failed     prometheus.Counter
	unclaimed, unsettled    prometheus.Counter
	claimed, latency        prometheus.Observer
}

// Outbox returns the observer of an outbox. Outbox names come from the program, so there are few.
func (b *outboxes) Outbox(name string) *Outbox {
	return &Outbox{
		pending: b.pending.WithLabelValues(name), parked: b.parked.WithLabelValues(name), oldest: b.oldest.WithLabelValues(name),
		waiting: b.waiting.WithLabelValues(name), skew: b.skew.WithLabelValues(name),
		sent: b.sent.WithLabelValues(name), found: b.found.WithLabelValues(name), failed: b.failed.WithLabelValues(name), unclaimed: b.unclaimed.WithLabelValues(name),
		unsettled: b.unsettled.WithLabelValues(name),
		claimed:   b.claimed.WithLabelValues(name), latency: b.latency.WithLabelValues(name),
	}
}

// Claimed records the duration of a claim that found records.
func (o *Outbox) Claimed(_ int, took time.Duration) { o.claimed.Observe(took.Seconds()) }

// ClaimFailed counts a failed claim, or a lane that a claim had to skip.
func (o *Outbox) ClaimFailed() { o.unclaimed.Inc() }

// SettleFailed counts publish results that failed to be saved, or a lane whose results the database
// refused.
func (o *Outbox) SettleFailed() { o.unsettled.Inc() }

// Published counts a record that is in its stream. age is the time since the record was added.
// found means that a look-up found the event already stored.
func (o *Outbox) Published(age time.Duration, found bool) {
	o.sent.Inc()
	o.latency.Observe(age.Seconds())
	if found {
		o.found.Inc()
	}
}

// Waiting reports whether the database of the outbox is unavailable, so that its records wait.
func (o *Outbox) Waiting(waits bool) {
	if waits {
		o.waiting.Set(1)
	} else {
		o.waiting.Set(0)
	}
}

// Failed counts a failed attempt.
func (o *Outbox) Failed(bool) { o.failed.Inc() }

// Backlog sets the number of pending and parked records, and the age of the oldest pending record.
func (o *Outbox) Backlog(pending, parked int, oldest time.Duration) {
	o.Records(pending, parked)
	o.oldest.Set(oldest.Seconds())
}

// Records sets the number of pending and parked records.
func (o *Outbox) Records(pending, parked int) {
	o.pending.Set(float64(pending))
	o.parked.Set(float64(parked))
}

// ClockSkew sets how far the NATS clock is ahead of the clock of the outbox.
func (o *Outbox) ClockSkew(ahead time.Duration) { o.skew.Set(ahead.Seconds()) }
