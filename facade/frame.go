package facade

import (
	"bytes"
	"math"
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// Bounds of client frames.
const (
	maxCorr   = 1024 // bytes of a raw corr
	maxAckIDs = 1000 // ids of one ACK
	// capRetryAfter is the capability of clients that read a pause in the reason of a close code.
	capRetryAfter = "retry_after"

	maxCaps   = 16             // capabilities of one AUTH
	maxCap    = 64             // bytes of the name of a capability
	minExtend = time.Second    // of MODACK
	maxExtend = 12 * time.Hour // of MODACK and of a NACK's delay

	// maxKeptText is the largest buffer for unescaped text, in bytes, that a frame keeps.
	maxKeptText = 64 << 10
)

// An op is what a client frame asks for.
type op uint8

// The ops of the protocol.
const (
	opUnknown op = iota
	opAuth
	opPublish
	opSubscribe
	opUnsubscribe
	opAck
	opNack
	opModack
	opPause
	opResume
)

// A frame is one message from a client. A frame is read in two stages: cut finds op and corr, and
// decode reads the fields of the op. A connection that has not authenticated thus learns this
// before it learns of a bad field.
//
// Frames mean what they mean to a JavaScript server that reads msg.op, msg.topic and so on: keys
// match exactly, the last of duplicate keys counts, unknown keys are ignored, and null counts as
// missing.
//
// A frame can be reused for one message after the other, by one goroutine at a time. Its byte
// slices are parts of the message or of a buffer of the frame. They are valid until the next cut
// and must not be changed.
type frame struct {
	// Known after cut.
	op   op
	corr []byte // as sent, whatever JSON value it is; nil when absent

	// Valid after decode. Fields that the op does not have, or that the client left out, are nil or
	// zero.
	topic, group, id, token, reason []byte

	resets bool // the AUTH names the capability group_reset
	losses bool // the AUTH names the capability events_lost
	pauses bool // the AUTH names the capability retry_after

	payload   []byte   // as sent
	ids       [][]byte // of an ACK; either id or ids is set
	publish   jetstream.PublishOptions
	subscribe jetstream.SubscribeOptions
	cast      *castOptions  // of a SUBSCRIBE or UNSUBSCRIBE of a broadcast; nil for a group
	extend    time.Duration // of a MODACK: 0 for the subscription's AckTimeout, else 1 s..12 h
	delay     time.Duration // of a NACK: -1 for the default back-off, else 0..12 h

	raw     rawFields
	text    []byte   // unescaped strings
	idsRoom [][]byte // backing storage of ids
}

// rawFields are a frame's fields as sent; nil when absent.
type rawFields struct {
	op, corr, topic, group, id, ids, token, caps, reason, payload, opts, extend, delay []byte
}

// cut reads the op and the corr of a message. The faults are bad_json, for which corr is nil, and
// bad_frame.
func (f *frame) cut(msg []byte) *fault {
	f.reset()
	if !isObject(msg) {
		if jsonscan.Valid(msg) {
			return badFrame("a frame must be an object")
		}
		return badJSON()
	}
	// The frame replaces one of the nesting levels that the payload will have around it in a
	// delivery.
	w := jsonscan.Walk(msg, jetstream.PayloadLevels-1)
	for w.Next() {
		f.raw.set(w.Key, w.Value)
	}
	if w.Err() != nil {
		return badJSON()
	}
	if len(f.raw.corr) > maxCorr {
		return badFrame("corr is longer than " + strconv.Itoa(maxCorr) + " bytes")
	}
	f.corr = f.raw.corr
	name, fail := f.string("op", f.raw.op)
	if fail != nil {
		return fail
	}
	f.op = opOf(name)
	return nil
}

// reset clears the frame for the next message and keeps the buffers.
func (f *frame) reset() {
	text, ids := f.text[:0], f.idsRoom[:0]
	if cap(text) > maxKeptText {
		text = nil
	}
	*f = frame{text: text, idsRoom: ids}
}

// set stores the value of a known key and ignores others.
func (r *rawFields) set(key, value []byte) {
	var buf [16]byte // longer than any known key
	switch string(unquoteName(key, buf[:0])) {
	case "op":
		r.op = value
	case "corr":
		r.corr = value
	case "topic":
		r.topic = value
	case "group":
		r.group = value
	case "id":
		r.id = value
	case "payload":
		r.payload = value
	case "opts":
		r.opts = value
	case "ids":
		r.ids = value
	case "token":
		r.token = value
	case "caps":
		r.caps = value
	case "reason":
		r.reason = value
	case "extend_ms":
		r.extend = value
	case "delay_ms":
		r.delay = value
	}
}

func opOf(name []byte) op {
	switch string(name) {
	case "AUTH":
		return opAuth
	case "PUBLISH":
		return opPublish
	case "SUBSCRIBE":
		return opSubscribe
	case "UNSUBSCRIBE":
		return opUnsubscribe
	case "ACK":
		return opAck
	case "NACK":
		return opNack
	case "MODACK":
		return opModack
	case "PAUSE":
		return opPause
	case "RESUME":
		return opResume
	}
	return opUnknown
}

// decode reads the fields of the op. The faults are bad_frame, and bad_options for faults inside
// opts and for caps and delay_ms. cut must have succeeded.
func (f *frame) decode() (fail *fault) {
	if f.op == opUnknown {
		return nil
	}
	if f.op == opAuth {
		if !missing(f.raw.token) {
			f.token, fail = f.string("token", f.raw.token)
		}
		if fail == nil {
			fail = f.decodeCaps()
		}
		return fail
	}
	if f.topic, fail = f.string("topic", f.raw.topic); fail != nil {
		return fail
	}
	if f.op == opPublish {
		f.payload = f.raw.payload
		return publishOptions(&f.publish, f.raw.opts)
	}
	if f.op == opSubscribe || f.op == opUnsubscribe {
		if f.cast, fail = readCastOptions(f.op, f.raw.opts); fail != nil {
			return fail
		}
		if f.cast != nil {
			if !missing(f.raw.group) {
				return &fault{code: codeBadOptions, msg: "a broadcast has no group: leave group out, or opts.mode"}
			}
			return nil
		}
	}
	if f.group, fail = f.string("group", f.raw.group); fail != nil {
		return fail
	}
	switch f.op {
	case opSubscribe:
		return subscribeOptions(&f.subscribe, f.raw.opts)
	case opAck:
		if !missing(f.raw.ids) {
			return f.decodeIDs()
		}
		f.id, fail = f.string("id", f.raw.id)
	case opNack:
		f.id, fail = f.string("id", f.raw.id)
		if isString(f.raw.reason) {
			f.reason = f.unquote(f.raw.reason)
		}
		if fail == nil {
			f.delay, fail = delay(f.raw.delay)
		}
	case opModack:
		f.id, fail = f.string("id", f.raw.id)
		f.extend = extension(f.raw.extend)
	default: // the other ops have no more fields
	}
	return fail
}

// decodeCaps reads the capabilities of an AUTH: the extensions that the client understands. Names
// that the hub does not know have no effect.
func (f *frame) decodeCaps() *fault {
	if missing(f.raw.caps) {
		return nil
	}
	refused := &fault{code: codeBadOptions, msg: "caps must be an array of at most " + strconv.Itoa(maxCaps) +
		" strings of at most " + strconv.Itoa(maxCap) + " bytes"}
	if !isArray(f.raw.caps) {
		return refused
	}
	n := 0
	for w := jsonscan.Walk(f.raw.caps, 0); w.Next(); n++ {
		if !isString(w.Value) || n == maxCaps {
			return refused
		}
		name := f.unquote(w.Value)
		if len(name) > maxCap {
			return refused
		}
		f.resets = f.resets || string(name) == string(codeGroupReset)
		f.losses = f.losses || string(name) == string(codeEventsLost)
		f.pauses = f.pauses || string(name) == capRetryAfter
	}
	return nil
}

// decodeIDs reads the ids of an ACK.
func (f *frame) decodeIDs() *fault {
	if !missing(f.raw.id) {
		return badFrame("an ACK has id or ids, not both")
	}
	if !isArray(f.raw.ids) {
		return wrongType("ids", "an array", f.raw.ids)
	}
	w := jsonscan.Walk(f.raw.ids, 0)
	for w.Next() {
		if !isString(w.Value) {
			return wrongType("ids", "an array of strings", w.Value)
		}
		if len(f.idsRoom) == maxAckIDs {
			return badFrame("ids has more than " + strconv.Itoa(maxAckIDs) + " items")
		}
		f.idsRoom = append(f.idsRoom, f.unquote(w.Value))
	}
	if len(f.idsRoom) == 0 {
		return badFrame("ids is empty")
	}
	f.ids = f.idsRoom
	return nil
}

// string reads a required string field.
func (f *frame) string(name string, raw []byte) ([]byte, *fault) {
	if missing(raw) {
		return nil, badFrame(name + " is missing")
	}
	if !isString(raw) {
		return nil, wrongType(name, "a string", raw)
	}
	return f.unquote(raw), nil
}

func (f *frame) unquote(raw []byte) []byte {
	var s []byte
	s, f.text = jsonscan.Unquote(raw, f.text)
	return s
}

func badJSON() *fault { return &fault{code: codeBadJSON, msg: "Invalid JSON"} }

func badFrame(msg string) *fault { return &fault{code: codeBadFrame, msg: msg} }

func wrongType(name, want string, raw []byte) *fault {
	return badFrame(name + " must be " + want + ", not " + kind(raw))
}

// extension reads MODACK's extend_ms as JavaScript's Math.max(1000, Number(x) || 0) does, except
// that 0 stays 0. The result is at most maxExtend.
func extension(raw []byte) time.Duration {
	ms, ok := number(raw)
	if !ok || ms == 0 {
		return 0
	}
	switch {
	case ms <= float64(minExtend.Milliseconds()):
		return minExtend
	case ms >= float64(maxExtend.Milliseconds()):
		return maxExtend
	}
	return time.Duration(ms) * time.Millisecond
}

// delay reads NACK's delay_ms, an integer from 0 to 12 h in milliseconds. An absent field is -1.
// Any other value, null included, is a fault: it is a client's mistake that the event's back-off
// would hide.
func delay(raw []byte) (time.Duration, *fault) {
	if len(raw) == 0 {
		return -1, nil
	}
	ms, ok := integer(raw)
	if limit := maxExtend.Milliseconds(); !ok || ms < 0 || ms > limit {
		return -1, &fault{code: codeBadOptions, msg: "delay_ms must be an integer from 0 to " +
			strconv.FormatInt(limit, 10) + ", not " + short(raw)}
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// number reads a JSON number, or a JSON string that holds a number. A number too large for a
// float64 is infinite.
func number(raw []byte) (float64, bool) {
	if isString(raw) {
		raw = raw[1 : len(raw)-1]
	}
	if !isNumber(raw) {
		return 0, false
	}
	if end, err := jsonscan.Value(raw, 0); err != nil || end != len(raw) {
		return 0, false
	}
	// its only error left is ErrRange, with the right value
	n, _ := strconv.ParseFloat(string(raw), 64)
	return n, true
}

// integer reads a JSON number, in any notation, that is whole and less than 2^53 in size.
func integer(raw []byte) (int64, bool) {
	if !isNumber(raw) {
		return 0, false
	}
	n, _ := number(raw)
	if n != math.Trunc(n) || math.Abs(n) >= 1<<53 {
		return 0, false
	}
	return int64(n), true
}

// unquoteName returns the text of a key. It uses buf for a key with escapes.
func unquoteName(key, buf []byte) []byte {
	name, _ := jsonscan.Unquote(key, buf)
	return name
}

// The first byte of a valid JSON value determines its kind.

func missing(raw []byte) bool  { return len(raw) == 0 || raw[0] == 'n' }
func isString(raw []byte) bool { return len(raw) > 0 && raw[0] == '"' }
func isArray(raw []byte) bool  { return firstByte(raw) == '[' }
func isObject(raw []byte) bool { return firstByte(raw) == '{' }
func isBool(raw []byte) bool   { return len(raw) > 0 && (raw[0] == 't' || raw[0] == 'f') }
func isNumber(raw []byte) bool {
	return len(raw) > 0 && (raw[0] == '-' || '0' <= raw[0] && raw[0] <= '9')
}

// firstByte returns the first byte that is not a blank, or 0.
func firstByte(raw []byte) byte {
	if raw = bytes.TrimLeft(raw, " \t\r\n"); len(raw) == 0 {
		return 0
	}
	return raw[0]
}

// kind returns the type of a valid value, for messages. An absent value is missing.
func kind(raw []byte) string {
	if len(raw) == 0 {
		return "missing"
	}
	switch raw[0] {
	case '"':
		return "a string"
	case '{':
		return "an object"
	case '[':
		return "an array"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}
