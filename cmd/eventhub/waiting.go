package main

import (
	"container/list"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// waitingLimit is the limit name under which a full waiting room is counted.
const waitingLimit = "waiting_connections"

// fairWait is how long a connection may wait in a full room before a new connection may replace it.
// Honest clients need less.
const fairWait = time.Second

// waitingRoom limits the connections of one listener that have no current request: those that have
// not sent a whole request yet, including the TLS handshake, and those that are idle between
// requests. A connection belongs to the owner of the token of its last request. A connection whose
// last request had no valid token, or that has had none, is a stranger.
//
// A stranger beyond the limit closes the stranger that has waited longest, so that a flood of
// silent or slow connections displaces itself, and no client with a token. If no stranger has
// waited for fairWait, for example because many honest clients connect at once, the new connection
// is closed instead. Owners of tokens have at most half of the room, where they take the places of
// strangers. One more closes the oldest connection of the owner who has most.
//
// Active requests and WebSockets have separate limits. All methods may be called concurrently.
type waitingRoom struct {
	limit   int
	fair    time.Duration
	reached func(limit string)

	mu       sync.Mutex
	visitors map[net.Conn]*visitor // all connections of the listener, but for WebSockets
	queues   map[string]*list.List // of the waiting *visitor by owner, longest waiting first
	waiting  int
}

// visitor is a connection.
type visitor struct {
	conn  net.Conn
	owner atomic.Pointer[string] // of the last request; nil for a stranger

	// Under the lock of the room.
	since time.Time
	queue string        // where it waits
	place *list.Element // nil while a request is served
}

func newWaitingRoom(limit int, reached func(string)) *waitingRoom {
	return &waitingRoom{
		limit: limit, fair: fairWait, reached: reached,
		visitors: make(map[net.Conn]*visitor), queues: make(map[string]*list.List),
	}
}

// visitorKey is that of a request's *visitor in its context.
type visitorKey struct{}

// welcome is the ConnContext callback of the server.
func (w *waitingRoom) welcome(ctx context.Context, conn net.Conn) context.Context {
	v := &visitor{conn: conn}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.visitors[conn] = v
	return context.WithValue(ctx, visitorKey{}, v)
}

// strange has each request count as one without a token until ownedBy says otherwise.
func strange(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if v, ok := r.Context().Value(visitorKey{}).(*visitor); ok {
			v.owner.Store(nil)
		}
		next.ServeHTTP(w, r)
	})
}

// ownedBy notes that a request has a valid token, and of which owner.
func ownedBy(r *http.Request, owner string) {
	if v, ok := r.Context().Value(visitorKey{}).(*visitor); ok {
		v.owner.Store(&owner)
	}
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
	v := w.visitors[conn]
	if v == nil {
		return nil
	}
	w.leaveLocked(v)
	switch state {
	case http.StateActive:
		return nil
	case http.StateClosed, http.StateHijacked:
		delete(w.visitors, conn)
		return nil
	case http.StateNew, http.StateIdle:
	}
	name := "" // of strangers: owners have none that is empty
	if owner := v.owner.Load(); owner != nil {
		name = *owner
	}
	if over := w.overLocked(name); over != nil {
		if name == "" && now.Sub(over.since) < w.fair {
			return conn
		}
		w.leaveLocked(over)
		out = over.conn
	}
	if w.queues[name] == nil {
		w.queues[name] = list.New()
	}
	v.since, v.queue, v.place = now, name, w.queues[name].PushBack(v)
	w.waiting++
	return out
}

// overLocked returns the visitor that has to make room for one more of an owner, or nil.
func (w *waitingRoom) overLocked(owner string) *visitor {
	oldest := func(name string) *visitor {
		v, _ := w.queues[name].Front().Value.(*visitor)
		return v
	}
	size := func(name string) int {
		if w.queues[name] == nil {
			return 0
		}
		return w.queues[name].Len()
	}
	strangers := size("")
	if known := w.waiting - strangers; owner != "" && known >= max(w.limit/2, 1) {
		most := owner
		for name, queue := range w.queues {
			if name != "" && queue.Len() > size(most) {
				most = name
			}
		}
		return oldest(most)
	}
	if w.waiting < w.limit || strangers == 0 {
		return nil
	}
	return oldest("")
}

// leaveLocked takes a visitor that waits out of the room.
func (w *waitingRoom) leaveLocked(v *visitor) {
	if v.place == nil {
		return
	}
	queue := w.queues[v.queue]
	queue.Remove(v.place)
	v.place = nil
	w.waiting--
	if queue.Len() == 0 {
		delete(w.queues, v.queue)
	}
}
