//go:build unix

package model

import (
	"encoding/json"
	"strconv"
	"strings"
)

// wireFrame is any frame of the protocol, from either side.
type wireFrame struct {
	Op       string          `json:"op"`
	Topic    string          `json:"topic,omitempty"`
	Group    string          `json:"group,omitempty"`
	ID       string          `json:"id,omitempty"`
	IDs      []string        `json:"ids,omitzero"`
	Reason   string          `json:"reason,omitempty"`
	ExtendMS int             `json:"extend_ms,omitempty"`
	DelayMS  *int            `json:"delay_ms,omitempty"`
	Token    string          `json:"token,omitempty"`
	Caps     []string        `json:"caps,omitempty"`
	Opts     *wireOptions    `json:"opts,omitempty"`
	Payload  json.RawMessage `json:"payload,omitempty"`
	Corr     *string         `json:"corr,omitempty"`

	Slots []int  `json:"slots,omitzero"` // of an ASSIGN
	Epoch uint64 `json:"epoch,omitempty"`

	Code  string     `json:"code,omitempty"`
	Msg   string     `json:"msg,omitempty"`
	Event *wireEvent `json:"event,omitempty"`
	Ctx   *wireCtx   `json:"ctx,omitempty"`
}

// wireOptions are those of PUBLISH and of SUBSCRIBE.
type wireOptions struct {
	ID  string `json:"id,omitempty"`
	Key string `json:"key,omitempty"`
	// Tombstone removes the key.
	Tombstone bool `json:"tombstone,omitempty"`

	From         string   `json:"from,omitempty"`
	TS           int64    `json:"ts,omitempty"`
	AfterID      string   `json:"afterId,omitempty"`
	BatchSize    int      `json:"batchSize,omitempty"`
	MaxInFlight  int      `json:"maxInFlight,omitempty"`
	AckTimeoutMS int      `json:"ackTimeoutMs,omitempty"`
	MaxAttempts  *int     `json:"maxAttempts,omitempty"`
	Topics       []string `json:"topics,omitempty"`
	GroupTTLMS   int      `json:"groupTtlMs,omitempty"`
	Ordered      string   `json:"ordered,omitempty"`
	Slots        int      `json:"slots,omitempty"`
}

type wireEvent struct {
	ID    string `json:"id"`
	TS    int64  `json:"ts"`
	Topic string `json:"topic"`
	Key   string `json:"key,omitempty"`
	// Partition is the slot of the key, for members of ordered groups.
	Partition *int            `json:"partition,omitempty"`
	Payload   json.RawMessage `json:"payload"`
}

type wireCtx struct {
	Attempt       int `json:"attempt"`
	AckDeadlineMS int `json:"ack_deadline_ms"`
}

// wireLetter is the payload of a dead letter.
type wireLetter struct {
	Topic    string    `json:"topic"`
	Group    string    `json:"group"`
	Original wireEvent `json:"original"`
	Err      string    `json:"err"`
	Attempts int       `json:"attempts"`
	TS       int64     `json:"ts"`
}

// number reads the number that each published payload begins with: {"n":7,…}. It is 0 for payloads
// that are not ours.
func number(payload []byte) int {
	var p struct {
		N int `json:"n"`
	}
	if json.Unmarshal(payload, &p) != nil {
		return 0
	}
	return p.N
}

func text(f *wireFrame) string {
	b, err := json.Marshal(f)
	if err != nil {
		panic(err) // nothing in it can fail
	}
	return string(b)
}

// numberIn is number for what may be a tombstone, whose payload is null: its number is in its id.
func numberIn(payload []byte, id string) int {
	if string(payload) != "null" {
		return number(payload)
	}
	n, _ := strconv.Atoi(strings.TrimPrefix(id, tombstoneID))
	return n
}

// tombstoneID is what the ids of tombstones begin with, before their numbers.
const tombstoneID = "gone-"

// number is that of a PUBLISH.
func (f *frame) number() int { return numberIn(f.Payload, f.given()) }

// UnmarshalJSON takes any corr: that of the TypeScript client is a number.
func (w *wireFrame) UnmarshalJSON(text []byte) error {
	type plain wireFrame
	got := struct {
		*plain
		Corr json.RawMessage `json:"corr"`
	}{plain: (*plain)(w)}
	if err := json.Unmarshal(text, &got); err != nil || got.Corr == nil {
		return err
	}
	corr := string(got.Corr)
	if json.Unmarshal(got.Corr, &corr) != nil {
		corr = "number " + corr
	}
	w.Corr = &corr
	return nil
}
