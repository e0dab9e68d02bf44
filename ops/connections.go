package ops

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"net/http"
	"time"
)

// ConnectionsTopic is the topic that represents the connections of clients in policies. Seeing them
// needs inspect on this topic, and closing one needs admin.
const ConnectionsTopic = "eventhub.connections"

// Bounds of the number of connections in an answer.
const (
	defaultConnections = 100
	maxConnections     = 1000
	// maxConnectionBytes ends a page of connections: a page has the connection that passes it, and
	// no further one.
	maxConnectionBytes = 4 << 20
)

// Connections lists and closes the WebSocket connections, the streams and the pulls of this hub.
// Its methods may be called concurrently.
type Connections interface {
	// List returns up to limit connections that filter selects, oldest first, from the one behind
	// the id after. more says that there are further ones.
	List(after string, limit int, filter ConnectionFilter) (list []Connection, more bool)
	// Close closes a connection, and reports whether the connection was open.
	Close(id string) bool
}

// ConnectionFilter selects the connections with a subscription of a topic and of a group; "" stands
// for any.
type ConnectionFilter struct{ Topic, Group string }

// Connection is a WebSocket connection, a stream of server-sent events, or a pull.
type Connection struct {
	ID string `json:"id"`
	// Kind is websocket, stream or pull.
	Kind string `json:"kind"`
	// Principal is the kind and the name of the client, such as jwt:alice, or "" before AUTH.
	Principal string `json:"principal,omitempty"`
	Remote    string `json:"remote"`
	// SinceMS is when the connection was made, in epoch milliseconds.
	SinceMS int64 `json:"since"`
	// QueuedBytes is how many bytes wait to be sent.
	QueuedBytes   int            `json:"queuedBytes"`
	Subscriptions []Subscription `json:"subscriptions"`
}

// Subscription is a subscription of a connection.
type Subscription struct {
	Topic       string `json:"topic"`
	Group       string `json:"group"`
	MaxInFlight int    `json:"maxInFlight"`
	InFlight    int    `json:"inFlight"`
	Paused      bool   `json:"paused"`
}

// connections answers GET /connections.
func (s *Server) connections(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	limit, badLimit := number(q, "limit", defaultConnections, 1, maxConnections)
	if fault := cmp.Or(checkQuery(q, "limit", "next", "topic", "group"), badLimit); fault != "" {
		badQuery(w, fault)
		return
	}
	list, more := s.cfg.Connections.List(q.Get("next"), int(limit), ConnectionFilter{q.Get("topic"), q.Get("group")})
	page := struct {
		Now         int64             `json:"now"`
		Count       int               `json:"count"`
		Connections []json.RawMessage `json:"connections"`
		Next        string            `json:"next,omitempty"`
	}{time.Now().UnixMilli(), 0, make([]json.RawMessage, 0, len(list)), ""}
	for bytes := 0; page.Count < len(list) && bytes < maxConnectionBytes; page.Count++ {
		text, _ := json.Marshal(list[page.Count]) //nolint:errchkjson // strings and numbers always marshal
		page.Connections = append(page.Connections, text)
		bytes += len(text)
	}
	if more || page.Count < len(list) {
		page.Next = list[page.Count-1].ID
	}
	answer(w, page)
}

// closeConnection answers DELETE /connections/{id}.
func (s *Server) closeConnection(w http.ResponseWriter, r *http.Request) {
	if fault := checkQuery(r.URL.Query()); fault != "" {
		badQuery(w, fault)
		return
	}
	id := pathParam(r, "id")
	if !s.cfg.Connections.Close(id) {
		writeError(w, http.StatusNotFound, "not_found", "This hub has no such connection; it may have ended.")
		return
	}
	s.cfg.Logger.LogAttrs(r.Context(), slog.LevelInfo, "closed a connection for an operator", slog.String("connection", id), slog.String("operator", identity(r).Key()))
	w.WriteHeader(http.StatusNoContent)
}
