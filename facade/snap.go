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
	"eventhub/jetstream/cloudevents"
)

const (
	// maxKey is the most bytes of a key.
	maxKey = 512
	// answerPiece is how many bytes of an answer a client must take within Limits.AnswerStall.
	answerPiece = 16 << 10
)

// serveSnap serves GET /snap/{topic}/{key}, the latest record of a key.
func (s *Server) serveSnap(w http.ResponseWriter, r *http.Request) {
	_, topic, key, fail := s.snapKey(r, s.mayRead)
	var version int
	if fail == nil {
		version, fail = versionParam(r.URL.Query())
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	cast, err := s.casterOf(ctx, topic, version, principalOf(r).Key())
	var e *jetstream.Event
	if err == nil {
		e, err = s.cfg.Bus.Keys(topic).Get(ctx, key)
	}
	switch {
	case errors.Is(err, jetstream.ErrNotFound), err == nil && e.Tombstone:
		s.noSnap(w)
		return
	case err != nil:
		s.refuse(w, s.readFault(r, topic, err))
		return
	}
	switch why, err := cast.cast(ctx, e); {
	case err != nil:
		s.refuse(w, s.readFault(r, topic, err))
		return
	case why != "":
		s.refuse(w, &fault{code: codeSchemaInvalid, msg: why})
		return
	}
	header := w.Header()
	cloud := s.cloudFormFor(w, r, topic)
	tag := entityTag(e, cloud)
	header.Set("Cache-Control", "no-cache")
	header.Set("ETag", tag)
	if noneMatch(r.Header.Values("If-None-Match"), tag) {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	var kind string
	var record []byte
	if cloud != nil {
		kind, record = cloudevents.MediaType, cloud.append(nil, e)
	} else {
		kind, record = "application/json", e.AppendRecord(nil)
	}
	record = append(record, '\n')
	header.Set("Content-Type", kind)
	header.Set("Content-Length", strconv.Itoa(len(record)))
	a := s.newAnswer(w)
	a.write(record)
	a.end()
}

// noSnap answers that a key has no record, with the body that the protocol defines.
func (s *Server) noSnap(w http.ResponseWriter) {
	s.cfg.Observer.ErrorSent(string(codeNotFound))
	header := w.Header()
	header.Set("Cache-Control", "no-cache")
	header.Set("Content-Type", "application/json")
	header.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(http.StatusNotFound)
	_, _ = w.Write([]byte(`{"error":"not_found"}`))
}

// serveRemoval serves DELETE /snap/{topic}/{key}. It is equivalent to POST /publish/{topic} of null
// with that key as Event-Key, and with Event-Tombstone.
func (s *Server) serveRemoval(w http.ResponseWriter, r *http.Request) {
	p, topic, key, fail := s.snapKey(r, s.mayPublish)
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
	s.publishOne(w, r, topic, nullPayload, opts, inStream(pub))
}

// snapTopic returns the principal and the topic of a request if the principal has the permission
// may checks. Before that, the answer reveals nothing about the topic.
func (s *Server) snapTopic(r *http.Request, may func(Principal, string) *fault) (Principal, string, *fault) {
	p := principalOf(r)
	topic, fail := topicParam(r)
	if fail == nil {
		fail = may(p, topic)
	}
	return p, topic, fail
}

// snapKey is snapTopic with the key, which is the rest of the path, slashes included.
func (s *Server) snapKey(r *http.Request, may func(Principal, string) *fault) (Principal, string, string, *fault) {
	p, topic, fail := s.snapTopic(r, may)
	if fail != nil {
		return nil, "", "", fail
	}
	key, err := pathParam(r, "*")
	if err != nil {
		return nil, "", "", &fault{code: codeBadOptions, msg: "The key in the path is not URL-encoded correctly."}
	}
	return p, topic, key, checkKey("The key in the path", key)
}

// checkKey checks the form of a key. who begins the message of a fault, and names the place of the
// key.
func checkKey(who, key string) *fault {
	switch {
	case key == "":
		return &fault{code: codeBadOptions, msg: who + " is empty: 1 to " + strconv.Itoa(maxKey) + " bytes are needed."}
	case len(key) > maxKey:
		return &fault{code: codeBadOptions, msg: who + " has " + strconv.Itoa(len(key)) + " bytes: at most " + strconv.Itoa(maxKey) + " are allowed."}
	case !utf8.ValidString(key):
		return &fault{code: codeBadOptions, msg: who + " is not valid UTF-8."}
	}
	return nil
}

// readFault returns what a client is told about a failed read.
func (s *Server) readFault(r *http.Request, topic string, err error) *fault {
	s.logFailed(r, topic, err)
	return busFault(err, codeInternal, "The event store did not answer as it should: try again later.")
}

// entityTag returns a strong entity tag of the record, or of the CloudEvent if cloud is not nil.
// The tag is made of the record without ts: an event without a ts of its own has a slightly
// different ts in the topic's stream and in its bucket. A CloudEvent differs from the record by its
// source alone.
func entityTag(e *jetstream.Event, cloud *cloudForm) string {
	timeless := *e
	timeless.TS = 0
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	*b = timeless.AppendRecord((*b)[:0])
	end := `"`
	if cloud != nil {
		*b = append(*b, cloud.source...)
		end = `-ce"`
	}
	sum := sha256.Sum256(*b)
	return `"` + hex.EncodeToString(sum[:16]) + end
}

// noneMatch reports whether an If-None-Match (RFC 9110, section 13.1.2) contains tag, so that the
// client needs no body. Tags are compared weakly. Anything after a fault in the list is ignored.
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

// answer is a response body that a client must take piece by piece in time.
type answer struct {
	w     http.ResponseWriter
	ctrl  *http.ResponseController
	stall time.Duration
}

func (s *Server) newAnswer(w http.ResponseWriter) *answer {
	return &answer{w: w, ctrl: http.NewResponseController(w), stall: s.cfg.Limits.AnswerStall}
}

// write sends b. If the client does not take it, write aborts the request, so that nobody takes a
// part for the whole.
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

// end removes the deadline, so that the next request on the connection starts without one.
func (a *answer) end() { _ = a.ctrl.SetWriteDeadline(time.Time{}) }
