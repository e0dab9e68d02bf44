package outbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"eventhub/jetstream"
)

// Status is the state of a record.
type Status string

// The states.
const (
	Pending Status = "pending" // waits to be claimed
	Claimed Status = "claimed" // a drainer has it
	Sent    Status = "sent"    // it is in the stream
	Errored Status = "error"   // it was given up, and waits for Retry or Purge
)

// DefaultMaxPayload is the largest payload in bytes that Add takes unless it is told otherwise: that of the bus.
const DefaultMaxPayload = 1 << 20

// Record is an event in an outbox.
type Record struct {
	// ID becomes the event's id. Empty: Add makes a UUIDv7. 1..128 bytes, no control characters, no outer blanks.
	ID string `json:"id"`
	// Topic is where the event goes. Required.
	Topic string `json:"topic"`
	// Key is the event's key, any UTF-8 of 1..512 bytes without NUL, or "" for none: rows without a key have no order.
	Key string `json:"key,omitempty"`
	// Type, if not "", names the kind of event. It becomes the header "type".
	Type string `json:"type,omitempty"`
	// Payload is any JSON; empty is null. It is kept byte for byte.
	Payload json.RawMessage `json:"payload"`
	// Headers, SID, Tags, CausedBy and Tombstone are those of jetstream.PublishOptions.
	Headers   map[string]string `json:"headers,omitempty"`
	SID       string            `json:"sid,omitempty"`
	Tags      []string          `json:"tags,omitempty"`
	CausedBy  []string          `json:"caused_by,omitempty"`
	Tombstone bool              `json:"tombstone,omitempty"`
	// TS is the event's ts in epoch milliseconds. 0: the moment of Add.
	TS int64 `json:"ts"`

	// What follows is the store's. All times are in epoch milliseconds of the store's clock; 0: never.

	// Sequence orders the rows of a store; those of a lane that have the same one follow each other by their ids.
	Sequence int64  `json:"sequence"`
	Status   Status `json:"status"`
	// ClaimedBy is the drainer that has it, until LeaseUntil unless it renews the lease.
	ClaimedBy  string `json:"claimed_by,omitempty"`
	LeaseUntil int64  `json:"lease_until,omitempty"`
	// Attempts counts the tries that failed, LastErr says why the last one did. While NATS is away nothing is counted.
	Attempts int    `json:"attempts"`
	LastErr  string `json:"last_err,omitempty"`
	// NextAt is when it may be claimed again.
	NextAt int64 `json:"next_at,omitempty"`
	// PublishBegan is since when it may be in the stream, by the clock of NATS.
	PublishBegan int64 `json:"publish_began,omitempty"`
	AddedAt      int64 `json:"added_at"`
	SentAt       int64 `json:"sent_at,omitempty"`
	// TooLarge, if not "", says which field is empty here because the store has too much of it.
	TooLarge string `json:"too_large,omitempty"`

	undecodable error // why a row that others wrote cannot be published
}

// prepare fills in what the caller left out, and says what the bus would refuse, before the caller's transaction is spoilt.
func (r *Record) prepare(maxPayload int) error {
	if r.ID == "" {
		id, err := uuid.NewV7()
		if err != nil {
			return fmt.Errorf("outbox: make an id: %w", err)
		}
		r.ID = id.String()
	}
	if len(r.Payload) == 0 {
		r.Payload = json.RawMessage("null")
	}
	if r.TS == 0 {
		r.TS = time.Now().UnixMilli()
	}
	if err := r.check(maxPayload); err != nil {
		return fmt.Errorf("outbox: record %q: %w", r.ID, err)
	}
	return nil
}

