package client

import (
	"errors"
	"fmt"

	"github.com/coder/websocket"
)

var (
	// ErrClosed is returned by every call after Close or Abort, and by calls that were waiting
	// then. Whether the hub did what a waiting call requested is unknown.
	ErrClosed = errors.New("client: closed")
	// ErrTimeout is returned when the hub did not answer a frame within Options.Timeout. Whether
	// the hub did what the frame requested is unknown. A publish with an id can be repeated safely.
	ErrTimeout = errors.New("client: the hub did not answer in time")
	// ErrStalled ends a connection whose hub takes no bytes while more than 64 MiB are unsent.
	ErrStalled = errors.New("client: the hub does not read")
	// ErrPayload is returned by a publish whose payload is not valid JSON. Nothing was sent.
	ErrPayload = errors.New("client: the payload is not valid JSON")
)

// Error is an ERR frame: the hub refused a request.
type Error struct {
	// Code is one of the protocol's codes, such as "forbidden".
	Code string
	// Msg says what is wrong.
	Msg string
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
	return fmt.Sprintf("client: the hub closed the connection: %d %s", e.Code, e.Reason)
}

// Reconnect reports whether reconnecting makes sense: the hub is going away, restarting or
// overloaded. Otherwise the hub would close the same client for the same reason again.
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

// The range of the hub's own close codes that mean reconnect. Its other codes mean give up.
const (
	firstReconnectCode = 4000
	lastReconnectCode  = 4099
)
