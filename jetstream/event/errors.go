package event

import (
	"errors"
	"fmt"
	"time"
)

// Codes of errors of the bus. They are the codes of the wire protocol. Package facade has the table
// of their HTTP statuses and retry rules.
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
	CodeTopicFull       = "topic_full"
	CodeStorageLow      = "storage_low"
)

// Error is an error that may be shown to a client. Code and Msg are safe to show. Err is for
// operators only and must not reach a client.
type Error struct {
	// Code is one of the Code constants.
	Code string
	// Msg says what is wrong, where, and what to do.
	Msg string
	// Permanent reports that the same request fails again, although Code is one of those that may
	// succeed later.
	Permanent bool
	// Wait is the time after which the same request may succeed; 0 when unknown.
	Wait time.Duration
	// Err is the cause, or nil.
	Err error
}

// Error returns the message and, for operators, the cause.
func (e *Error) Error() string {
	if e.Err == nil {
		return e.Code + ": " + e.Msg
	}
	return e.Code + ": " + e.Msg + ": " + e.Err.Error()
}

// Unwrap returns the cause.
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
	// ErrTooLarge is the cause of the *Error for a payload, or a value of a Collection, that
	// exceeds the limit. Nothing was stored, and a retry fails as well.
	ErrTooLarge = errors.New("jetstream: too large")
	// ErrNotCompacted is the cause of the *Error for a topic without compaction.
	ErrNotCompacted = errors.New("jetstream: not compacted")
	// ErrNoStream is the cause of the *Error when the stream of a topic cannot be made: the server
	// refuses it, or the hub knows as many streams as it may (Limits.Topics). Nothing was stored.
	ErrNoStream = errors.New("jetstream: stream cannot be made")
	// ErrNotFound is returned when the requested topic, group or event does not exist.
	ErrNotFound = errors.New("jetstream: not found")
	// ErrNoTopic is the ErrNotFound of requests about several things of which the topic is what
	// does not exist.
	ErrNoTopic = fmt.Errorf("%w: no such topic", ErrNotFound)
)

// BadOptions returns a bad_options *Error for a mistake of the caller.
func BadOptions(format string, args ...any) *Error {
	return &Error{Code: CodeBadOptions, Msg: fmt.Sprintf(format, args...)}
}
