package native

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

// Names of the headers of stored events. Nats-* are the server's, Event-* the hub's, and KV-* those
// of KV clients.
const (
	HeaderID        = "Event-Id"
	HeaderMsgID     = "Nats-Msg-Id"
	HeaderTS        = "Event-Ts"
	HeaderSID       = "Event-Sid"
	HeaderTags      = "Event-Tags"
	HeaderCausedBy  = "Event-Caused-By"
	HeaderOperation = "KV-Operation"
	HeaderOriginal  = "Event-Original"

	HeaderSource = "Nats-Stream-Source"
	headerMarker = "Nats-Marker-Reason"
)

// Tombstone is the value of HeaderOperation of an event that removes its key. KV clients know it.
const Tombstone = "DEL"

// Bounds of the fields of an event.
const (
	MaxHeaders     = 64
	MaxHeaderBytes = 16 << 10
	MaxTS          = 1<<53 - 1
	maxListEntry   = 1024
)

// Fields are what a publisher says of an event besides its payload.
type Fields struct {
	// ID makes the publish idempotent within the topic's duplicate window. It is 1..128 bytes of
	// UTF-8 without control characters and outer blanks, and not of the form <stream>@<sequence>.
	// Without an ID, the place in the stream names the event.
	ID string
	// TS is the time of the event in epoch milliseconds, if HasTS is set; otherwise the moment of
	// storage counts.
	TS    int64
	HasTS bool
	// Key is any UTF-8 of 1..512 bytes, or "" for none. It is in the subject, not in the header.
	Key string
	// SID, Tags and CausedBy are carried along; their bytes count with those of Headers.
	SID string
	// Headers: names are RFC 9110 tokens, values have no control characters and no outer blanks; at
	// most 64, 16 KiB in all. Nats-*, Event-* and KV-* are reserved in any case.
	Headers  map[string]string
	Tags     []string
	CausedBy []string
	// Tombstone removes Key, which must be set, from a compacted topic.
	Tombstone bool
}

// Check returns an error that names the first field that is not as Fields says.
func (f *Fields) Check() error {
	if f.ID != "" {
		if err := CheckID(f.ID); err != nil {
			return err
		}
	}
	if f.HasTS && (f.TS < 0 || f.TS > MaxTS) {
		return fmt.Errorf("ts is %d: it is epoch milliseconds, 0 to 2^53-1", f.TS)
	}
	if len(f.Key) > MaxKey {
		return fmt.Errorf("key has %d bytes, at most %d are allowed", len(f.Key), MaxKey)
	}
	if !utf8.ValidString(f.Key) {
		return errors.New("key is not valid UTF-8")
	}
	if f.Tombstone && f.Key == "" {
		return errors.New("tombstone removes a key, and there is no key")
	}
	if f.SID != "" {
		if err := checkValue(f.SID); err != nil {
			return fmt.Errorf("sid %w", err)
		}
	}
	return f.checkHeaders()
}

func (f *Fields) checkHeaders() error {
	if len(f.Headers) > MaxHeaders {
		return fmt.Errorf("headers has %d headers, at most %d are allowed", len(f.Headers), MaxHeaders)
	}
	for name, value := range f.Headers {
		if !Token(name) {
			return errors.New("headers has a name that is not an RFC 9110 token: letters, digits and !#$%&'*+-.^_`|~ are allowed")
		}
		if Reserved(name) {
			return fmt.Errorf("headers.%s is reserved: names that begin with Nats-, Event- or KV- cannot be set", name)
		}
		if err := checkValue(value); err != nil {
			return fmt.Errorf("headers.%s %w", name, err)
		}
	}
	for _, list := range []struct {
		name   string
		values []string
	}{{"tags", f.Tags}, {"caused_by", f.CausedBy}} {
		for _, v := range list.values {
			if len(v) > maxListEntry {
				return fmt.Errorf("%s has an entry of %d bytes, at most %d are allowed", list.name, len(v), maxListEntry)
			}
		}
	}
	if size := f.HeaderBytes(); size > MaxHeaderBytes {
		return fmt.Errorf("headers, sid, tags and caused_by have %d bytes together, at most %d are allowed", size, MaxHeaderBytes)
	}
	return nil
}

// HeaderBytes returns the bytes of Headers, SID, Tags and CausedBy, which may be MaxHeaderBytes.
func (f *Fields) HeaderBytes() int {
	size := len(f.SID)
	for name, value := range f.Headers {
		size += len(name) + len(value)
	}
	for _, values := range [...][]string{f.Tags, f.CausedBy} {
		if len(values) > 0 {
			size += len(JSONList(values))
		}
	}
	return size
}

