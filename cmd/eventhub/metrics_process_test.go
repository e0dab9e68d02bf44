//go:build unix

package main

import (
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"eventhub/facade"
	"eventhub/sdk/go/wire"
)

// metricsOf reads the metrics of a hub: the value of each series, by its text.
func metricsOf(t *testing.T, n *node) map[string]float64 {
	t.Helper()
	status, body := get(t, n.ops+"/metrics")
	if status != http.StatusOK {
		t.Fatalf("/metrics answered %d: %s", status, body)
	}
	all := make(map[string]float64)
	for line := range strings.Lines(body) {
		series, number, found := strings.Cut(strings.TrimSpace(line), "} ")
		if found {
			series += "}"
		} else if series, number, found = strings.Cut(strings.TrimSpace(line), " "); !found {
			continue
		}
		if strings.HasPrefix(line, "#") {
			continue
		}
		value, err := strconv.ParseFloat(number, 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all[series] = value
	}
	return all
}

// wantSeries waits until each of the series has a value.
func wantSeries(t *testing.T, hub *node, value float64, series ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("each of these is there, and %v: %q", value, series), func() bool {
		have := metricsOf(t, hub)
		series = slices.DeleteFunc(series, func(s string) bool {
			got, ok := have[s]
			return ok && got == value
		})
		return len(series) == 0
	})
}

// seriesOf returns the series that carry the topic orders, and a group unless it is "", at their
// first use.
func seriesOf(group string) (series []string) {
	pair := fmt.Sprintf("{group=%q,topic=%q}", group, "orders")
	if group == "" {
		pair = `{topic="orders"}`
		return []string{"events_published_total" + pair, "eventhub_publish_failures_total" + pair, "eventhub_leases_returned_total" + pair, "eventhub_leases_dropped_total" + pair, "eventhub_publish_duration_seconds_count" + pair}
	}
	for _, name := range []string{
		"events_delivered_total", "events_acked_total", "events_nacked_total", "events_dead_lettered_total", "events_inflight", "ws_inflight",
		"delivery_latency_ms_count", "delivery_handler_duration_ms_count", "eventhub_redeliveries_total", "eventhub_events_lost_total",
		"eventhub_group_resets_total", "eventhub_leases_expired_total", "eventhub_group_pending", "eventhub_group_unacked", "eventhub_group_oldest_unacked_seconds",
	} {
		series = append(series, name+pair)
	}
	return series
}

// Series exist before there is anything to count: from the start of the hub, or from the moment
// that their topic or group exists, also after a restart of the hub.
func TestSeriesExistBeforeTheirFirstEvent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	hub := startNode(t, "--data="+dir)
	var codes []string
	for _, code := range append([]string{"other"}, facade.ErrorCodes()...) {
		codes = append(codes, fmt.Sprintf("eventhub_errors_total{code=%q}", code))
	}
	for _, code := range facade.CloseCodes() {
		codes = append(codes, fmt.Sprintf(`eventhub_connections_closed_total{code="%d"}`, code))
	}
	wantSeries(t, hub, 0, codes...)
	wantSeries(t, hub, 1, "eventhub_ready", "eventhub_nats_connected")
	wantSeries(t, hub, 0,
		"eventhub_outbound_queue_bytes", "eventhub_outbound_queue_frames", "eventhub_outbound_queue_max_bytes", "eventhub_jwks_age_seconds",
		"eventhub_connections", "eventhub_delayed", "eventhub_streams_failed", "eventhub_events_read_total",
		`eventhub_jetstream_errors_total{code="10008"}`, `eventhub_jetstream_errors_total{code="other"}`,
		`eventhub_http_requests_total{status="200"}`, `eventhub_http_requests_total{status="429"}`, `eventhub_limit_reached_total{limit="frame_rate"}`,
		`eventhub_frames_total{op="other"}`, `eventhub_outbox_pending{outbox="http"}`, `eventhub_storage_used_bytes{storage="memory"}`,
	)
	eventually(t, "the disk has room", func() bool {
		have := metricsOf(t, hub)
		_, ok := have[`eventhub_storage_used_bytes{storage="file"}`]
		return ok && have[`eventhub_storage_left_bytes{storage="file"}`] > 1<<20
	})

	c := hub.dial()
	if _, err := c.Publish(t.Context(), "orders", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	wantSeries(t, hub, 1, `events_published_total{topic="orders"}`)
	wantSeries(t, hub, 0, seriesOf("")[1:4]...)
	if _, err := c.Subscribe(t.Context(), "orders", "billing", wire.SubscribeOptions{}, func(wire.Event) {}); err != nil {
		t.Fatal(err)
	}
	wantSeries(t, hub, 0, seriesOf("billing")...)

	hub.terminate()
	hub = startNode(t, "--data="+dir)
	wantSeries(t, hub, 0, append(seriesOf(""), seriesOf("billing")...)...)
}

// A hub counts everything together if it shall have no series of topics and groups.
func TestSeriesOfNoGroup(t *testing.T) {
	t.Parallel()
	hub := startNode(t, "--metrics-groups=none")
	c := hub.dial()
	if _, err := c.Publish(t.Context(), "orders", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Subscribe(t.Context(), "orders", "billing", wire.SubscribeOptions{From: "earliest"}, func(wire.Event) {}); err != nil {
		t.Fatal(err)
	}
	wantSeries(t, hub, 1, `events_published_total{topic="other"}`, `events_inflight{group="other",topic="other"}`, `eventhub_group_unacked{group="other",topic="other"}`)
	for series := range metricsOf(t, hub) {
		if strings.Contains(series, "orders") || strings.Contains(series, "billing") {
			t.Errorf("there is %s", series)
		}
	}
}

// What clients are refused is counted by its code, over WebSocket and over HTTP.
func TestRefusalsAreCountedByCode(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	c := hub.dial()
	ask := func(path, token string) { request(t, http.MethodGet, hub.http+path, token) }
	if _, err := c.Publish(t.Context(), "no topic", []byte("1"), wire.PublishOptions{}); err == nil {
		t.Fatal("a bad topic was taken")
	}
	ask("/replay?topic=no%20topic", nodeToken)
	ask("/replay?topic=t", "wrong")
	ask("/nowhere", nodeToken)
	for code, want := range map[string]float64{"bad_topic": 2, "bad_token": 1, "not_found": 1, "forbidden": 0, "other": 0} {
		wantSeries(t, hub, want, fmt.Sprintf("eventhub_errors_total{code=%q}", code))
	}
	wantSeries(t, hub, 1, `eventhub_http_requests_total{status="400"}`, `eventhub_http_requests_total{status="401"}`, `eventhub_http_requests_total{status="404"}`)
	known := regexp.MustCompile(`^eventhub_errors_total\{code="(\w+)"\}$`)
	for series := range metricsOf(t, hub) {
		if m := known.FindStringSubmatch(series); m != nil && m[1] != "other" && !slices.Contains(facade.ErrorCodes(), m[1]) {
			t.Errorf("%s is no code of the protocol", series)
		}
	}
}
