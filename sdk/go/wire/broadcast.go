package wire

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// BroadcastOptions are the opts of a SUBSCRIBE that begins a broadcast. Zero fields take the hub's
// defaults. History, Snapshot and From exclude one another.
type BroadcastOptions struct {
	// History is how many events from before come first.
	History int `json:"history,omitempty"`
	// Snapshot has the newest event of each key come first, and a frame tell their end.
	Snapshot bool `json:"snapshot,omitempty"`
	// From is "latest", "pos", "ts" or "afterId". Pos, TS (epoch milliseconds) and AfterID say
	// where.
	From    string `json:"from,omitempty"`
	Pos     string `json:"pos,omitempty"`
	TS      *int64 `json:"ts,omitempty"`
	AfterID string `json:"afterId,omitempty"`
	// Slow is "skip", "catchup" or "close".
	Slow string `json:"slow,omitempty"`
	// Conflate is "key" when a newer event of a key replaces those that were not sent yet.
	Conflate string `json:"conflate,omitempty"`
	// MinIntervalMS is the least time, in milliseconds, between two moments in which events come.
	MinIntervalMS int64 `json:"minIntervalMs,omitempty"`
	// SchemaVersion is the version of the schema in which events come.
	SchemaVersion SchemaVersion `json:"schemaVersion,omitzero"`
	// Presence requests PRESENCE frames.
	Presence bool `json:"presence,omitempty"`
	// Extra are options that this version does not know.
	Extra map[string]any `json:"-"`
}

func (o *BroadcastOptions) encode() ([]byte, error) {
	known, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	b := []byte(`{"mode":"broadcast"`)
	if o.Snapshot {
		b = append(b, `,"snapshotEnd":true`...)
	}
	if len(known) > len("{}") {
		b = append(append(b, ','), known[1:len(known)-1]...)
	}
	if len(o.Extra) > 0 {
		extra, err := json.Marshal(o.Extra)
		if err != nil {
			return nil, err
		}
		b = append(append(b, ','), extra[1:len(extra)-1]...)
	}
	return append(b, '}'), nil
}

// A Start is the hub's answer to a SUBSCRIBE that begins a broadcast.
type Start struct {
	// Pos is the place behind which the broadcast begins.
	Pos string
	// Recovered reports whether that is where the client asked. Otherwise Reason says why not:
	// "truncated", "stream_changed" or "too_far".
	Recovered bool
	Reason    string
}

// A Gap says which events a broadcast leaves out: Missed events between the places From and To. It
// is 0 when the hub cannot tell.
type Gap struct {
	From   string `json:"from"`
	To     string `json:"to"`
	Missed uint64 `json:"missed"`
}

// A Presence says how many names are present at a topic, and who has come and left since the
// Presence before: at most 100 names each.
type Presence struct {
	Count  int      `json:"count"`
	Joined []string `json:"joined"`
	Left   []string `json:"left"`
}

// A BroadcastEvent is an event of a broadcast. It owns its bytes.
type BroadcastEvent struct {
	// Record is the event record, byte for byte as the hub sent it.
	Record []byte
	// ID, TS (epoch milliseconds), Topic, Key ("" when there is none) and Payload are fields of the
	// record. Payload shares memory with Record.
	ID      string
	TS      int64
	Topic   string
	Key     string
	Payload []byte
	// More reports whether Record has other fields besides, such as headers.
	More bool
	// Pos is the place of the event.
	Pos string
	// Tombstone reports whether the event removes its key.
	Tombstone bool
}

// BroadcastHandlers receive what comes of a broadcast. They run on the goroutine that reads the
// connection, so they must neither block nor wait for answers. Those that are nil are not called.
type BroadcastHandlers struct {
	// Began receives the answer to the SUBSCRIBE, once, and before all others. After an error,
	// which is an *Error if the hub refused, the broadcast has ended.
	Began func(Start, error)
	Event func(BroadcastEvent)
	Gap   func(Gap)
	// Snapshot is called when the snapshot has ended, with the place up to which it is the state.
	Snapshot func(pos string)
	Presence func(Presence)
}

// Broadcast is a broadcast on one connection. Its methods may be called concurrently.
type Broadcast struct {
	client   *Conn
	topic    string
	handlers BroadcastHandlers
	open     bool // the hub has accepted it; owned by the reader
}

