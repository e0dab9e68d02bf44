package ops

import (
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

// traffic holds the metrics of client traffic, which the facade reports.
type traffic struct {
	connections prometheus.Gauge
	closed      *prometheus.CounterVec
	frames      map[string]prometheus.Counter
	unknown     prometheus.Counter
	codes       map[string]struct{} // the error codes that have a label of their own
	errors      *prometheus.CounterVec
	requests    *prometheus.CounterVec
	read        prometheus.Counter
	consumers   *prometheus.GaugeVec
	streams     *prometheus.CounterVec
	settled     *prometheus.CounterVec
}

// ops lists the ops of the protocol. Each op has a series from the start.
var ops = []string{"AUTH", "PUBLISH", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "MODACK", "PAUSE", "RESUME"}

func newTraffic(reg prometheus.Registerer) traffic {
	frames := newCounter(reg, "eventhub_frames_total")
	t := traffic{
		connections: newGauge(reg, "eventhub_connections").WithLabelValues(),
		closed:      newCounter(reg, "eventhub_connections_closed_total"),
		frames:      make(map[string]prometheus.Counter, len(ops)),
		unknown:     frames.WithLabelValues(OtherLabel),
		errors:      newCounter(reg, "eventhub_errors_total"),
		requests:    newCounter(reg, "eventhub_http_requests_total"),
		read:        newCounter(reg, "eventhub_events_read_total").WithLabelValues(),
		consumers:   newGauge(reg, "eventhub_http_consumers"),
		streams:     newCounter(reg, "eventhub_streams_closed_total"),
		settled:     newCounter(reg, "eventhub_http_settlements_total"),
	}
	for _, kind := range []string{"stream", "pull"} {
		t.consumers.WithLabelValues(kind)
	}
	for _, op := range []string{"ack", "nack", "modack"} {
		for _, result := range []string{"settled", "over", "silent"} {
			t.settled.WithLabelValues(op, result)
		}
	}
	for _, op := range ops {
		t.frames[op] = frames.WithLabelValues(op)
	}
	return t
}

// Codes makes the series of all error codes of the protocol, of their HTTP statuses, and of the
// codes with which the hub closes a WebSocket, before any of them is counted. Call it before the
// hub serves. From then on, other error codes share OtherLabel.
func (t *traffic) Codes(codes []string, status func(code string) int, closings []int) {
	t.codes = make(map[string]struct{}, len(codes))
	for _, code := range append([]string{OtherLabel}, codes...) {
		t.codes[code] = struct{}{}
		t.errors.WithLabelValues(code)
	}
	statuses := []int{http.StatusOK, http.StatusNoContent, http.StatusNotModified}
	for _, code := range codes {
		statuses = append(statuses, status(code))
	}
	for _, status := range statuses {
		t.requests.WithLabelValues(strconv.Itoa(status))
	}
	t.closed.WithLabelValues(OtherLabel)
	for _, code := range append([]int{1000, 1001, 1006}, closings...) {
		t.closed.WithLabelValues(strconv.Itoa(code))
		t.streams.WithLabelValues(strconv.Itoa(code))
	}
}

// ConnectionOpened counts an accepted WebSocket connection.
func (t *traffic) ConnectionOpened() { t.connections.Inc() }

// ConnectionClosed counts the end of a connection. Clients may choose any close code, so codes
// other than those of the standard and of the hub share OtherLabel.
func (t *traffic) ConnectionClosed(closeCode int) {
	t.connections.Dec()
	label := OtherLabel
	if closeCode >= 1000 && closeCode < 1016 || closeCode >= 4000 && closeCode < 4200 {
		label = strconv.Itoa(closeCode)
	}
	t.closed.WithLabelValues(label).Inc()
}

// FrameReceived counts a frame from a client. Unknown ops share OtherLabel.
func (t *traffic) FrameReceived(op string) {
	if c, ok := t.frames[op]; ok {
		c.Inc()
		return
	}
	t.unknown.Inc()
}

// ErrorSent counts an ERR frame or an HTTP error. code is an error code of the protocol.
func (t *traffic) ErrorSent(code string) {
	if _, known := t.codes[code]; !known && t.codes != nil {
		code = OtherLabel
	}
	t.errors.WithLabelValues(code).Inc()
}

// RequestServed counts an HTTP request by its status.
func (t *traffic) RequestServed(status int) { t.requests.WithLabelValues(strconv.Itoa(status)).Inc() }

// EventsRead counts events that replays and exports have read.
func (t *traffic) EventsRead(n int) { t.read.Add(float64(n)) }

// Consumers adds delta to the number of consumers over HTTP of a kind.
func (t *traffic) Consumers(kind string, delta int) {
	t.consumers.WithLabelValues(kind).Add(float64(delta))
}

// StreamClosed counts the end of a stream of server-sent events. The hub alone chooses the code.
func (t *traffic) StreamClosed(closeCode int) {
	t.streams.WithLabelValues(strconv.Itoa(closeCode)).Inc()
}

// Settled counts events that clients settled over HTTP.
func (t *traffic) Settled(op, result string, n int) {
	t.settled.WithLabelValues(op, result).Add(float64(n))
}
