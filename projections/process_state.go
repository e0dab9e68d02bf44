package projections

import "encoding/json"

// TopicProcessState is where the state of each process is published, keyed by ProcessState.ProcessID.
const TopicProcessState = "process.state"

// TopicProcessStateSnapshot is where the snapshots of TopicProcessState go.
const TopicProcessStateSnapshot = "process.state.snapshot"

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

// readProcessState reads a stored state. What is none (anyone may publish to the topic) is the zero ProcessState: it is
// replaced by the next heartbeat and never turns stale.
func readProcessState(key string, value []byte) ProcessState {
	var s ProcessState
	if json.Unmarshal(value, &s) != nil || s.ProcessID != key {
		return ProcessState{}
	}
	return s
}
