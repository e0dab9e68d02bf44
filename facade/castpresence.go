package facade

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"eventhub/facade/presence"
	"eventhub/facade/textmsg"
	"eventhub/jetstream/jsonscan"
)

const (
	// presenceEvery is the least time between two PRESENCE frames of a topic.
	presenceEvery = time.Second
	// presenceShown is the most names of a list in a PRESENCE frame, and presenceListed that in an
	// answer of GET /presence/{topic}.
	presenceShown  = 100
	presenceListed = 1_000
)

// newBoard makes the Board, which hears what other hubs tell until unhear is called.
func (s *Server) newBoard() error {
	hubs := s.cfg.Bus.Hubs()
	s.board = presence.New(presence.Config{
		Hub: s.name, Every: presenceEvery, Shown: presenceShown, Frame: framePresence,
		Names: s.cfg.Limits.Presence, Full: func() { s.cfg.Observer.LimitReached("presence") },
		Tell: func(message []byte) {
			if err := hubs.Tell(message); err != nil {
				s.log.Debug("cannot tell the other hubs who is present; trying again later", slog.Any("error", err))
			}
		},
	})
	unhear, err := hubs.Listen(s.board.Receive)
	if err != nil {
		s.board.Close()
		return err
	}
	s.unhear = unhear
	return nil
}

// framePresence makes a PRESENCE frame, framed for a WebSocket.
func framePresence(c presence.Change) []byte {
	dst := append(textmsg.Begin(nil), `{"op":"PRESENCE","topic":`...)
	dst = jsonscan.AppendString(dst, c.Topic)
	dst = append(dst, `,"count":`...)
	dst = strconv.AppendInt(dst, int64(c.Count), 10)
	dst = appendNames(append(dst, `,"joined":`...), c.Joined)
	dst = appendNames(append(dst, `,"left":`...), c.Left)
	return textmsg.End(append(dst, '}'), 0)
}

func appendNames(dst []byte, names []string) []byte {
	dst = append(dst, '[')
	for i, name := range names {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = jsonscan.AppendString(dst, name)
	}
	return append(dst, ']')
}

// Present implements presence.Listener. A frame that the client was not sent yet is replaced.
func (c *cast) Present(frame []byte) {
	c.presence.Store(&frame)
	c.Wake()
}

// seat enters the client among those who are present at the topic, under a name, in place of an
// earlier one.
func (c *cast) seat(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over.Load() || c.seated && c.name == name || !c.shown {
		return
	}
	c.unseatLocked()
	c.seated, c.name = c.srv.board.Join(c.topic, name), name
}

// attend has the client told who comes and goes.
func (c *cast) attend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.over.Load() {
		c.srv.board.Listen(c.topic, c)
	}
}

func (c *cast) unseatLocked() {
	if c.seated {
		c.srv.board.Leave(c.topic, c.name)
		c.seated = false
	}
}

// servePresence serves GET /presence/{topic}.
func (s *Server) servePresence(w http.ResponseWriter, r *http.Request) {
	topic, fail := topicParam(r)
	if fail == nil {
		fail = s.may(principalOf(r), ActionPresence, topic, "see who is present at")
	}
	if fail == nil && !s.cfg.Bus.Rule(topic).Presence {
		fail = &fault{code: codeNotFound, msg: "The rule of this topic does not have presence."}
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	count, names := s.board.Present(topic, presenceListed)
	out := jsonscan.AppendString([]byte(`{"topic":`), topic)
	out = strconv.AppendInt(append(out, `,"count":`...), int64(count), 10)
	out = appendNames(append(out, `,"members":`...), names)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(append(out, "}\n"...))
}
