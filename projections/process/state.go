package process

import "encoding/json"

// TopicState is where the state of each process is published, keyed by State.ProcessID.
const TopicState = "process.state"

// TopicStateSnapshot is where the snapshots of TopicState go.
const TopicStateSnapshot = "process.state.snapshot"

// Status tells whether a process sends heartbeats.
type Status string

// Statuses of a process.
const (
	Alive Status = "alive"
	Stale Status = "stale" // no heartbeat for Config.StaleAfter
)

// State is the payload of an event on TopicState.
type State struct {
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

// readState reads a stored state. What is none (anyone may publish to the topic) is the zero State:
// it is replaced by the next heartbeat and never turns stale.
func readState(key string, value []byte) State {
	var s State
	if json.Unmarshal(value, &s) != nil || s.ProcessID != key {
		return State{}
	}
	return s
}
