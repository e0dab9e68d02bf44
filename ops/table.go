package ops

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// kind is a Prometheus metric type.
type kind string

const (
	counter   kind = "counter"
	gauge     kind = "gauge"
	histogram kind = "histogram"
)

// definition is one row of the table of metrics.
type definition struct {
	name   string
	kind   kind
	help   string
	labels []string
}

var (
	topicLabels = []string{"topic"}
	pairLabels  = []string{"topic", "group"}
	boxLabels   = []string{"outbox"}
	// streamLabels are those of streams: on_full is drop or reject.
	streamLabels = []string{"stream", "on_full"}
)

// definitions lists every metric of eventhub, sorted by name. METRICS.md shows the same table; a
// test compares both with the output of /metrics. The names without the prefix eventhub_ were in
// use by existing clients of the bus. All others are in the base units of Prometheus.
var definitions = []definition{
	{"delivery_handler_duration_ms", histogram, "How long a subscriber had an event, in milliseconds, until its lease ended.", pairLabels},
	{"delivery_latency_ms", histogram, "Time from the storage of an event to its acknowledgement, in milliseconds.", pairLabels},
	{"eventhub_broadcast_caught_up_total", counter, "Events that broadcasts have read from the store, for a snapshot or to catch up.", nil},
	{"eventhub_broadcast_gaps_total", counter, "GAP frames: a broadcast left events out.", nil},
	{"eventhub_broadcast_missed_total", counter, "Events that broadcasts have left out; a topic that shares its stream counts none.", nil},
	{"eventhub_broadcast_ring_bytes", gauge, "Memory of the events that are kept for broadcasts, in bytes.", nil},
	{"eventhub_broadcast_sockets", gauge, "Broadcasts of all connections that get events as they come.", nil},
	{"eventhub_broadcast_topics", gauge, "Topics that are broadcast.", nil},
	{"eventhub_buckets_broken", gauge, "Buckets of compacted topics known to this hub that are not as they should be.", nil},
	{"eventhub_build_info", gauge, "Always 1; the labels say what runs.", []string{"version", "go_version"}},
	{"eventhub_connections", gauge, "WebSocket connections that are open.", nil},
	{"eventhub_connections_closed_total", counter, "WebSocket connections that ended, by close code.", []string{"code"}},
	{"eventhub_delayed", gauge, "Delayed events that wait, of all hubs together; updated every 10 s.", nil},
	{"eventhub_errors_total", counter, "ERR frames and HTTP errors sent, by code.", []string{"code"}},
	{"eventhub_events_lost_total", counter, "Events that were removed from a topic before the group was given them. Of all hubs, one counts each event.", pairLabels},
	{"eventhub_events_read_total", counter, "Events that replays and exports have read.", nil},
	{"eventhub_frames_total", counter, "Frames received over WebSockets, by op.", []string{"op"}},
	{"eventhub_group_oldest_unacked_seconds", gauge, "How long ago the oldest event of a group was stored that is not settled, in seconds; 0 without one. Every hub reports all groups.", pairLabels},
	{"eventhub_group_pending", gauge, "Events that a group was not given yet. Every hub reports all groups.", pairLabels},
	{"eventhub_group_resets_total", counter, "Groups that had to start anew and may have missed events.", pairLabels},
	{"eventhub_group_stuck", gauge, "1 while events and requests of members of this hub wait, and NATS delivers nothing to the group; else 0. Every hub reports all groups, and knows of its own members only.", pairLabels},
	{"eventhub_group_unacked", gauge, "Events that members of a group have, or that are in back-off. Every hub reports all groups.", pairLabels},
	{"eventhub_groups_ignored_total", counter, "Groups that had no member for too long and hold the events of a topic with on_full: reject no more. Each hub counts for itself.", topicLabels},
	{"eventhub_http_consumers", gauge, "Consumers over HTTP: open streams, and pulls that wait or have unsettled events.", []string{"kind"}},
	{"eventhub_http_requests_total", counter, "HTTP requests answered, by status.", []string{"status"}},
	{"eventhub_http_settlements_total", counter, "Events that clients settled over HTTP by their handles, by what they asked for (ack, nack, modack) and result: settled, over (the lease had ended), or silent (the hub that holds the lease did not answer).", []string{"op", "result"}},
	{"eventhub_jetstream_errors_total", counter, "Requests to JetStream, and publishes, that failed, by JetStream's number of the error; also no_responders and no_reply. Many are part of normal work, such as 10059, stream not found.", []string{"code"}},
	{"eventhub_jwks_age_seconds", gauge, "Time since the keys were last fetched from JWT_JWKS_URL, in seconds, or since the start if they never were; 0 without that setting.", nil},
	{"eventhub_keys_removed", gauge, "Removed keys of compacted topics known to this hub. NATS keeps a record of each.", nil},
	{"eventhub_leases_dropped_total", counter, "Leases that the hub gave up because it had lost its right to them: cut off, stopped, or after a seek.", topicLabels},
	{"eventhub_leases_expired_total", counter, "Leases that ran out.", pairLabels},
	{"eventhub_leases_returned_total", counter, "Leases given back by UNSUBSCRIBE, a drain or a lost connection.", topicLabels},
	{"eventhub_limit_reached_total", counter, "Refusals and waits because of a limit, by its name.", []string{"limit"}},
	{"eventhub_native_clients_total", counter, "Native NATS clients that showed a token, by outcome: allowed, refused, failed (NATS asked wrongly or did not answer), and kicked (disconnected because the token was revoked, or the principal has too many connections).", []string{"outcome"}},
	{"eventhub_native_narrowed_total", counter, "Native NATS clients that may do less than their tokens allow, because NATS cannot express the policy.", nil},
	{"eventhub_nats_connected", gauge, "1 while every NATS connection is up, else 0.", nil},
	{"eventhub_outbound_queue_bytes", gauge, "Bytes that wait to be sent to members of groups, over all WebSocket connections, streams and pulls. Each waiting event counts 512 bytes besides its payload.", nil},
	{"eventhub_outbound_queue_frames", gauge, "Frames and events that wait to be sent to members of groups, over all WebSocket connections, streams and pulls.", nil},
	{"eventhub_outbound_queue_max_bytes", gauge, "Bytes that wait for the connection, stream or pull for which most wait.", nil},
	{"eventhub_outbox_claim_duration_seconds", histogram, "How long a claim of records of an outbox took that found some, in seconds.", boxLabels},
	{"eventhub_outbox_claim_failures_total", counter, "Claims of records of an outbox that failed, and lanes (a topic and key) that a claim had to leave out because only theirs failed.", boxLabels},
	{"eventhub_outbox_clock_skew_seconds", gauge, "How far the clock of NATS is ahead of that of an outbox's database, in seconds; negative when it is behind.", boxLabels},
	{"eventhub_outbox_failures_total", counter, "Tries to publish a record of an outbox that failed.", boxLabels},
	{"eventhub_outbox_found_total", counter, "Records of an outbox that were found in their stream, where an earlier try had put them.", boxLabels},
	{"eventhub_outbox_latency_seconds", histogram, "Time from when a record was added to an outbox until it was known to be in its stream, in seconds.", boxLabels},
	{"eventhub_outbox_oldest_age_seconds", gauge, "How long ago the oldest record was added that waits in an outbox, in seconds; 0 when none does.", boxLabels},
	{"eventhub_outbox_parked", gauge, "Records of an outbox that were given up: eventhub outbox list --status=error shows them.", boxLabels},
	{"eventhub_outbox_pending", gauge, "Records of an outbox that wait, or are being published.", boxLabels},
	{"eventhub_outbox_published_total", counter, "Records of an outbox that are in their stream.", boxLabels},
	{"eventhub_outbox_settle_failures_total", counter, "Publish results of an outbox that failed to be saved, and lanes (a topic and key) whose results the database refused. The outbox tries again.", boxLabels},
	{"eventhub_outbox_waiting", gauge, "1 while the database of an outbox cannot be used, so that its records wait, else 0.", boxLabels},
	{"eventhub_panics_total", counter, "Panics that this process has survived, in requests, frames, questions over NATS, and functions of its users; the log has the stack of each.", nil},
	{"eventhub_projected_total", counter, "Events that projections dealt with, by what became of them: applied, known, poisoned, or dropped because the topic of the states takes no more keys.", []string{"projection", "outcome"}},
	{"eventhub_projection_stalled_seconds", gauge, "How long a projection of the hub itself has had events to project and has settled none, in seconds; 0 while it makes progress, and in the first 30 s.", []string{"projection"}},
	{"eventhub_publish_duration_seconds", histogram, "Time from the sending of a publish to the stream's confirmation, in seconds.", topicLabels},
	{"eventhub_publish_failures_total", counter, "Publishes answered with an error.", topicLabels},
	{"eventhub_ready", gauge, "1 while the hub is ready, as /readyz says, else 0.", nil},
	{"eventhub_redeliveries_total", counter, "Events handed to a subscriber that the group had been given before.", pairLabels},
	{"eventhub_revocations", gauge, "Revocations of tokens that this hub observes.", nil},
	{"eventhub_schema_unversioned_total", counter, "Events that came to a group for the first time without a version, although the rule of their topic asks for schemas: native publishers stored them, or they are older than the rule, or they broke the schema.", []string{"topic"}},
	{"eventhub_schema_violations_total", counter, "Events published through this hub that broke the schema of their topic, by what was done: refused, or stored.", []string{"topic", "action"}},
	{"eventhub_server_restarts_total", counter, "Restarts of the embedded NATS server by the hub, because streams could not be written and the disk had room again.", nil},
	{"eventhub_snapshots_total", counter, "Keys that compactors wrote a snapshot of, by the topic they were taken from.", topicLabels},
	{"eventhub_spans_dropped_total", counter, "Spans that the collector did not get, by reason: open_spans and queue (limits of the hub), export (a batch could not be sent), rejected (by the collector).", []string{"reason"}},
	{"eventhub_spans_exported_total", counter, "Spans that the collector has taken.", nil},
	{"eventhub_storage_left_bytes", gauge, "Bytes that NATS may still store in files and in memory: up to the bound of its account, and up to the end of the disk for the embedded server; +Inf where no bound is known. Absent while NATS does not answer.", []string{"storage"}},
	{"eventhub_storage_low", gauge, "1 while clients store nothing, because NATS has no room for more in files or in memory than what the hub keeps for itself, else 0. Absent while NATS does not answer.", []string{"storage"}},
	{"eventhub_storage_used_bytes", gauge, "Bytes that NATS stores in files and in memory, those of other programs of its account included. Absent while NATS does not answer.", []string{"storage"}},
	{"eventhub_stream_bytes", gauge, "Bytes in a stream that has a bound in bytes, and what happens at the bound. Every hub reports all streams.", streamLabels},
	{"eventhub_stream_left_bytes", gauge, "Bytes that a stream with a bound in bytes may still store. Every hub reports all streams.", streamLabels},
	{"eventhub_streams_closed_total", counter, "Streams of server-sent events that ended, by the close code that a WebSocket would have; 1006 when the client has gone.", []string{"code"}},
	{"eventhub_streams_failed", gauge, "Streams of the embedded NATS server that cannot be written since a write to the disk has failed; 1 also when the server stores nothing any more.", nil},
	{"eventhub_subscriptions", gauge, "Subscriptions open on this hub.", nil},
	{"eventhub_topics", gauge, "Topics that this hub knows.", nil},
	{"events_acked_total", counter, "Events acknowledged by a subscriber.", pairLabels},
	{"events_dead_lettered_total", counter, "Events whose last attempt failed and that went to their dlq topic; delayed events that their topic refused count for the group eventhub-delayed.", pairLabels},
	{"events_delivered_total", counter, "Events handed to a subscriber, each attempt counted.", pairLabels},
	{"events_inflight", gauge, "Leases held through this hub: delivered and not yet settled.", pairLabels},
	{"events_nacked_total", counter, "Events refused by a subscriber; they come again after a back-off.", pairLabels},
	{"events_published_total", counter, "Events that their stream has stored.", topicLabels},
	{"subscribe_poll_duration_ms", histogram, "How long a pull waited for its first event, in milliseconds.", pairLabels},
	{"ws_inflight", gauge, "The same as events_inflight, under the name that dashboards of the WebSocket side use.", pairLabels},
}