// Header returns the header of a message with these fields for the topic. In the stream of a
// family, the topic is part of the id that the server compares, because the server's duplicate
// window spans the stream. Header does not check the fields.
func (f *Fields) Header(topic string, family bool) nats.Header {
	h := make(nats.Header)
	switch {
	case f.ID == "":
	case family:
		h[HeaderID] = []string{f.ID}
		h[HeaderMsgID] = []string{topic + ":" + f.ID}
	default:
		h[HeaderMsgID] = []string{f.ID}
	}
	if f.HasTS {
		h[HeaderTS] = []string{strconv.FormatInt(f.TS, 10)}
	}
	if f.SID != "" {
		h[HeaderSID] = []string{f.SID}
	}
	if len(f.Tags) > 0 {
		h[HeaderTags] = []string{JSONList(f.Tags)}
	}
	if len(f.CausedBy) > 0 {
		h[HeaderCausedBy] = []string{JSONList(f.CausedBy)}
	}
	if f.Tombstone {
		h[HeaderOperation] = []string{Tombstone}
	}
	for name, value := range f.Headers {
		h[name] = []string{value}
	}
	return h
}

// CheckID returns an error unless id is one that a publisher may give.
func CheckID(id string) error {
	if err := CheckText(id, MaxID); err != nil {
		return fmt.Errorf("id %w", err)
	}
	if strings.TrimSpace(id) != id {
		return errors.New("id begins or ends with a blank")
	}
	if _, _, ok := ParsePlace(id); ok {
		return errors.New("id has the form <stream>@<sequence>, which names events without an id: choose another")
	}
	return nil
}

// simpleID reports whether id is one that CheckID takes, in a moment; most are.
func simpleID(id string) bool {
	for i := range len(id) {
		if c := id[i]; c <= ' ' || c > '~' || c == '@' {
			return false
		}
	}
	return id != "" && len(id) <= MaxID
}

// Place returns the id of an event that its publisher gave none.
func Place(stream string, seq uint64) string {
	return stream + "@" + strconv.FormatUint(seq, 10)
}

// ParsePlace takes an id of the form of Place apart.
func ParsePlace(id string) (stream string, seq uint64, ok bool) {
	at := strings.LastIndexByte(id, '@')
	if at <= 0 {
		return "", 0, false
	}
	seq, err := strconv.ParseUint(id[at+1:], 10, 64)
	return id[:at], seq, err == nil
}

// Token reports whether s is an RFC 9110 token. A header name with a blank or a byte beyond ASCII
// would make the stored message undecodable for NATS clients.
func Token(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !plain(c) && (c < 'A' || c > 'Z') && strings.IndexByte("!#$%&'*+.^`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// Reserved reports whether a header of that name is no header of the event: Nats-*, Event-* and
// KV-*, in any case.
func Reserved(name string) bool {
	for _, prefix := range []string{"Nats-", "Event-", "KV-"} {
		if len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	return false
}

func checkValue(v string) error {
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

// JSONList returns the value of HeaderTags and HeaderCausedBy: a JSON array of strings. The encoder
// escapes control characters, so it is a legal header value.
func JSONList(values []string) string {
	b, _ := json.Marshal(values) //nolint:errchkjson // strings always marshal
	return string(b)
}

// ReadHeader fills in what an event's message header says. Stream, Sequence and StoredAt must be
// set before.
func (e *Event) ReadHeader(h nats.Header) {
	e.TS = e.StoredAt / 1e6
	e.ID = StoredID(h, e.Stream, e.Sequence)
	if len(h) == 1 && h[HeaderID] != nil {
		return // as most events are: to look at each name takes longer than the rest
	}
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		value := values[0]
		switch name {
		case HeaderOperation:
			e.Tombstone = e.Tombstone || value == Tombstone || value == "PURGE"
		case headerMarker:
			e.Tombstone = true // the server put it where a limit removed the last value
		case HeaderTS:
			if ts, err := strconv.ParseInt(value, 10, 64); err == nil && ts >= 0 && ts <= MaxTS {
				e.TS = ts
			}
		case HeaderSID:
			e.SID = value
		case HeaderTags:
			e.Tags = parseList(value)
		case HeaderCausedBy:
			e.CausedBy = parseList(value)
		default:
			if Reserved(name) {
				continue
			}
			if e.Headers == nil {
				e.Headers = make(map[string]string, min(len(h), math.MaxInt16))
			}
			e.Headers[name] = strings.Join(values, ", ")
		}
	}
}

// parseList reads a JSONList. A publisher's fault leaves the field unset.
func parseList(value string) []string {
	var list []string
	if json.Unmarshal([]byte(value), &list) != nil {
		return nil
	}
	return list
}

// StoredID returns the id of the event in a message of a stream. An id that no publisher may give
// (see CheckID), such as one that is not UTF-8, could not be named by a client that settles the
// event. Such an event has the id of one that was published without an id.
func StoredID(h nats.Header, stream string, seq uint64) string {
	for _, name := range [...]string{HeaderID, HeaderMsgID} {
		values := h[name]
		if len(values) > 0 && (simpleID(values[0]) || CheckID(values[0]) == nil) {
			return values[0]
		}
		if values != nil {
			break
		}
	}
	if values := h[HeaderSource]; len(values) > 0 {
		from, rest, _ := strings.Cut(values[0], " ")
		if seq, _, _ := strings.Cut(rest, " "); seq != "" {
			return from + "@" + seq
		}
	}
	return Place(stream, seq)
}
