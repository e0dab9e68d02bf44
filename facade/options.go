package facade

import (
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// Bounds of subscribe options; times in milliseconds.
const (
	maxBatch      = 10_000
	maxInFlight   = 10_000
	minAckTimeout = 1_000
	maxAckTimeout = 12 * 60 * 60 * 1_000
	maxAttempts   = 1_000_000
	maxTopics     = 32
	minGroupTTL   = 1_000
	maxGroupTTL   = 30 * 24 * 60 * 60 * 1_000
	maxSlots      = 1_024
	maxTimestamp  = 1<<53 - 1
	maxDelay      = 365 * 24 * 60 * 60 * 1_000
)

// errTwoDelays refuses a publish with both a delay and a time.
const errTwoDelays = " are two ways to say when: give one"

// publishOptions reads the opts of a PUBLISH, or of a line of NDJSON, into o. opts is a valid JSON
// value, or nil for none. It checks only types, and that id and key are not empty; the bus checks
// the rest.
func publishOptions(o *jetstream.PublishOptions, opts []byte) *fault {
	*o = jetstream.PublishOptions{}
	if missing(opts) {
		return nil
	}
	if !isObject(opts) {
		return wrongType("opts", "an object", opts)
	}
	var id, ts, key, headers, tags, causedBy, sid, tombstone, delay, at []byte
	for w := jsonscan.Walk(opts, 0); w.Next(); {
		var buf [16]byte
		switch string(unquoteName(w.Key, buf[:0])) {
		case "id":
			id = w.Value
		case "ts":
			ts = w.Value
		case "key":
			key = w.Value
		case "headers":
			headers = w.Value
		case "tags":
			tags = w.Value
		case "caused_by":
			causedBy = w.Value
		case "sid":
			sid = w.Value
		case "tombstone":
			tombstone = w.Value
		case "delay_ms":
			delay = w.Value
		case "at":
			at = w.Value
		}
	}

	var r optionReader
	o.ID = r.name("id", id)
	o.TS, o.HasTS = r.integer("ts", ts, 0, maxTimestamp)
	o.Key = r.name("key", key)
	o.Headers = r.headers("headers", headers)
	o.Tags = r.strings("tags", tags)
	o.CausedBy = r.strings("caused_by", causedBy)
	o.SID = r.string("sid", sid)
	o.Tombstone = r.bool("tombstone", tombstone)
	millis, _ := r.integer("delay_ms", delay, 0, maxDelay)
	o.Delay = time.Duration(millis) * time.Millisecond
	if millis, given := r.integer("at", at, 0, maxTimestamp); given {
		o.At = time.UnixMilli(millis)
	}
	if !missing(delay) && !missing(at) {
		r.refuse("opts.delay_ms and opts.at" + errTwoDelays)
	}
	return r.fail
}

// subscribeOptions reads the opts of a SUBSCRIBE into o. opts is a valid JSON value, or nil for
// none.
func subscribeOptions(o *jetstream.SubscribeOptions, opts []byte) *fault {
	*o = jetstream.SubscribeOptions{}
	if missing(opts) {
		return nil
	}
	if !isObject(opts) {
		return wrongType("opts", "an object", opts)
	}
	var from, ts, afterID, batch, inFlight, ackTimeout, attempts, topics, groupTTL, order, slots, version []byte
	for w := jsonscan.Walk(opts, 0); w.Next(); {
		var buf [16]byte
		switch string(unquoteName(w.Key, buf[:0])) {
		case "from":
			from = w.Value
		case "ts":
			ts = w.Value
		case "afterId":
			afterID = w.Value
		case "batchSize":
			batch = w.Value
		case "maxInFlight":
			inFlight = w.Value
		case "ackTimeoutMs":
			ackTimeout = w.Value
		case "maxAttempts":
			attempts = w.Value
		case "topics":
			topics = w.Value
		case "groupTtlMs":
			groupTTL = w.Value
		case "ordered":
			order = w.Value
		case "slots":
			slots = w.Value
		case "schemaVersion":
			version = w.Value
		}
	}

	var r optionReader
	o.From = r.from(from, ts, afterID)
	n, _ := r.integer("batchSize", batch, 1, maxBatch)
	o.BatchSize = int(n)
	n, _ = r.integer("maxInFlight", inFlight, 1, maxInFlight)
	o.MaxInFlight = int(n)
	n, _ = r.integer("ackTimeoutMs", ackTimeout, minAckTimeout, maxAckTimeout)
	o.AckTimeout = time.Duration(n) * time.Millisecond
	n, given := r.integer("maxAttempts", attempts, 0, maxAttempts)
	o.MaxAttempts = int(n)
	if given && n == 0 {
		o.MaxAttempts = jetstream.NeverGiveUp
	}
	o.Topics = r.strings("topics", topics)
	if len(o.Topics) > maxTopics {
		r.refuse("opts.topics must have at most " + strconv.Itoa(maxTopics) + " items, not " + strconv.Itoa(len(o.Topics)))
	}
	n, _ = r.integer("groupTtlMs", groupTTL, minGroupTTL, maxGroupTTL)
	o.GroupTTL = time.Duration(n) * time.Millisecond
	if !missing(order) {
		if o.OrderByKey = r.string("ordered", order) == "key"; !o.OrderByKey {
			r.refuse(`opts.ordered must be "key"`)
		}
	}
	o.SchemaVersion = r.version(optSchemaVersion, version)
	n, given = r.integer("slots", slots, 1, maxSlots)
	if o.Slots = int(n); given && !o.OrderByKey {
		r.refuse("opts.slots is for ordered groups: give opts.ordered, too")
	}
	return r.fail
}

// An optionReader reads options one by one and keeps the first fault. A missing option reads as
// zero.
type optionReader struct {
	fail *fault
}

func (r *optionReader) refuse(msg string) {
	if r.fail == nil {
		r.fail = &fault{code: codeBadOptions, msg: msg}
	}
}

func (r *optionReader) want(name, what string, raw []byte) {
	r.refuse("opts." + name + " must be " + what + ", not " + short(raw))
}

func (r *optionReader) string(name string, raw []byte) string {
	switch {
	case missing(raw):
		return ""
	case !isString(raw):
		r.want(name, "a string", raw)
		return ""
	}
	s, _ := jsonscan.Unquote(raw, nil)
	return string(s)
}

// name reads a string that must not be empty if it is given.
func (r *optionReader) name(name string, raw []byte) string {
	s := r.string(name, raw)
	if s == "" && isString(raw) {
		r.refuse("opts." + name + " must not be empty")
	}
	return s
}

func (r *optionReader) bool(name string, raw []byte) bool {
	if missing(raw) {
		return false
	}
	if !isBool(raw) {
		r.want(name, "a boolean", raw)
		return false
	}
	return raw[0] == 't'
}

// integer reads an integer from least to limit. It also reports whether the option was given and
// valid.
func (r *optionReader) integer(name string, raw []byte, least, limit int64) (int64, bool) {
	if missing(raw) {
		return 0, false
	}
	n, ok := integer(raw)
	if !ok || n < least || n > limit {
		r.want(name, "an integer from "+strconv.FormatInt(least, 10)+" to "+strconv.FormatInt(limit, 10), raw)
		return 0, false
	}
	return n, true
}

// from reads where a new group starts: the options from, ts and afterId.
func (r *optionReader) from(from, ts, afterID []byte) jetstream.Position {
	kind := "latest"
	if !missing(from) {
		if kind = r.string("from", from); kind != "latest" && kind != "earliest" && kind != "ts" && kind != "afterId" {
			r.refuse("opts.from must be latest, earliest, ts or afterId")
		}
	}
	millis, _ := r.integer("ts", ts, 0, maxTimestamp)
	id := r.string("afterId", afterID)
	switch kind {
	case "earliest":
		return jetstream.FromEarliest
	case "ts":
		if missing(ts) {
			r.refuse("opts.ts is needed with from ts")
		}
		return jetstream.FromTime(time.UnixMilli(millis))
	case "afterId":
		if id == "" {
			r.refuse("opts.afterId is needed with from afterId")
		}
		return jetstream.FromAfterID(id)
	}
	return jetstream.FromLatest
}

func (r *optionReader) strings(name string, raw []byte) []string {
	const what = "an array of strings"
	if missing(raw) {
		return nil
	}
	if !isArray(raw) {
		r.want(name, what, raw)
		return nil
	}
	var list []string
	for w := jsonscan.Walk(raw, 0); w.Next(); {
		if !isString(w.Value) {
			r.refuse("opts." + name + " must be " + what + ", but holds " + kind(w.Value))
			return nil
		}
		s, _ := jsonscan.Unquote(w.Value, nil)
		list = append(list, string(s))
	}
	return list
}

func (r *optionReader) headers(name string, raw []byte) map[string]string {
	const what = "an object of strings"
	if missing(raw) {
		return nil
	}
	if !isObject(raw) {
		r.want(name, what, raw)
		return nil
	}
	values := make(map[string][]byte) // raw: the last of duplicate names counts
	for w := jsonscan.Walk(raw, 0); w.Next(); {
		values[string(unquoteName(w.Key, nil))] = w.Value
	}
	headers := make(map[string]string, len(values))
	for header, value := range values {
		if !isString(value) {
			r.refuse("opts." + name + " must be " + what + ", but holds " + kind(value))
			return nil
		}
		s, _ := jsonscan.Unquote(value, nil)
		headers[header] = string(s)
	}
	return headers
}

// short returns a number as sent if it has at most 20 bytes, else the kind of the value.
func short(raw []byte) string {
	if isNumber(raw) && len(raw) <= 20 {
		return string(raw)
	}
	return kind(raw)
}