// buckets are the upper bounds of histograms in seconds. They range from a local acknowledgement to
// a full lease.
var buckets = []float64{0.00025, 0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 30}

// groupBuckets are those of histograms with a label for the group, in milliseconds. There may be
// thousands of groups, and each bucket is a series of each group.
var groupBuckets = []float64{5, 100, 2500, 30000}

func define(name string, k kind) definition {
	for _, d := range definitions {
		if d.name == name && d.kind == k {
			return d
		}
	}
	panic("ops: no " + string(k) + " " + name + " in the table of metrics")
}

func newCounter(reg prometheus.Registerer, name string) *prometheus.CounterVec {
	d := define(name, counter)
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: d.name, Help: d.help}, d.labels)
	reg.MustRegister(v)
	return v
}

func newGauge(reg prometheus.Registerer, name string) *prometheus.GaugeVec {
	d := define(name, gauge)
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: d.name, Help: d.help}, d.labels)
	reg.MustRegister(v)
	return v
}

func newHistogram(reg prometheus.Registerer, name string) *prometheus.HistogramVec {
	d := define(name, histogram)
	bounds := buckets
	if slices.Contains(d.labels, "group") {
		bounds = groupBuckets
	}
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: d.name, Help: d.help, Buckets: bounds}, d.labels)
	reg.MustRegister(v)
	return v
}

// row returns the definition as a table row of METRICS.md.
func (d definition) row() string {
	labels := "none"
	if len(d.labels) > 0 {
		labels = "`" + strings.Join(d.labels, "`, `") + "`"
	}
	return "| `" + d.name + "` | " + string(d.kind) + " | " + labels + " | " + d.help + " |"
}
