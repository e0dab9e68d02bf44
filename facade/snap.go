package facade

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
)

const (
	// maxKey is the most bytes of a key.
	maxKey = 512
	// answerPiece is how many bytes of an answer a client must take within Limits.AnswerStall.
	answerPiece = 16 << 10
)

// serveSnap is GET /snap/{topic}/{key}: the latest record of a key.
func (s *Server) serveSnap(w http.ResponseWriter, r *http.Request) {
	_, topic, key, fail := s.snapKey(w, r, s.mayRead)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	e, err := s.cfg.Bus.Keys(topic).Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrNotFound), err == nil && e.Tombstone:
		s.noSnap(w)
		return
	case err != nil:
		s.refuse(w, s.readFault(r, err))
		return
	}
	header := w.Header()
	tag := entityTag(e)
	header.Set("Cache-Control", "no-cache")
	header.Set("ETag", tag)
	if noneMatch(r.Header.Values("If-None-Match"), tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	record := append(e.AppendRecord(nil), '\n')
	header.Set("Content-Type", "application/json")
	header.Set("Content-Length", strconv.Itoa(len(record)))
	a := s.newAnswer(w)
	a.write(record)
	a.end()
}

// noSnap answers that a key has no record, in the words that the protocol has for it.
func (s *Server) noSnap(w http.ResponseWriter) {
	s.cfg.Observer.ErrorSent(string(codeNotFound))
	header := w.Header()
	header.Set("Cache-Control", "no-cache")
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusNotFound)
	_, _ = w.Write([]byte(`{"error":"not_found"}`))
}

// serveRemoval is DELETE /snap/{topic}/{key}: a POST /publish/{topic} of null with that key as Event-Key, and with
// Event-Tombstone.
func (s *Server) serveRemoval(w http.ResponseWriter, r *http.Request) {
	p, topic, key, fail := s.snapKey(w, r, s.mayPublish)
	if fail == nil {
		fail = s.throttle(p, topic)
	}
	var opts jetstream.PublishOptions
	if fail == nil {
		opts, fail = s.headerOptions(r)
	}
	if fail == nil && opts.Key != "" && opts.Key != key {
		fail = &fault{code: codeBadOptions, msg: "The header Event-Key names another key than the path."}
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	opts.Key, opts.Tombstone = key, true
	pub := s.cfg.Bus.NewPublisher()
	pub.CountFor(p.Key())
	s.publishOne(w, r, nullPayload, opts, inStream(pub, topic))
}

// snapTopic returns who asks for what is kept of which topic, once that is allowed. Before, nothing is said of the topic.
func (s *Server) snapTopic(w http.ResponseWriter, r *http.Request, may func(Principal, string) *fault) (Principal, string, *fault) {
	w.Header().Add("Vary", "Authorization")
	p := principalOf(r)
	topic, fail := topicParam(r)
	if fail == nil {
		fail = may(p, topic)
	}
	return p, topic, fail
}

// snapKey is snapTopic and the key, which is the rest of the path, slashes included.
func (s *Server) snapKey(w http.ResponseWriter, r *http.Request, may func(Principal, string) *fault) (Principal, string, string, *fault) {
	p, topic, fail := s.snapTopic(w, r, may)
	if fail != nil {
		return nil, "", "", fail
	}
	key, err := pathParam(r, "*")
	if err != nil {
		return nil, "", "", &fault{code: codeBadOptions, msg: "The key in the path is not URL-encoded correctly."}
	}
	return p, topic, key, checkKey("The key in the path", key)
}

// checkKey looks at the form of a key; who says where it was.
func checkKey(who, key string) *fault {
	switch {
	case key == "":
		return &fault{code: codeBadOptions, msg: who + " is empty: 1 to " + strconv.Itoa(maxKey) + " bytes are needed."}
	case len(key) > maxKey:
		return &fault{code: codeBadOptions, msg: who + " has " + strconv.Itoa(len(key)) + " bytes: at most " + strconv.Itoa(maxKey) + " are allowed."}
	case !utf8.ValidString(key):
		return &fault{code: codeBadOptions, msg: who + " is no valid UTF-8."}
	}
	return nil
}

// readFault is what a client is told about a read that failed. Nothing is logged of one that the client gave up.
func (s *Server) readFault(r *http.Request, err error) *fault {
	if r.Context().Err() == nil {
		s.logCause(err)
	}
	return busFault(err, codeInternal, "The event store did not answer as it should: try again later.")
}

// entityTag is a strong one. It is made of the record without ts, which may differ by a little with
// where an event without a ts of its own was read from: the topic's stream or its bucket.
func entityTag(e *jetstream.Event) string {
	timeless := *e
	timeless.TS = 0
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	*b = timeless.AppendRecord((*b)[:0])
	sum := sha256.Sum256(*b)
	return `"` + hex.EncodeToString(sum[:16]) + `"`
}

// noneMatch reports whether an If-None-Match (RFC 9110 section 13.1.2) has tag in it, so that the client needs no answer.
// Tags are compared weakly. What is behind a fault in the list does not count.
func noneMatch(lists []string, tag string) bool {
	list := strings.Join(lists, ",")
	if strings.Trim(list, " \t") == "*" {
		return true
	}
	for {
		list = strings.TrimLeft(list, " \t,")
		list = strings.TrimPrefix(list, "W/")
		if !strings.HasPrefix(list, `"`) {
			return false
		}
		end := strings.IndexByte(list[1:], '"') + 2
		if end < 2 {
			return false
		}
		if list[:end] == tag {
			return true
		}
		list = list[end:]
	}
}

// answer is the body of an answer that a client has to take piece by piece in time.
type answer struct {
	w     http.ResponseWriter
	ctrl  *http.ResponseController
	stall time.Duration
}

func (s *Server) newAnswer(w http.ResponseWriter) *answer {
	return &answer{w: w, ctrl: http.NewResponseController(w), stall: s.cfg.Limits.AnswerStall}
}

// write sends b. It ends the request when the client does not take it, so that nobody takes a part for the whole.
func (a *answer) write(b []byte) {
	for len(b) > 0 {
		_ = a.ctrl.SetWriteDeadline(time.Now().Add(a.stall))
		n, err := a.w.Write(b[:min(len(b), answerPiece)])
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		b = b[n:]
	}
}

// end leaves the connection without our deadline for the next request.
func (a *answer) end() { _ = a.ctrl.SetWriteDeadline(time.Time{}) }
