package main

import (
	"container/list"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"time"
)

// waitingLimit is the name under which a full waiting room is counted.
const waitingLimit = "waiting_connections"

// fairWait is how long a connection may wait in a full room before it has to go for another: honest clients need less.
const fairWait = time.Second

// waitingRoom bounds the connections of one listener that have not sent a whole request yet, the TLS handshake included, or
// that are idle between two. When there is one too many, the one that has waited longest is closed, so that a flood of
// connections that send nothing, or send it slowly, makes room itself. While none has waited for as long as fair, because
// many honest clients come at once, it is the new one that is closed.
//
// Requests that are served, and WebSockets, have limits of their own.
type waitingRoom struct {
	limit   int
	fair    time.Duration
	reached func(limit string)

	mu sync.Mutex
	// order holds those that wait, the longest waiting first; at finds their places.
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

// track is the ConnState of a server.
func (w *waitingRoom) track(conn net.Conn, state http.ConnState) {
	if out := w.move(conn, state, time.Now()); out != nil {
		w.reached(waitingLimit)
		if over, ok := out.(*tls.Conn); ok {
			out = over.NetConn() // TLS would say goodbye, and wait for a peer that does not read
		}
		_ = out.Close() // its server notices, and calls track
	}
}

// move notes the state of a connection, and returns the one that has to go.
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
