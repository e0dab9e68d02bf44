package ops

import (
	"cmp"
	"context"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
)

const (
	// storageTimeout is the timeout of asking NATS what it stores.
	storageTimeout = 5 * time.Second
	// streamsKept is how long the storage of all streams is kept for further scrapes.
	streamsKept = 10 * time.Second
)

// Outbound is what waits to be sent to WebSocket clients: bytes and frames of all connections, and
// the bytes of the connection for which most wait.
type Outbound struct{ Bytes, Frames, MaxBytes int }

// Broadcasts is the state of the broadcasts of a hub: topics, sockets and the bytes of their rings
// now, and so far the gaps, the events left out, and those read from the store.
type Broadcasts struct {
	Topics, Sockets, RingBytes int
	Gaps, Missed, CaughtUp     uint64
}

// gather collects all metrics. It first makes the series of topics and groups that exist and that
// this hub has not used yet, and ends those of what is gone.
func (s *Server) gather() ([]*dto.MetricFamily, error) {
	var lags []jetstream.Lag
	var streams []jetstream.StreamStorage
	var wg sync.WaitGroup
	if s.lags != nil {
		wg.Go(func() { lags = s.lags.all(0) })
	}
	if s.storage != nil {
		wg.Go(func() { streams = s.storage.all() })
	}
	wg.Wait()
	if m := s.cfg.Observed; m != nil {
		var topics []string
		for _, stream := range streams {
			if stream.Topic != "" {
				topics = append(topics, stream.Topic)
			}
		}
		m.exist(topics, lags)
		s.sweep(m, lags)
	}
	return prometheus.Gatherers{s.cfg.Registry, s.asked}.Gather()
}

// sweep ends the series of what is gone, once in goneAfter. What NATS does not say for certain is
// not gone.
func (s *Server) sweep(m *Metrics, lags []jetstream.Lag) {
	if s.cfg.NATS == nil || time.Since(s.swept) < goneAfter {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	missing, err := s.cfg.NATS.Gone(ctx, m.known())
	if err != nil {
		s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to look for topics that are gone; keeping their metrics", slog.Any("error", err))
		return
	}
	s.swept = time.Now()
	gone := make(map[string]bool, len(missing))
	for _, topic := range missing {
		gone[topic] = true
	}
	listed := make(map[pair]bool, len(lags))
	for _, lag := range lags {
		delete(gone, lag.Topic)
		listed[pair{lag.Topic, lag.Group}] = true
	}
	all := s.lags != nil && s.lags.complete
	m.sweep(gone, func(p pair) bool { return !all || listed[p] })
}

// desc returns the description of a gauge of the table.
func desc(name string) *prometheus.Desc { return descOf(name, gauge) }

func descOf(name string, k kind) *prometheus.Desc {
	d := define(name, k)
	return prometheus.NewDesc(d.name, d.help, d.labels, nil)
}

// collected is a Prometheus collector made of two functions.
type collected struct {
	descs   []*prometheus.Desc
	collect func(set func(d *prometheus.Desc, value float64, labels ...string))
}

// Describe implements prometheus.Collector.
func (c collected) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range c.descs {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (c collected) Collect(metrics chan<- prometheus.Metric) {
	c.collect(func(d *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	})
}

// registerStates adds the metrics of states that are asked for at each scrape.
func (s *Server) registerStates() {
	reg := s.cfg.Registry
	ready := desc("eventhub_ready")
	reg.MustRegister(collected{[]*prometheus.Desc{ready}, func(set func(*prometheus.Desc, float64, ...string)) {
		value := 1.0
		if _, cause := s.health(context.Background()); cause != nil {
			value = 0
		}
		set(ready, value)
	}})
	if s.cfg.KeysAge != nil {
		age := desc("eventhub_jwks_age_seconds")
		reg.MustRegister(collected{[]*prometheus.Desc{age}, func(set func(*prometheus.Desc, float64, ...string)) {
			set(age, s.cfg.KeysAge().Seconds())
		}})
	}
	if s.cfg.Outbound != nil {
		size, frames, most := desc("eventhub_outbound_queue_bytes"), desc("eventhub_outbound_queue_frames"), desc("eventhub_outbound_queue_max_bytes")
		reg.MustRegister(collected{[]*prometheus.Desc{size, frames, most}, func(set func(*prometheus.Desc, float64, ...string)) {
			waiting := s.cfg.Outbound()
			set(size, float64(waiting.Bytes))
			set(frames, float64(waiting.Frames))
			set(most, float64(waiting.MaxBytes))
		}})
	}
	if s.cfg.Broadcasts != nil {
		reg.MustRegister(newBroadcastStates(s.cfg.Broadcasts))
	}
}

// broadcastStates collects the metrics of broadcasts.
type broadcastStates struct {
	ask                                            func() Broadcasts
	topics, sockets, bytes, gaps, missed, caughtUp *prometheus.Desc
}

func newBroadcastStates(ask func() Broadcasts) broadcastStates {
	return broadcastStates{
		ask: ask, topics: desc("eventhub_broadcast_topics"), sockets: desc("eventhub_broadcast_sockets"), bytes: desc("eventhub_broadcast_ring_bytes"),
		gaps: descOf("eventhub_broadcast_gaps_total", counter), missed: descOf("eventhub_broadcast_missed_total", counter),
		caughtUp: descOf("eventhub_broadcast_caught_up_total", counter),
	}
}

// Describe implements prometheus.Collector.
func (b broadcastStates) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{b.topics, b.sockets, b.bytes, b.gaps, b.missed, b.caughtUp} {
		descs <- d
	}
}

// Collect implements prometheus.Collector.
func (b broadcastStates) Collect(metrics chan<- prometheus.Metric) {
	now := b.ask()
	for d, value := range map[*prometheus.Desc]int{b.topics: now.Topics, b.sockets: now.Sockets, b.bytes: now.RingBytes} {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(value))
	}
	for d, value := range map[*prometheus.Desc]uint64{b.gaps: now.Gaps, b.missed: now.Missed, b.caughtUp: now.CaughtUp} {
		metrics <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(value))
	}
}

