package jetstream

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
)

// Header names on stored messages. Nats-* are the server's, Event-* the hub's.
const (
	headerMsgID        = "Nats-Msg-Id"
	headerSource       = "Nats-Stream-Source"
	headerExpectSubSeq = "Nats-Expected-Last-Subject-Sequence"
	headerMarker       = "Nats-Marker-Reason"
	headerOperation    = "KV-Operation"
	headerID           = "Event-Id"
	headerTS           = "Event-Ts"
	headerSID          = "Event-Sid"
	headerTags         = "Event-Tags"
	headerCausedBy     = "Event-Caused-By"
)

// tombstone is the KV-Operation of an event that removes its key. Native KV clients know it.
const tombstone = "DEL"

// Bounds of an event's own headers and lists, from the protocol.
const (
	maxHeaders     = 64
	maxHeaderBytes = 16 << 10
	maxSafeInteger = 1<<53 - 1
)

func badOptions(format string, args ...any) *Error {
	return &Error{Code: CodeBadOptions, Msg: fmt.Sprintf(format, args...)}
}

// Validate checks the options as a publish would, without a bus. It returns a bad_options *Error or
// nil. Publisher.Admit also checks what the topic requires.
func (o *PublishOptions) Validate() error {
	if o.ID != "" {
		if err := validateID(o.ID); err != nil {
			return err
		}
	}
	if o.HasTS && (o.TS < 0 || o.TS > maxSafeInteger) {
		return badOptions("opts.ts is %d: it is epoch milliseconds, 0 to 2^53-1", o.TS)
	}
	if o.Key != "" {
		if len(o.Key) > MaxKey {
			return badOptions("opts.key has %d bytes, at most %d are allowed", len(o.Key), MaxKey)
		}
		if !utf8.ValidString(o.Key) {
			return badOptions("opts.key is not valid UTF-8")
		}
	}
	if o.ExpectKeySequence != nil && o.Key == "" {
		return badOptions("an expected key sequence needs a key")
	}
	if o.Tombstone && o.Key == "" {
		return badOptions("opts.tombstone removes a key: give opts.key")
	}
	if o.SID != "" {
		if err := headerValue(o.SID); err != nil {
			return badOptions("opts.sid %v", err)
		}
	}
	return o.validateHeaders()
}

func (o *PublishOptions) validateHeaders() error {
	if len(o.Headers) > maxHeaders {
		return badOptions("opts.headers has %d headers, at most %d are allowed", len(o.Headers), maxHeaders)
	}
	size := len(o.SID)
	for name, value := range o.Headers {
		if !token(name) {
			return badOptions("opts.headers has a name that is not an RFC 9110 token: letters, digits and !#$%%&'*+-.^_`|~ are allowed")
		}
		if reserved(name) {
			return badOptions("opts.headers.%s is reserved: names that begin with Nats-, Event- or KV- cannot be set", name)
		}
		if err := headerValue(value); err != nil {
			return badOptions("opts.headers.%s %v", name, err)
		}
		size += len(name) + len(value)
	}
	for _, list := range []struct {
		name   string
		values []string
	}{{"tags", o.Tags}, {"caused_by", o.CausedBy}} {
		for _, v := range list.values {
			if len(v) > 1024 {
				return badOptions("opts.%s has an entry of %d bytes, at most 1024 are allowed", list.name, len(v))
			}
		}
		if len(list.values) > 0 {
			size += len(jsonList(list.values))
		}
	}
	if size > maxHeaderBytes {
		return badOptions("opts.headers, sid, tags and caused_by have %d bytes together, at most %d are allowed", size, maxHeaderBytes)
	}
	return nil
}

func validateID(id string) error {
	if err := text(id, maxIDLen); err != nil {
		return badOptions("opts.id %v", err)
	}
	if strings.TrimSpace(id) != id {
		return badOptions("opts.id begins or ends with a blank")
	}
	if _, _, ok := nativeID(id); ok {
		return badOptions("opts.id has the form <stream>@<sequence>, which names events without an id: choose another")
	}
	return nil
}

// nativeID takes <stream>@<sequence> apart.
func nativeID(id string) (stream string, seq uint64, ok bool) {
	at := strings.LastIndexByte(id, '@')
	if at <= 0 {
		return "", 0, false
	}
	seq, err := strconv.ParseUint(id[at+1:], 10, 64)
	return id[:at], seq, err == nil
}

