package client

import (
	"errors"
	"fmt"

	"github.com/coder/websocket"
)

var (
	// ErrClosed is returned by every call after Close or Abort, and by those that waited then. What a waiting call
	// asked for may or may not have happened.
	ErrClosed = errors.New("client: closed")
	// ErrTimeout is returned when the hub did not answer a frame within Options.Timeout. What the frame asked for may
	// or may not have happened; a publish with an id can be repeated safely.
	ErrTimeout = errors.New("client: the hub did not answer in time")
	// ErrStalled ends a connection whose hub takes no more bytes while more than 64 MiB wait to be sent.
	ErrStalled = errors.New("client: the hub does not read")
	// ErrPayload is returned by a publish whose payload is not valid JSON. Nothing was sent.
	ErrPayload = errors.New("client: the payload is not valid JSON")
)

// Error is an ERR frame: the hub refused what was asked.
type Error struct {
	// Code is one of the protocol's codes, such as "forbidden".
	Code string
	// Msg says what is wrong.
	Msg string
}

// Error gives code and message.
func (e *Error) Error() string { return e.Code + ": " + e.Msg }

// CloseError says with which WebSocket close code the hub ended the connection.
type CloseError struct {
	Code   int
	Reason string
}

// Error gives code and reason.
func (e *CloseError) Error() string {
	return fmt.Sprintf("client: the hub closed the connection: %d %s", e.Code, e.Reason)
}

// Reconnect reports whether connecting again makes sense: the hub is going away, restarting or overloaded. Otherwise
// the same client would be closed for the same reason again.
func (e *CloseError) Reconnect() bool {
	for _, code := range reconnectCodes {
		if e.Code == int(code) {
			return true
		}
	}
	return e.Code >= firstReconnectCode && e.Code <= lastReconnectCode
}

var reconnectCodes = [...]websocket.StatusCode{
	websocket.StatusGoingAway, websocket.StatusServiceRestart, websocket.StatusTryAgainLater,
	websocket.StatusInternalError, websocket.StatusAbnormalClosure,
}

// The hub's own close codes: those of this range mean reconnect, the others give up.
const (
	firstReconnectCode = 4000
	lastReconnectCode  = 4099
)
