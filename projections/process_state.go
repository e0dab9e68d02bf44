package projections

import "encoding/json"

// TopicProcessState is the topic with the state of each process, keyed by ProcessState.ProcessID.
const TopicProcessState = "process.state"

// TopicProcessStateSnapshot is the topic with the snapshots of TopicProcessState.
const TopicProcessStateSnapshot = "process.state.snapshot"

// Status tells whether a process sends heartbeats.
type Status string

// Statuses of a process.
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

// readProcessState decodes a stored state. Any client may publish to the topic, so an invalid state
// reads as the zero ProcessState, which the next heartbeat replaces and which never becomes stale.
func readProcessState(key string, value []byte) ProcessState {
	var s ProcessState
	if json.Unmarshal(value, &s) != nil || s.ProcessID != key {
		return ProcessState{}
	}
	return s
}
