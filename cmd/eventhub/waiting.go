package main

import (
	"container/list"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// waitingLimit is the limit name under which a full waiting room is counted.
const waitingLimit = "waiting_connections"

// fairWait is how long a connection may wait in a full room before a new connection may replace it.
// Honest clients need less.
const fairWait = time.Second

// waitingRoom limits the connections of one listener that have no current request: those that have
// not sent a whole request yet, including the TLS handshake, and those that are idle between
// requests. A connection beyond the limit closes the one that has waited longest, so that a flood
// of silent or slow connections displaces itself. If no connection has waited for fairWait, for
// example because many honest clients connect at once, the new connection is closed instead.
//
// Active requests and WebSockets have separate limits.
type waitingRoom struct {
	limit   int
	fair    time.Duration
	reached func(limit string)

	mu sync.Mutex
	// order holds the waiting connections, longest waiting first. at maps each connection to its
	// element.
	order *list.List
	at    map[net.Conn]*list.Element
}

// waiter is an element of order.
type waiter struct {
	conn  net.Conn
	since time.Time
}

func newWaitingRoom(limit int, reached func(string)) *waitingRoom {
	return &waitingRoom{limit: limit, fair: fairWait, reached: reached, order: list.New(), at: make(map[net.Conn]*list.Element)}
}

// track is the ConnState callback of the server.
func (w *waitingRoom) track(conn net.Conn, state http.ConnState) {
	if out := w.move(conn, state, time.Now()); out != nil {
		w.reached(waitingLimit)
		if over, ok := out.(*tls.Conn); ok {
			// close the raw connection: a TLS close would wait for a peer that does not read
			out = over.NetConn()
		}
		_ = out.Close() // the server notices and calls track again
	}
}

// move records the state of a connection and returns the connection to close, if any.
func (w *waitingRoom) move(conn net.Conn, state http.ConnState, now time.Time) (out net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if place, waits := w.at[conn]; waits {
		w.order.Remove(place)
		delete(w.at, conn)
	}
	if state != http.StateNew && state != http.StateIdle {
		return nil
	}
	if w.order.Len() >= w.limit {
		oldest, _ := w.order.Front().Value.(waiter)
		if now.Sub(oldest.since) < w.fair {
			return conn
		}
		w.order.Remove(w.order.Front())
		delete(w.at, oldest.conn)
		out = oldest.conn
	}
	w.at[conn] = w.order.PushBack(waiter{conn, now})
	return out
}
