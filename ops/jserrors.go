package ops

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/jetstream"
)

// jetstreamCodes lists the errors of JetStream that have a label of their own: those that a hub
// meets in normal work, and those that tell an operator what is wrong. All others share OtherLabel.
var jetstreamCodes = []int{
	10002, // resource limits exceeded for account
	10008, // JetStream temporarily unavailable
	10009, // not the leader
	10013, // consumer name already in use
	10014, // consumer not found
	10023, // insufficient resources
	10026, // maximum consumers limit reached
	10027, // maximum number of streams reached
	10028, // insufficient memory
	10037, // no message found
	10039, // JetStream not enabled for account
	10043, // sequence not found
	10047, // insufficient storage
	10052, // invalid stream configuration
	10054, // message too large
	10057, // deletion of a message failed
	10058, // stream name in use with another configuration
	10059, // stream not found
	10065, // subjects overlap with another stream
	10071, // wrong last sequence
	10074, // replicas need a cluster
	10076, // JetStream not enabled
	10077, // the stream stored nothing: it is full, or its disk fails
	10104, // store of a consumer failed
	10118, // stream is offline
	10119, // consumer is offline
	10148, // consumer already exists
	10149, // consumer does not exist
	10164, // wrong last sequence
	10167, // too many requests
}

// jetstreamErrors counts errors of JetStream. Its series exist from the start.
type jetstreamErrors struct {
	known map[int]prometheus.Counter
	other prometheus.Counter
}

func newJetStreamErrors(reg prometheus.Registerer) jetstreamErrors {
	v := newCounter(reg, "eventhub_jetstream_errors_total")
	e := jetstreamErrors{
		known: map[int]prometheus.Counter{
			jetstream.NoResponders: v.WithLabelValues("no_responders"),
			jetstream.NoReply:      v.WithLabelValues("no_reply"),
		},
		other: v.WithLabelValues(OtherLabel),
	}
	for _, code := range jetstreamCodes {
		e.known[code] = v.WithLabelValues(strconv.Itoa(code))
	}
	return e
}

func (e jetstreamErrors) count(code int) {
	if c, ok := e.known[code]; ok {
		c.Inc()
		return
	}
	e.other.Inc()
}
