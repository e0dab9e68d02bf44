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

// The states of a record.
const (
	Pending Status = "pending" // waits to be claimed
	Claimed Status = "claimed" // held by a drainer
	Sent    Status = "sent"    // stored in the stream
	Errored Status = "error"   // parked: waits for Retry or Purge
)

// DefaultMaxPayload is the default largest payload in bytes that Add accepts, equal to the default
// of the bus.
const DefaultMaxPayload = 1 << 20

// Record is an event in an outbox.
type Record struct {
	// ID becomes the id of the event: 1 to 128 bytes, without control characters and without
	// surrounding spaces. It identifies the record within its topic. If empty, Add sets a UUIDv7.
	ID string `json:"id"`
	// Topic is the topic of the event. Required.
	Topic string `json:"topic"`
	// Key is the key of the event: up to 512 bytes of UTF-8 without NUL. Records without a key have
	// no order.
	Key string `json:"key,omitempty"`
	// Type names the kind of event and becomes its header "type". Optional.
	Type string `json:"type,omitempty"`
	// Payload is any JSON value and is stored byte for byte. An empty Payload means null.
	Payload json.RawMessage `json:"payload"`
	// Headers, SID, Tags, CausedBy, and Tombstone have the meaning of the jetstream.PublishOptions
	// fields of the same names.
	Headers   map[string]string `json:"headers,omitempty"`
	SID       string            `json:"sid,omitempty"`
	Tags      []string          `json:"tags,omitempty"`
	CausedBy  []string          `json:"caused_by,omitempty"`
	Tombstone bool              `json:"tombstone,omitempty"`
	// TS is the ts of the event in epoch milliseconds. If 0, Add sets the current time.
	TS int64 `json:"ts"`

	// The store sets the fields below. Times are epoch milliseconds of the store's clock, except
	// PublishBegan; 0 means never.

	// Sequence orders the records of a store. Records of a lane with equal sequences are ordered by
	// id.
	Sequence int64  `json:"sequence"`
	Status   Status `json:"status"`
	// ClaimedBy is the drainer that holds the record until LeaseUntil, unless the drainer renews
	// the lease.
	ClaimedBy  string `json:"claimed_by,omitempty"`
	LeaseUntil int64  `json:"lease_until,omitempty"`
	// Attempts counts failed attempts. LastErr is the error of the last one. Failures while NATS is
	// unavailable do not count.
	Attempts int    `json:"attempts"`
	LastErr  string `json:"last_err,omitempty"`
	// NextAt is the earliest time of the next claim.
	NextAt int64 `json:"next_at,omitempty"`
	// PublishBegan is the earliest time, by the NATS clock, at which the event may have been
	// stored.
	PublishBegan int64 `json:"publish_began,omitempty"`
	AddedAt      int64 `json:"added_at"`
	SentAt       int64 `json:"sent_at,omitempty"`
	// TooLarge names the field that was left empty because its stored value exceeds the limit. It
	// is empty if no field was.
	TooLarge string `json:"too_large,omitempty"`

	undecodable error // why a row written without Add cannot be published
}

// prepare fills in omitted fields and rejects a record that the bus would refuse, before the record
// can spoil the caller's transaction.
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
		return bad("the key contains a NUL, which databases cannot store")
	}
	if r.Type != "" {
		for name := range r.Headers {
			if strings.EqualFold(name, typeHeader) {
				return bad("the type is given twice, as a field and as the header %s", name)
			}
		}
	}
	if field := r.noUTF8(); field != "" {
		return bad("%s is not valid UTF-8", field)
	}
	opts := r.options()
	if err := opts.Validate(); err != nil {
		return err
	}
	if r.Tombstone && !bytes.Equal(r.Payload, []byte("null")) {
		return bad("a tombstone removes a key; its payload must be null or omitted")
	}
	if len(r.Payload) > maxPayload {
		return &jetstream.Error{Code: jetstream.CodePublishFailed, Msg: fmt.Sprintf("the payload has %d bytes, at most %d are allowed", len(r.Payload), maxPayload), Err: jetstream.ErrTooLarge}
	}
	if !jetstream.ValidPayload(r.Payload) {
		return bad("%v", errBadPayload)
	}
	return nil
}

var errBadPayload = errors.New("the payload is not JSON in UTF-8, or is nested too deeply")

// noUTF8 returns the name of a field that is not valid UTF-8, or "". A database either rejects such
// text, and the transaction with it, or stores something else. The bus already rejects ids and keys
// that are not UTF-8, and header names that are not ASCII.
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

// options returns the options for publishing the record.
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
		Yield: true, // a record that waits is not lost
	}
}

// lane returns the unit of order: the topic and key, or a lane of its own for a record without a
// key. The SQL tables have the same value as a column. A topic contains no slash, so lanes never
// collide, and all lanes of a topic share one of two prefixes that no other topic uses.
func (r *Record) lane() string {
	if r.Key == "" {
		return "/" + r.Topic + "/" + r.ID
	}
	return r.Topic + "/" + r.Key
}

// ref identifies a record within a store.
type ref struct{ topic, id string }

func (r *Record) ref() ref { return ref{r.Topic, r.ID} }

// String returns topic/id. A topic contains no slash, so different refs are different strings.
func (r ref) String() string { return r.topic + "/" + r.id }

func refs(records []*Record) []ref {
	list := make([]ref, len(records))
	for i, r := range records {
		list[i] = r.ref()
	}
	return list
}

// attributes holds the fields of a record without a column of their own.
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