// token reports whether s is an RFC 9110 token. A name with a blank or a byte beyond ASCII would
// make the stored message undecodable for NATS clients.
func token(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !plain(c) && (c < 'A' || c > 'Z') && strings.IndexByte("!#$%&'*+.^`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

func reserved(name string) bool {
	for _, prefix := range []string{"Nats-", "Event-", "KV-"} {
		if len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	return false
}

func headerValue(v string) error {
	for i := range len(v) {
		if v[i] < ' ' || v[i] == 0x7f {
			return fmt.Errorf("has a control character at byte %d", i)
		}
	}
	if strings.Trim(v, " ") != v {
		return errors.New("begins or ends with a blank")
	}
	return nil
}

// onlyID reports that the event's id is all that its message header has to say.
func (o *PublishOptions) onlyID() bool {
	return !o.HasTS && o.SID == "" && len(o.Tags) == 0 && len(o.CausedBy) == 0 && len(o.Headers) == 0 && o.ExpectKeySequence == nil && !o.Tombstone && o.origin.stream == ""
}

// header builds the message header of an event. given says that the publisher chose its id.
func (o *PublishOptions) header(t *topicInfo, id string, given bool) nats.Header {
	h := make(nats.Header)
	switch {
	case !given: // t may be nil
		h[headerID] = []string{id}
	case t.stream.family:
		// The server's duplicate window spans the stream, so in a family the topic is part of the
		// id.
		h[headerID] = []string{id}
		h[headerMsgID] = []string{t.name + ":" + id}
	default:
		h[headerMsgID] = []string{id}
	}
	if o.HasTS {
		h[headerTS] = []string{strconv.FormatInt(o.TS, 10)}
	}
	if o.SID != "" {
		h[headerSID] = []string{o.SID}
	}
	if len(o.Tags) > 0 {
		h[headerTags] = []string{jsonList(o.Tags)}
	}
	if len(o.CausedBy) > 0 {
		h[headerCausedBy] = []string{jsonList(o.CausedBy)}
	}
	if o.ExpectKeySequence != nil {
		h[headerExpectSubSeq] = []string{strconv.FormatUint(*o.ExpectKeySequence, 10)}
	}
	if o.Tombstone {
		h[headerOperation] = []string{tombstone}
	}
	if o.origin.stream != "" {
		h[headerOriginal] = []string{o.origin.String()}
	}
	for name, value := range o.Headers {
		h[name] = []string{value}
	}
	return h
}

// jsonList is a JSON array of strings; the encoder escapes control characters, so it is a legal
// header value.
func jsonList(values []string) string {
	b, _ := json.Marshal(values) //nolint:errchkjson // strings always marshal
	return string(b)
}

// readHeader fills in what an event's message header says.
func (e *Event) readHeader(h nats.Header) {
	e.TS = e.StoredAt / 1e6
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		value := values[0]
		switch name {
		case headerOperation:
			e.Tombstone = e.Tombstone || value == tombstone || value == "PURGE"
		case headerMarker:
			e.Tombstone = true // the server put it where a limit removed the last value
		case headerTS:
			if ts, err := strconv.ParseInt(value, 10, 64); err == nil && ts >= 0 && ts <= maxSafeInteger {
				e.TS = ts
			}
		case headerSID:
			e.SID = value
		case headerTags:
			// a native publisher's fault leaves the field unset
			_ = json.Unmarshal([]byte(value), &e.Tags)
		case headerCausedBy:
			_ = json.Unmarshal([]byte(value), &e.CausedBy)
		default:
			if reserved(name) {
				continue
			}
			if e.Headers == nil {
				e.Headers = make(map[string]string, min(len(h), math.MaxInt16))
			}
			e.Headers[name] = strings.Join(values, ", ")
		}
	}
	e.ID = storedID(h, e.Stream, e.Sequence)
}

// storedID returns the id of the event in a message of a stream.
func storedID(h nats.Header, stream string, seq uint64) string {
	for _, name := range [...]string{headerID, headerMsgID} {
		values := h[name]
		if len(values) > 0 && values[0] != "" {
			return values[0]
		}
		if values != nil {
			return nativeIDOf(stream, seq)
		}
	}
	if values := h[headerSource]; len(values) > 0 {
		from, rest, _ := strings.Cut(values[0], " ")
		if seq, _, _ := strings.Cut(rest, " "); seq != "" {
			return from + "@" + seq
		}
	}
	return nativeIDOf(stream, seq)
}

// nativeIDOf is the id of an event that its publisher gave none.
func nativeIDOf(stream string, seq uint64) string {
	return stream + "@" + strconv.FormatUint(seq, 10)
}
