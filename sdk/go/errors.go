package eventhub

import (
	"context"
	"errors"

	"eventhub/sdk/go/wire"
)

// Codes of the client itself. All other codes are the hub's.
const (
	// CodeAborted: the context of the call ended.
	CodeAborted = "aborted"
	// CodeBufferFull: the client holds as many publishes as Options allow.
	CodeBufferFull = "buffer_full"
	// CodeClosed: the client is closed.
	CodeClosed = "closed"
	// CodeConnectTimeout: the hub gave no answer in time.
	CodeConnectTimeout = "connect_timeout"
	// CodeConnectionLost: the connection ended before the answer came.
	CodeConnectionLost = "connection_lost"
	// CodeGaveUp: the hub closed the connection with a code that says to give up, or the address is
	// not usable.
	CodeGaveUp = "gave_up"
	// CodeInvalid: the payload has no JSON form, or its type's Validate refused it.
	CodeInvalid = "invalid"
	// CodeOutcomeUnknown: the event may or may not be stored, and sending it again could store it
	// twice.
	CodeOutcomeUnknown = "outcome_unknown"
)

// clientCodes says whether the same call may succeed later.
var clientCodes = map[string]bool{
	CodeAborted:        false,
	CodeBufferFull:     true,
	CodeClosed:         false,
	CodeConnectTimeout: true,
	CodeConnectionLost: true,
	CodeGaveUp:         false,
	CodeInvalid:        false,
	CodeOutcomeUnknown: false,
}

// hubCodes says whether the same request may succeed later. A test compares it with
// testdata/errors.json.
var hubCodes = map[string]bool{
	"ack_failed":         true,
	"already_subscribed": false,
	"bad_frame":          false,
	"bad_group":          false,
	"bad_handle":         false,
	"bad_json":           false,
	"bad_options":        false,
	"bad_token":          false,
	"bad_topic":          false,
	"events_lost":        false,
	"forbidden":          false,
	"group_reset":        false,
	"internal":           true,
	"jwt_invalid":        false,
	"lease_over":         false,
	"no_token":           false,
	"not_found":          false,
	"not_subscribed":     false,
	"overloaded":         true,
	"publish_failed":     true, // unless the hub says otherwise
	"rate_limited":       true,
	"schema_conflict":    false,
	"schema_invalid":     false,
	"storage_low":        true,
	"subscribe_failed":   true, // likewise
	"token_expired":      false,
	"topic_full":         true,
	"unauthorized":       false,
	"unknown_id":         false,
	"unknown_op":         false,
}

// Error is every failure of this package. Decide by Code and Retryable; Message is for people.
type Error struct {
	// Code is one of the protocol's codes, such as "forbidden", or one of the Code constants.
	Code string
	// Message says what is wrong.
	Message string
	// Retryable reports whether the same call may succeed later.
	Retryable bool
	// Cause is what led to the error, or nil.
	Cause error
}

// Error returns code and message.
func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Unwrap returns the cause. For CodeAborted this is the cause with which the context ended.
func (e *Error) Unwrap() error { return e.Cause }

// newError makes an error whose code decides Retryable.
func newError(code, message string, cause error) *Error {
	return &Error{Code: code, Message: message, Retryable: clientCodes[code] || hubCodes[code], Cause: cause}
}

func aborted(ctx context.Context) *Error {
	cause := context.Cause(ctx)
	return newError(CodeAborted, "the call ended early: "+cause.Error(), cause)
}

func closedError() *Error { return newError(CodeClosed, "the client is closed", nil) }

func unknownOutcome(cause error) *Error {
	return newError(CodeOutcomeUnknown, "the event may or may not be stored: the connection broke before the answer came", cause)
}

// fromWire returns the error of a call. What is no answer of the hub is a lost connection.
func fromWire(err error) *Error {
	if refused, ok := errors.AsType[*wire.Error](err); ok {
		failure := newError(refused.Code, refused.Msg, nil)
		failure.Retryable = failure.Retryable && !refused.Permanent
		return failure
	}
	return newError(CodeConnectionLost, "the connection ended before the answer came", err)
}

// lost reports whether a call failed because its connection ended.
func lost(err error) bool {
	_, answered := errors.AsType[*wire.Error](err)
	return err != nil && !answered
}