func (r *Record) check(maxPayload int) error {
	if err := jetstream.ValidTopic(r.Topic); err != nil {
		return err
	}
	bad := func(format string, args ...any) error {
		return &jetstream.Error{Code: jetstream.CodeBadOptions, Msg: fmt.Sprintf(format, args...)}
	}
	if strings.IndexByte(r.Key, 0) >= 0 {
		return bad("the key has a NUL, which databases cannot keep")
	}
	if r.Type != "" {
		for name := range r.Headers {
			if strings.EqualFold(name, typeHeader) {
				return bad("the type is given twice: as such, and as the header %s", name)
			}
		}
	}
	if field := r.noUTF8(); field != "" {
		return bad("%s is no valid UTF-8", field)
	}
	opts := r.options()
	if err := opts.Validate(); err != nil {
		return err
	}
	if r.Tombstone && !bytes.Equal(r.Payload, []byte("null")) {
		return bad("a tombstone removes a key: the payload must be null, or left out")
	}
	if len(r.Payload) > maxPayload {
		return &jetstream.Error{Code: jetstream.CodePublishFailed, Msg: fmt.Sprintf("the payload has %d bytes, at most %d are allowed", len(r.Payload), maxPayload), Err: jetstream.ErrTooLarge}
	}
	if !jetstream.ValidPayload(r.Payload) {
		return bad("%v", errBadPayload)
	}
	return nil
}

var errBadPayload = errors.New("the payload is no JSON in UTF-8, or is nested too deeply")

// noUTF8 names a field that is no valid UTF-8, which databases either refuse, with all of the transaction, or keep as
// something else. The bus refuses ids and keys of that kind, and names of headers that are not ASCII.
func (r *Record) noUTF8() string {
	switch bad := func(s string) bool { return !utf8.ValidString(s) }; {
	case bad(r.Type):
		return "the type"
	case bad(r.SID):
		return "sid"
	case slices.ContainsFunc(r.Tags, bad):
		return "an entry of tags"
	case slices.ContainsFunc(r.CausedBy, bad):
		return "an entry of caused_by"
	}
	for name, value := range r.Headers {
		if !utf8.ValidString(value) {
			return "the header " + strings.ToValidUTF8(name, "\uFFFD")
		}
	}
	return ""
}

const typeHeader = "type"

// options are what the record is published with.
func (r *Record) options() jetstream.PublishOptions {
	headers := r.Headers
	if r.Type != "" {
		headers = make(map[string]string, len(r.Headers)+1)
		for name, value := range r.Headers {
			headers[name] = value
		}
		headers[typeHeader] = r.Type
	}
	return jetstream.PublishOptions{
		ID: r.ID, Key: r.Key, TS: r.TS, HasTS: true, SID: r.SID, Headers: headers, Tags: r.Tags, CausedBy: r.CausedBy, Tombstone: r.Tombstone,
	}
}

// lane is what is published in order: a topic and key, or a record without a key for itself. The SQL tables have the same as
// a column. No topic has a slash in it, so that no two lanes are the same, and those of a topic have two beginnings that are
// only theirs.
func (r *Record) lane() string {
	if r.Key == "" {
		return "/" + r.Topic + "/" + r.ID
	}
	return r.Topic + "/" + r.Key
}

// attributes are the fields of a record that have no column of their own.
type attributes struct {
	SID       string   `json:"sid,omitempty"`
	Tags      []string `json:"tags,omitempty"`
	CausedBy  []string `json:"caused_by,omitempty"`
	Tombstone bool     `json:"tombstone,omitempty"`
}

func (r *Record) attributes() (string, error) {
	if r.SID == "" && len(r.Tags) == 0 && len(r.CausedBy) == 0 && !r.Tombstone {
		return "", nil
	}
	b, err := json.Marshal(attributes{r.SID, r.Tags, r.CausedBy, r.Tombstone})
	return string(b), err
}

func (r *Record) setAttributes(s string) error {
	if s == "" {
		return nil
	}
	var a attributes
	if err := json.Unmarshal([]byte(s), &a); err != nil {
		return err
	}
	r.SID, r.Tags, r.CausedBy, r.Tombstone = a.SID, a.Tags, a.CausedBy, a.Tombstone
	return nil
}
