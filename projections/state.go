package projections

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
)

// TopicProcessState is where the state of each process is published, keyed by ProcessState.ProcessID.
const TopicProcessState = "process.state"

// Status says whether a process is heard of.
type Status string

// The states of a process.
const (
	Alive Status = "alive"
	Stale Status = "stale" // no heartbeat for ProcessConfig.StaleAfter
)

// ProcessState is the payload of an event on TopicProcessState.
type ProcessState struct {
	// ProcessID is host:name:pid.
	ProcessID string  `json:"processId"`
	Name      string  `json:"name"`
	Host      string  `json:"host"`
	PID       int64   `json:"pid"`
	SID       string  `json:"sid,omitempty"`
	CPUPct    float64 `json:"cpu_pct"`
	MemMB     float64 `json:"mem_mb"`
	// LastSeenTS is the ts of the newest heartbeat, in epoch milliseconds.
	LastSeenTS int64  `json:"last_seen_ts"`
	Status     Status `json:"status"`
}

// headerSource names the heartbeat that a state was made from, as <stream>@<sequence>. It is what tells a heartbeat
// that was projected before from one that was not, for however long ago.
const headerSource = "projection-source"

// remadeAfter is how much later than a state a heartbeat must be stored for it to count as newer although its sequence
// is lower. That happens when an operator deletes the heartbeats' stream, and its sequences start again. The margin is
// for the clocks of the servers that lead the two streams.
const remadeAfter = time.Minute

// source says where a heartbeat lies.
type source struct {
	stream   string
	sequence uint64
}

func (s source) String() string { return s.stream + "@" + strconv.FormatUint(s.sequence, 10) }

func parseSource(text string) source {
	i := strings.LastIndexByte(text, '@')
	if i < 0 {
		return source{}
	}
	n, err := strconv.ParseUint(text[i+1:], 10, 64)
	if err != nil {
		return source{}
	}
	return source{text[:i], n}
}

// record is the newest state of one process, as far as it is known here.
type record struct {
	state ProcessState
	from  source
	// sequence is where the state lies in its stream; 0 when there is none. The next state replaces just this one.
	sequence uint64
	// storedAt is when the state was stored, in epoch nanoseconds.
	storedAt int64
}

// readRecord makes the record of a stored state. What is no state (anyone may publish to the topic) is replaced by the
// next heartbeat and never turns stale.
func readRecord(e *jetstream.Event) record {
	r := record{from: parseSource(e.Headers[headerSource]), sequence: e.Sequence, storedAt: e.StoredAt}
	if err := json.Unmarshal(e.Payload, &r.state); err != nil || r.state.ProcessID != e.Key {
		r.state = ProcessState{}
	}
	return r
}

// covers reports whether the heartbeat was projected: the state was made from it or from a later one. That is enough
// because heartbeats are projected in the order of their stream.
func (r record) covers(heartbeat *jetstream.Event) bool {
	return r.from.stream == heartbeat.Stream && r.from.sequence >= heartbeat.Sequence &&
		heartbeat.StoredAt <= r.storedAt+int64(remadeAfter)
}
