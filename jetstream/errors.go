package jetstream

import "errors"

// Codes that the bus gives its errors. They are the codes of the wire protocol; the table that
// turns a code into an HTTP status and a retry rule is facade's.
const (
	CodeBadTopic        = "bad_topic"
	CodeBadGroup        = "bad_group"
	CodeBadOptions      = "bad_options"
	CodeUnknownID       = "unknown_id"
	CodePublishFailed   = "publish_failed"
	CodeSubscribeFailed = "subscribe_failed"
	CodeOverloaded      = "overloaded"
	CodeRateLimited     = "rate_limited"
	CodeInternal        = "internal"
)

// Error is what the bus returns for everything a client may be told about.
// Code and Msg are safe to show; Err is for operators only and must not reach a client.
type Error struct {
	// Code is one of the Code constants.
	Code string
	// Msg says what is wrong, where, and what to do.
	Msg string
	// Err is the cause, or nil.
	Err error
}

// Error gives the message and, for operators, the cause.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Code + ": " + e.Msg
	}
	return e.Code + ": " + e.Msg + ": " + e.Err.Error()
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

var (
	// ErrClosed is returned by calls on a Bus, its Publishers and its handles after Bus.Close.
	// Nothing was sent or changed.
	ErrClosed = errors.New("jetstream: closed")
	// ErrNotLeased is returned when a Delivery is settled or extended after its lease has ended (by
	// a settlement, by expiry, or because the hub was cut off from NATS). The event is not touched:
	// another member may hold it.
	ErrNotLeased = errors.New("jetstream: the lease has ended")
	// ErrKeyChanged is returned by a publish with PublishOptions.ExpectKeySequence when another
	// event of that key was stored in between. Nothing was stored.
	ErrKeyChanged = errors.New("jetstream: the key has changed")
	// ErrTooLarge is the cause of the *Error for a payload, or a value of a Collection, that is
	// over the limit. Nothing was stored, and no other try will store it.
	ErrTooLarge = errors.New("jetstream: too large")
	// ErrNotCompacted is the cause of the *Error for a topic that keeps no newest event of each
	// key.
	ErrNotCompacted = errors.New("jetstream: not compacted")
	// ErrNotFound is returned where a topic, group or event that was asked for does not exist.
	ErrNotFound = errors.New("jetstream: not found")
)

// Refused reports whether err, of a publish, is the stream's own answer that it does not take the
// event (it is full, or the event is too large for it): nothing was stored, and NATS is there.
func Refused(err error) bool {
	_, ok := errors.AsType[*apiError](err)
	return ok
}
