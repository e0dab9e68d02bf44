package wire

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

var (
	// ErrClosed is returned by every call after Close or Abort, and by calls that were waiting
	// then. Whether the hub did what a waiting call requested is unknown.
	ErrClosed = errors.New("wire: closed")
	// ErrTimeout is returned when the hub did not answer a frame within Options.Timeout. Whether
	// the hub did what the frame requested is unknown. A publish with an id can be repeated safely.
	ErrTimeout = errors.New("wire: the hub did not answer in time")
	// ErrStalled ends a connection whose hub takes no bytes while more than 64 MiB are unsent.
	ErrStalled = errors.New("wire: the hub does not read")
	// ErrPayload is returned by a publish whose payload is not valid JSON. Nothing was sent.
	ErrPayload = errors.New("wire: the payload is not valid JSON")
)

// Error is an ERR frame: the hub refused a request.
type Error struct {
	// Code is one of the protocol's codes, such as "forbidden".
	Code string
	// Msg says what is wrong.
	Msg string
	// Permanent reports that the hub says that the same request fails again, whatever Code means.
	Permanent bool
}

// Error returns code and message.
func (e *Error) Error() string { return e.Code + ": " + e.Msg }

// CloseError is the WebSocket close code with which the hub ended the connection.
type CloseError struct {
	Code   int
	Reason string
}

// Error returns code and reason.
func (e *CloseError) Error() string {
	return fmt.Sprintf("wire: the hub closed the connection: %d %s", e.Code, e.Reason)
}

// Reconnect reports whether reconnecting makes sense: the connection did not end with one of the
// hub's codes that mean give up, after which the hub would close the same client for the same
// reason again.
func (e *CloseError) Reconnect() bool { return e.Code < firstGiveUpCode || e.Code > lastGiveUpCode }

// maxRetryAfter is the longest pause that the hub may ask for.
const maxRetryAfter = time.Minute

// RetryAfter returns how long the hub asks the client to wait before it reconnects, or 0. The hub
// says so to clients with the capability "retry_after".
func (e *CloseError) RetryAfter() time.Duration {
	_, after, found := strings.Cut(e.Reason, " retry_after_ms=")
	ms, err := strconv.ParseUint(after, 10, 32)
	if !found || err != nil {
		return 0
	}
	return min(time.Duration(ms)*time.Millisecond, maxRetryAfter)
}

// The range of the hub's close codes that mean give up.
const (
	firstGiveUpCode = 4100
	lastGiveUpCode  = 4199
)
