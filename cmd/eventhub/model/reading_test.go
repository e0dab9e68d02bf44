//go:build unix

package model

import (
	"encoding/json"
	"fmt"
	"time"
)

// The kinds of entries that are not frames of a WebSocket.
const (
	kindRead = "read" // a reading, as JSON
	kindRow  = "row"  // a row of an outbox, as JSON, before its transaction ends
	kindDone = "done" // ID commit|rollback: how the transaction of a row ended; may be missing
	kindSaw  = "saw"  // what the program of a client library saw, as JSON
)

// reading is a question to a hub, or to the stream of a projection, and its answer. lo is before
// the question was sent.
type reading struct {
	What  string `json:"what"` // "cursor", "latest", "replay" or "state"
	Topic string `json:"topic"`
	// Final says that everything was settled before the question.
	Final bool `json:"final,omitempty"`

	Group string `json:"group,omitempty"` // cursor
	Key   string `json:"key,omitempty"`   // latest
	ID    string `json:"id,omitempty"`    // cursor and latest: the answer; "" for none

	From    string `json:"from,omitempty"` // replay: earliest, ts or afterId
	TS      int64  `json:"ts,omitempty"`
	AfterID string `json:"afterId,omitempty"`
	Limit   int    `json:"limit,omitempty"`
	// replay: the answer
	IDs []string `json:"ids,omitempty"`

	States map[string]folded `json:"states,omitempty"` // state: the answer, by key

	lo, at time.Duration
}

// folded is the state of a key in the projection of the rig: see fold.
type folded struct {
	Events int    `json:"events"`
	Last   string `json:"last"`
	Hash   uint64 `json:"hash"`
}

// fold is the projection of the rig. It depends on every event of a key, and on their order.
func fold(s folded, id string) folded {
	s.Events++
	s.Last = id
	for i := range len(id) { // FNV
		s.Hash = (s.Hash ^ uint64(id[i])) * 1_099_511_628_211
	}
	return s
}

// row is one of an outbox.
type row struct {
	ID      string          `json:"id"`
	Topic   string          `json:"topic"`
	Key     string          `json:"key,omitempty"`
	Payload json.RawMessage `json:"payload"`

	at   time.Duration
	fate string // "commit", "rollback" or ""
}

// saw is what the program of a client library saw: an event that a handler was called with, or the
// id that a publish ended with.
type saw struct {
	Client  string `json:"client"`
	Topic   string `json:"topic"` // the event's own
	Group   string `json:"group,omitempty"`
	ID      string `json:"id"`
	Attempt int    `json:"attempt,omitempty"`
	N       int    `json:"n,omitempty"` // the number of a publish; 0 for an event

	at time.Duration
}

// takeOther takes an entry that is no frame of a WebSocket.
func (l *ledger) takeOther(e entry) error {
	switch e.kind {
	case kindRead:
		r := &reading{lo: e.lo, at: e.at}
		l.readings = append(l.readings, r)
		return json.Unmarshal([]byte(e.text), r)
	case kindSaw:
		s := &saw{at: e.at}
		l.saws = append(l.saws, s)
		return json.Unmarshal([]byte(e.text), s)
	case kindRow:
		r := &row{at: e.at}
		if err := json.Unmarshal([]byte(e.text), r); err != nil {
			return err
		}
		l.rows = append(l.rows, r)
		f := &frame{conn: &connection{}, sent: e.at, answered: never, lo: never}
		f.wireFrame = wireFrame{Op: "PUBLISH", Topic: r.Topic, Payload: r.Payload, Opts: &wireOptions{ID: r.ID, Key: r.Key}}
		l.sentN[number(r.Payload)] = f
	case kindDone:
		var id, fate string
		if _, err := fmt.Sscan(e.text, &id, &fate); err != nil {
			return err
		}
		for _, r := range l.rows {
			if r.ID == id {
				r.fate = fate
				if fate == "rollback" {
					delete(l.sentN, number(r.Payload))
				}
			}
		}
	}
	return nil
}

// read takes down a reading, whose question was asked at lo.
func (r *recorder) read(lo time.Duration, what *reading) {
	r.received(0, lo, kindRead, asJSON(what))
}

// asJSON is for what can be written as JSON.
func asJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}
