package process

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"eventhub/jetstream"
)

// TopicHeartbeat is the topic on which processes report that they are alive.
const TopicHeartbeat = "heartbeat.received"

// Heartbeat is the payload of an event on TopicHeartbeat.
type Heartbeat struct {
	PID    int64   `json:"pid"`
	Name   string  `json:"name"`
	Host   string  `json:"host"`
	CPUPct float64 `json:"cpu_pct"`
	MemMB  float64 `json:"mem_mb"`
	// SID is the id of the process's boot or session. Optional.
	SID string `json:"sid,omitempty"`
}

// maxSID is the longest SID that a state may carry, in bytes: enough for any id, and far below the
// bus's payload limit. A heartbeat beyond it, or with a longer key than the bus takes, could never
// be projected.
const maxSID = 1_024

// maxPID is the largest range of integers that every JSON implementation represents exactly.
const maxPID = 1 << 53

// processID returns the key of the process: host:name:pid.
func (h Heartbeat) processID() string {
	return h.Host + ":" + h.Name + ":" + strconv.FormatInt(h.PID, 10)
}

// parseHeartbeat parses a payload. host, name, and pid are required. pid may be any JSON number
// with an integral value, such as 42 or 42.0.
func parseHeartbeat(payload []byte) (Heartbeat, error) {
	var in struct {
		Heartbeat
		PID *float64 `json:"pid"`
	}
	if err := json.Unmarshal(payload, &in); err != nil {
		return Heartbeat{}, fmt.Errorf("invalid heartbeat: %w", err)
	}
	h := in.Heartbeat
	switch {
	case h.Host == "":
		return Heartbeat{}, errors.New("invalid heartbeat: host is missing")
	case h.Name == "":
		return Heartbeat{}, errors.New("invalid heartbeat: name is missing")
	case in.PID == nil:
		return Heartbeat{}, errors.New("invalid heartbeat: pid is missing")
	case *in.PID < 0 || *in.PID > maxPID || *in.PID != math.Trunc(*in.PID):
		return Heartbeat{}, errors.New("invalid heartbeat: pid is not a whole number from 0 to 2^53")
	case len(h.SID) > maxSID:
		return Heartbeat{}, fmt.Errorf("invalid heartbeat: sid has %d bytes; at most %d are allowed", len(h.SID), maxSID)
	}
	h.PID = int64(*in.PID)
	if n := len(h.processID()); n > jetstream.MaxKey {
		return Heartbeat{}, fmt.Errorf("invalid heartbeat: host:name:pid has %d bytes, %d are allowed", n, jetstream.MaxKey)
	}
	return h, nil
}
