package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/coder/websocket"
)

// readLoop reads the hub's frames until the connection ends.
func (c *Conn) readLoop() {
	var buf bytes.Buffer
	for {
		if err := c.readFrame(&buf); err != nil {
			c.fail(err)
			return
		}
	}
}

// readFrame reads and dispatches one frame. It reuses buf.
func (c *Conn) readFrame(buf *bytes.Buffer) error {
	kind, r, err := c.ws.Reader(c.base)
	if err != nil {
		return readError(err)
	}
	if buf.Cap() > keepBuffer {
		*buf = bytes.Buffer{}
	}
	buf.Reset()
	if _, err := buf.ReadFrom(r); err != nil {
		return readError(err)
	}
	if kind != websocket.MessageText {
		return fmt.Errorf("%w: a binary message", errFrame)
	}
	c.frames.Add(1)
	return c.dispatch(buf.Bytes())
}

func readError(err error) error {
	if closed, ok := errors.AsType[websocket.CloseError](err); ok {
		return &CloseError{Code: int(closed.Code), Reason: closed.Reason}
	}
	return fmt.Errorf("wire: read from the hub: %w", err)
}

// frame holds the raw fields of a frame from the hub.
type frame struct {
	op, corr, id, code, msg         []byte
	retryable                       []byte
	topic, group, event, ctx        []byte
	attempt, deadline               []byte
	recID, recTS, recTopic, payload []byte
	recKey, recSlot                 []byte
	recMore                         bool // the record has other fields
	pos, recovered, reason          []byte
	tombstone                       []byte
}

func (f *frame) set(name, value []byte) error {
	switch string(name) {
	case "op":
		f.op = value
	case "corr":
		f.corr = value
	case "id":
		f.id = value
	case "code":
		f.code = value
	case "msg":
		f.msg = value
	case "retryable":
		f.retryable = value
	case "topic":
		f.topic = value
	case "group":
		f.group = value
	case "event":
		f.event = value
	case "ctx":
		f.ctx = value
	case "pos":
		f.pos = value
	case "recovered":
		f.recovered = value
	case "reason":
		f.reason = value
	}
	return nil
}

func (f *frame) setRecord(name, value []byte) error {
	switch string(name) {
	case "id":
		f.recID = value
	case "ts":
		f.recTS = value
	case "topic":
		f.recTopic = value
	case "key":
		f.recKey = value
	case "partition":
		f.recSlot = value
	case "payload":
		f.payload = value
	default:
		f.recMore = true
	}
	return nil
}

func (f *frame) setContext(name, value []byte) error {
	switch string(name) {
	case "attempt":
		f.attempt = value
	case "ack_deadline_ms":
		f.deadline = value
	}
	return nil
}

// dispatch hands one frame to its receiver. b is only valid during the call.
func (c *Conn) dispatch(b []byte) error {
	var f frame
	if err := eachField(b, f.set); err != nil {
		return err
	}
	switch string(f.op) {
	case `"OK"`:
		return c.answer(&f, nil)
	case `"ERR"`:
		code, err := text(f.code)
		if err != nil {
			return err
		}
		msg, err := text(f.msg)
		if err != nil {
			return err
		}
		return c.answer(&f, &Error{Code: code, Msg: msg, Permanent: string(f.retryable) == "false"})
	case `"EVENT"`:
		if f.group == nil {
			return c.cast(&f, b)
		}
		return c.event(&f)
	case `"GAP"`, `"SNAPSHOT"`, `"PRESENCE"`:
		return c.cast(&f, b)
	case `"ASSIGN"`:
		return c.assigned(b)
	}
	return nil // an op of a later protocol version
}

// assigned tells a subscription its slots. The topic may be a further one.
func (c *Conn) assigned(b []byte) error {
	var a Assignment
	if err := json.Unmarshal(b, &a); err != nil {
		return fmt.Errorf("%w: %w", errFrame, err)
	}
	c.mu.Lock()
	sub := c.subs[subKey{a.Topic, a.Group}]
	if sub == nil {
		for key, s := range c.subs {
			if key.group == a.Group && slices.Contains(s.topics, a.Topic) {
				sub = s
			}
		}
	}
	c.mu.Unlock()
	if sub != nil && sub.assigned != nil {
		sub.assigned(a)
	}
	return nil
}

// answer ends the call that the frame answers. refused is nil for an OK.
func (c *Conn) answer(f *frame, refused *Error) error {
	if waiting, ok := c.callOf(f.corr); ok {
		if refused != nil {
			c.end(waiting, "", refused)
			return nil
		}
		if waiting.began != nil {
			start, err := f.start()
			if err != nil {
				c.end(waiting, "", err)
				return err
			}
			waiting.began(start)
		}
		id := ""
		if f.id != nil {
			var err error
			if id, err = text(f.id); err != nil {
				c.end(waiting, "", err)
				return err
			}
		}
		c.end(waiting, id, nil)
		return nil
	}
	if refused == nil {
		return nil
	}
	if refused.Code == "not_subscribed" {
		c.ended(refused.Msg) // the hub says that the subscription, or the broadcast, has ended
	}
	c.opts.OnError(refused)
	return nil
}

func (c *Conn) callOf(corr []byte) (call, bool) {
	if len(corr) < 3 {
		return call{}, false
	}
	n, err := strconv.ParseUint(string(corr[1:len(corr)-1]), 10, 64)
	if err != nil {
		return call{}, false // not a corr of this client
	}
	return c.take(n)
}

// event hands an event to its subscription, and waits while the subscription's queue is full.
func (c *Conn) event(f *frame) error {
	sub, err := c.subOf(f)
	if sub == nil || err != nil || !sub.open {
		// Without a subscription after an Unsubscribe, and not open when the event is for an
		// earlier subscription of the same name: the hub redelivers the event.
		return err
	}
	ev, err := newEvent(f, sub, time.Now())
	if err != nil {
		return err
	}
	select { // without the other cases it costs a third of the select below
	case sub.queue <- ev:
		return nil
	default:
	}
	select {
	case sub.queue <- ev:
	case <-sub.ended:
	case <-c.closing: // the hub takes it back
	}
	return nil
}

// subOf returns the subscription of an EVENT. Consecutive events are mostly for the same
// subscription.
func (c *Conn) subOf(f *frame) (*Subscription, error) {
	if s := c.latest; s != nil && bytes.Equal(s.topicJSON, f.topic) && bytes.Equal(s.groupJSON, f.group) {
		select {
		case <-s.ended:
		default:
			return s, nil
		}
	}
	topic, err := text(f.topic)
	if err != nil {
		return nil, err
	}
	group, err := text(f.group)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.latest = c.subs[subKey{topic, group}]
	c.mu.Unlock()
	return c.latest, nil
}