// storage collects at each scrape what NATS stores, and what it may still store.
type storage struct {
	nats   NATS
	max    int // streams with series of their own
	logger *slog.Logger

	used, left, low, streamUsed, streamLeft *prometheus.Desc

	mu   sync.Mutex
	read time.Time
	last []jetstream.StreamStorage
}

// newStorage adds the metrics of storage to a registry.
func newStorage(reg prometheus.Registerer, nats NATS, series Series, logger *slog.Logger) *storage {
	c := &storage{
		nats: nats, max: series.upTo(MaxTopics), logger: logger,
		used: desc("eventhub_storage_used_bytes"), left: desc("eventhub_storage_left_bytes"), low: desc("eventhub_storage_low"),
		streamUsed: desc("eventhub_stream_bytes"), streamLeft: desc("eventhub_stream_left_bytes"),
	}
	reg.MustRegister(collected{[]*prometheus.Desc{c.used, c.left, c.low, c.streamUsed, c.streamLeft}, c.collect})
	return c
}

// collect implements collected.
func (c *storage) collect(set func(d *prometheus.Desc, value float64, labels ...string)) {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	info, err := c.nats.Info(ctx)
	if err != nil {
		c.logger.LogAttrs(ctx, slog.LevelWarn, "failed to ask NATS for its storage; leaving it out of the metrics", slog.Any("error", err))
	} else {
		for _, of := range []struct {
			storage string
			used    uint64
			left    int64
			low     bool
		}{{"file", info.FileBytes, info.FileLeft, info.FileLow}, {"memory", info.MemoryBytes, info.MemoryLeft, info.MemoryLow}} {
			low := 0.0
			if of.low {
				low = 1
			}
			set(c.low, low, of.storage)
			left := math.Inf(1)
			if of.left >= 0 {
				left = float64(of.left)
			}
			set(c.used, float64(of.used), of.storage)
			set(c.left, left, of.storage)
		}
	}
	for _, s := range bounded(c.all(), c.max) {
		set(c.streamUsed, float64(s.Bytes), s.Stream, string(s.OnFull))
		set(c.streamLeft, float64(leftOf(s)), s.Stream, string(s.OnFull))
	}
}

func leftOf(s jetstream.StreamStorage) int64 {
	return max(s.MaxBytes-int64(min(s.Bytes, math.MaxInt64)), 0) //nolint:gosec // bounded
}

// bounded returns the streams that have a bound; of more than most, those with the smallest part
// left. One entry per OnFull stands for the rest, with the figures of the fullest.
func bounded(all []jetstream.StreamStorage, most int) []jetstream.StreamStorage {
	kept := slices.DeleteFunc(slices.Clone(all), func(s jetstream.StreamStorage) bool { return s.MaxBytes <= 0 })
	if len(kept) <= most {
		return kept
	}
	part := func(s jetstream.StreamStorage) float64 {
		if s.Stream == OtherLabel {
			return math.Inf(1) // the label is taken
		}
		return float64(leftOf(s)) / float64(s.MaxBytes)
	}
	slices.SortStableFunc(kept, func(a, b jetstream.StreamStorage) int { return cmp.Compare(part(a), part(b)) })
	rest := kept[most:]
	kept = kept[:most:most]
	for _, onFull := range []topics.OnFull{topics.OnFullDrop, topics.OnFullReject} {
		if i := slices.IndexFunc(rest, func(s jetstream.StreamStorage) bool { return s.OnFull == onFull }); i >= 0 {
			fullest := rest[i]
			fullest.Stream, fullest.Topic = OtherLabel, ""
			kept = append(kept, fullest)
		}
	}
	return kept
}

// all lists the streams, at most once in streamsKept.
func (c *storage) all() []jetstream.StreamStorage {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.read) < streamsKept {
		return c.last
	}
	ctx, cancel := context.WithTimeout(context.Background(), storageTimeout)
	defer cancel()
	found, err := c.nats.Streams(ctx)
	if err != nil {
		c.logger.LogAttrs(ctx, slog.LevelWarn, "failed to list the streams; leaving them out of the metrics", slog.Any("error", err))
		found = nil
	}
	c.last, c.read = found, time.Now()
	return found
}