// Follow begins a broadcast of a topic. It does not wait for the hub's answer, which goes to
// handlers.Began. If Follow returns an error, no handler is called. The broadcast ends with
// UnsubscribeAsync, with the connection, or when the hub says so to Options.OnError.
func Follow(c *Conn, topic string, opts BroadcastOptions, handlers BroadcastHandlers) (*Broadcast, error) {
	options, err := opts.encode()
	if err != nil {
		return nil, fmt.Errorf("wire: encode the options of a broadcast: %w", err)
	}
	b := &Broadcast{client: c, topic: topic, handlers: handlers}
	if err := c.follow(b); err != nil {
		return nil, err
	}
	var start Start
	_, err = c.send(func(frame []byte) []byte { return followFrame(frame, topic, options) }, call{
		began: func(s Start) { start = s },
		done: func(_ string, err error) {
			if err != nil {
				c.unfollow(b)
			} else {
				b.open = true
			}
			if handlers.Began != nil {
				handlers.Began(start, err)
			}
		},
	})
	if err != nil {
		c.unfollow(b)
		return nil, err
	}
	return b, nil
}

func followFrame(b []byte, topic string, options []byte) []byte {
	b = appendField(append(b, `{"op":"SUBSCRIBE"`...), "topic", topic)
	return append(append(b, `,"opts":`...), options...)
}

func unfollowFrame(b []byte, topic string) []byte {
	b = appendField(append(b, `{"op":"UNSUBSCRIBE"`...), "topic", topic)
	return append(b, `,"opts":{"mode":"broadcast"}`...)
}

// follow registers a broadcast before its SUBSCRIBE is sent.
func (c *Conn) follow(b *Broadcast) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.usable(); err != nil {
		return err
	}
	if c.casts[b.topic] != nil {
		return &Error{Code: "already_subscribed", Msg: b.topic}
	}
	if c.casts == nil {
		c.casts = make(map[string]*Broadcast)
	}
	c.casts[b.topic] = b
	return nil
}

func (c *Conn) unfollow(b *Broadcast) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.casts[b.topic] == b {
		delete(c.casts, b.topic)
	}
}

// UnsubscribeAsync ends the broadcast: no handler is called for what comes from now on, although
// one may be running. done receives the hub's answer, and must not block. If UnsubscribeAsync
// returns an error, done is not called.
func (b *Broadcast) UnsubscribeAsync(done func(error)) error {
	b.client.unfollow(b)
	_, err := b.client.send(func(frame []byte) []byte { return unfollowFrame(frame, b.topic) }, call{
		done: func(_ string, err error) { done(err) },
	})
	return err
}

// castOf returns the broadcast of a topic that the hub has accepted, or nil.
func (c *Conn) castOf(topic []byte) (*Broadcast, error) {
	name, err := text(topic)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	b := c.casts[name]
	c.mu.Unlock()
	if b == nil || !b.open {
		return nil, nil //nolint:nilnil // what is for an earlier broadcast of the topic
	}
	return b, nil
}

// cast hands on a frame of a broadcast.
func (c *Conn) cast(f *frame, raw []byte) error {
	b, err := c.castOf(f.topic)
	if b == nil || err != nil {
		return err
	}
	switch string(f.op) {
	case `"EVENT"`:
		e, err := newBroadcastEvent(f)
		if err == nil && b.handlers.Event != nil {
			b.handlers.Event(e)
		}
		return err
	case `"SNAPSHOT"`:
		pos, err := text(f.pos)
		if err == nil && b.handlers.Snapshot != nil {
			b.handlers.Snapshot(pos)
		}
		return err
	case `"GAP"`:
		return handOn(raw, b.handlers.Gap)
	default:
		return handOn(raw, b.handlers.Presence)
	}
}

func handOn[T any](raw []byte, to func(T)) error {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	if to != nil {
		to(v)
	}
	return nil
}

// newBroadcastEvent copies what it keeps of f.
func newBroadcastEvent(f *frame) (e BroadcastEvent, err error) {
	if err := eachField(f.ctx, f.setPlace); err != nil {
		return e, err
	}
	if e.Pos, err = text(f.pos); err != nil {
		return e, err
	}
	e.Tombstone = string(f.tombstone) == "true"
	record := append([]byte(nil), f.event...)
	if err := eachField(record, f.setRecord); err != nil {
		return e, err
	}
	e.Record, e.Payload, e.More = record, f.payload, f.recMore
	if e.ID, err = text(f.recID); err != nil {
		return e, err
	}
	if e.Topic, err = text(f.recTopic); err != nil {
		return e, err
	}
	if f.recKey != nil {
		if e.Key, err = text(f.recKey); err != nil {
			return e, err
		}
	}
	if e.TS, err = strconv.ParseInt(string(f.recTS), 10, 64); err != nil {
		return e, fmt.Errorf("%w: ts: %w", errFrame, err)
	}
	return e, nil
}

func (f *frame) setPlace(name, value []byte) error {
	switch string(name) {
	case "pos":
		f.pos = value
	case "tombstone":
		f.tombstone = value
	}
	return nil
}

// start reads an OK that begins a broadcast.
func (f *frame) start() (s Start, err error) {
	if s.Pos, err = text(f.pos); err != nil {
		return s, err
	}
	s.Recovered = string(f.recovered) == "true"
	if f.reason != nil {
		s.Reason, err = text(f.reason)
	}
	return s, err
}
