package facade

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/go-chi/chi/v5"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/panics"
)

// HTTP returns the handler of the HTTP API (protocol section 4). Mount it on a server with a
// ReadHeaderTimeout; bodies have Limits.BodyStall and Limits.BodyRate, answers Limits.AnswerStall.
func (s *Server) HTTP() http.Handler {
	r := chi.NewRouter()
	r.Use(s.observe, s.crossOrigin, s.admit)
	r.NotFound(func(w http.ResponseWriter, _ *http.Request) {
		s.refuse(w, &fault{code: codeNotFound, msg: "There is nothing at this path."})
	})
	r.MethodNotAllowed(func(w http.ResponseWriter, req *http.Request) {
		path := cmp.Or(req.URL.RawPath, req.URL.Path)
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodDelete} {
			if r.Match(chi.NewRouteContext(), method, path) {
				w.Header().Add("Allow", method)
			}
		}
		s.cfg.Observer.ErrorSent(string(codeNotFound))
		writeError(w, http.StatusMethodNotAllowed, &fault{code: codeNotFound, msg: "This path does not take this method."})
	})
	for path, document := range s.cfg.Documents {
		r.Method(http.MethodGet, path, document)
		r.Method(http.MethodHead, path, document)
	}
	r.Group(func(r chi.Router) {
		r.Use(s.identify)
		r.Post("/publish", s.serveCloudEvents)
		r.Post("/publish/{topic}", s.servePublish)
		r.Post("/outbox/{topic}", s.serveOutbox)
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			r.MethodFunc(method, "/snap/{topic}", s.servePage)
			r.MethodFunc(method, "/snap/{topic}/*", s.serveSnap)
			r.MethodFunc(method, "/replay", s.serveReplay)
			r.MethodFunc(method, "/export", s.serveExport)
			r.MethodFunc(method, "/presence/{topic}", s.servePresence)
			r.MethodFunc(method, "/schemas", s.serveSchemaNames)
			r.MethodFunc(method, "/schemas/{topic}", s.serveSchemas)
			r.MethodFunc(method, "/schemas/{topic}/{version}", s.serveSchema)
		}
		r.Get("/subscribe", s.serveStream)
		r.Get("/broadcast/{topic}", s.serveBroadcast)
		r.Post("/groups/{topic}/{group}/pull", s.servePull)
		for path := range settlePaths {
			r.Post(path, s.serveSettle)
		}
		r.Post("/schemas/{topic}", s.serveRegistration)
		r.Post("/schemas/{topic}/check", s.serveSchemaCheck)
		r.Delete("/snap/{topic}/*", s.serveRemoval)
		r.Delete("/delayed/{topic}/{id}", s.serveCancel)
	})
	return r
}

// statusWriter records the status for the Observer.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// observe counts requests, and answers those whose handler panics.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sw := &statusWriter{ResponseWriter: w}
		defer func() { //nolint:contextcheck // refuse needs no context
			cause := recover()
			if cause != nil && cause != http.ErrAbortHandler { //nolint:errorlint // net/http compares so, too
				panics.Note(s.often.By("func"), r.Method+" "+chi.RouteContext(r.Context()).RoutePattern(), cause)
				if sw.status == 0 {
					s.refuse(sw, &fault{code: codeInternal, msg: "The hub failed to serve the request."})
					cause = nil
				}
			}
			if sw.status == 0 {
				sw.status = http.StatusOK
			}
			s.cfg.Observer.RequestServed(sw.status)
			if cause != nil {
				panic(http.ErrAbortHandler) // cuts the answer that has begun
			}
		}()
		next.ServeHTTP(sw, r)
	})
}

var errTooManyRequests = &fault{code: codeOverloaded, msg: "The hub has reached its limit of concurrent requests."}

// served is a request that is being served, in its context.
type served struct {
	principal Principal // once identify knows it
	// places are given up when the request has been served, or becomes a stream, whichever comes
	// first.
	places []func()
}

// servedKey is that of a request's *served in its context.
type servedKey struct{}

func (n *served) leave() {
	for _, leave := range n.places {
		leave()
	}
	n.places = nil
}

// handOver ends the counting of a request among those that are served: it waits from now on, and
// counts elsewhere.
func handOver(r *http.Request) {
	if n, ok := r.Context().Value(servedKey{}).(*served); ok {
		n.leave()
	}
}

// admit enforces Limits.Requests, and refuses requests while the server drains, except those that
// settle events.
func (s *Server) admit(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := &served{places: []func(){func() { s.requests.Add(-1) }}}
		defer n.leave()
		if s.requests.Add(1) > int64(s.cfg.Limits.Requests) {
			s.cfg.Observer.LimitReached("requests")
			s.refuse(w, errTooManyRequests)
			return
		}
		if s.isDraining() && settlePaths[r.URL.Path] == 0 {
			s.refuse(w, errDraining)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), servedKey{}, n)))
	})
}

func (s *Server) isDraining() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draining
}

// servePublish serves POST /publish/{topic}.
func (s *Server) servePublish(w http.ResponseWriter, r *http.Request) {
	p, topic, form, fail := s.publication(r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.publishForm(w, r, p, topic, form)
}

// publication returns the principal and the topic of a publish, and what the body is. It takes a
// publish from the quotas, unless the body has many events, which are throttled one by one. No byte
// of the body is read before the client has permission to publish.
func (s *Server) publication(r *http.Request) (p Principal, topic string, form bodyForm, fail *fault) {
	p = principalOf(r)
	if topic, fail = topicParam(r); fail == nil {
		fail = s.mayPublish(p, topic)
	}
	if fail == nil {
		form, fail = bodyFormOf(r)
	}
	if fail == nil && !form.many() {
		fail = s.throttle(p, topic)
	}
	return p, topic, form, fail
}

// topicParam returns the topic in the path, URL-decoded.
func topicParam(r *http.Request) (string, *fault) {
	topic, err := pathParam(r, "topic")
	if err != nil {
		return "", &fault{code: codeBadTopic, msg: "The topic in the path is not URL-encoded correctly."}
	}
	return topic, nil
}

// pathParam returns a part of the path, URL-decoded once.
func pathParam(r *http.Request, name string) (string, error) {
	value := chi.URLParam(r, name)
	if r.URL.RawPath == "" {
		return value, nil // chi took the value from the decoded path
	}
	return url.PathUnescape(value)
}

// storing stores an event, and returns the HTTP status for success and the event's id. The error is
// a *fault if it is for the client as it is.
type storing func(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (status int, id string, err error)

// inStream returns a storing for the streams of topics.
func inStream(pub Publisher) storing {
	return func(ctx context.Context, topic string, payload []byte, opts jetstream.PublishOptions) (int, string, error) {
		got, err := pub.Publish(ctx, topic, payload, opts)
		return http.StatusOK, got.ID, err
	}
}

// publishBody stores the body as one event. topic is "" if the body is a CloudEvent whose type is
// its topic.
func (s *Server) publishBody(w http.ResponseWriter, r *http.Request, p Principal, topic string, form bodyForm, store storing) {
	opts, fail := s.headerOptions(r)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	var payload []byte
	switch form {
	case formStructured:
		topic, payload, fail = s.structuredBody(w, r, p, b, topic, &opts)
	case formBinary:
		payload, fail = s.binaryBody(w, r, p, b, topic, &opts)
	default:
		fail = s.readBody(w, r, p, b, s.cfg.Bus.MaxPayload(), opts.Tombstone)
		payload = *b
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	if expired(p, time.Now()) { // reading the body may have taken long
		s.refuse(w, &fault{code: codeTokenExpired, msg: "The token has expired."})
		return
	}
	if opts.Tombstone {
		payload = bytes.TrimSpace(payload) // tools send null with a line break
	}
	s.publishOne(w, r, topic, payload, opts, store)
}

// publishOne stores one event and answers with its id.
func (s *Server) publishOne(w http.ResponseWriter, r *http.Request, topic string, payload []byte, opts jetstream.PublishOptions, store storing) {
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	status, id, err := store(ctx, topic, payload, opts)
	if fail, ok := errors.AsType[*fault](err); ok {
		s.refuse(w, fail)
		return
	}
	if err != nil {
		s.logFailed(r, topic, err)
		s.refuse(w, busFault(err, codePublishFailed, "The event could not be published."))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	out := jsonscan.AppendString([]byte(`{"id":`), id)
	_, _ = w.Write(append(out, "}\n"...))
}

// readBody reads a body of at most limit bytes into b and checks that it is JSON. If mayBeEmpty is
// set, an empty body becomes null.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request, p Principal, b *[]byte, limit int, mayBeEmpty bool) *fault {
	fail := s.readBytes(w, r, p, b, limit)
	switch {
	case fail != nil:
		return fail
	case len(*b) == 0 && mayBeEmpty:
		*b = append(*b, nullPayload...)
	case len(*b) == 0:
		return &fault{code: codeBadJSON, msg: "The body is empty; it must be the payload as JSON, null for none."}
	case !jetstream.ValidPayload(*b):
		return badJSON()
	}
	return nil
}

// readBytes reads the body into b, at most limit bytes of it. A longer body is read to its end, so
// that the connection lives on, unless it also exceeds Limits.Skip.
func (s *Server) readBytes(w http.ResponseWriter, r *http.Request, p Principal, b *[]byte, limit int) *fault {
	skip := int64(s.cfg.Limits.Skip)
	if r.ContentLength > skip || r.ContentLength > int64(limit) && r.Header.Get("Expect") != "" {
		w.Header().Set("Connection", "close")
		return payloadTooLarge(limit)
	}
	body := s.steady(http.MaxBytesReader(w, r.Body, skip), http.NewResponseController(w), p, false)
	buf := *b
	if need := int(r.ContentLength) + 1; need > cap(buf) && need <= limit+1 {
		buf = make([]byte, 0, need)
	}
	err := readUpTo(body, &buf, limit)
	*b = buf
	if err == nil {
		// net/http reads on, to notice a client that leaves. After an error the deadline stays,
		// because the rest of the body may never come.
		_ = body.ctrl.SetReadDeadline(time.Time{})
	}
	_, tooMuch := errors.AsType[*http.MaxBytesError](err)
	switch {
	case tooMuch:
		s.cfg.Observer.LimitReached("skip")
		w.Header().Set("Connection", "close")
		return payloadTooLarge(limit)
	case err != nil:
		return &fault{code: codeBadJSON, msg: "The body ended early."}
	case len(buf) > limit:
		return payloadTooLarge(limit)
	}
	return nil
}

// readUpTo reads r to its end. It keeps the bytes in buf if there are at most limit of them;
// otherwise buf has more than limit bytes, and not all.
func readUpTo(r io.Reader, buf *[]byte, limit int) error {
	b := *buf
	for len(b) <= limit {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		*buf = b
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	_, err := io.Copy(io.Discard, r)
	return err
}

func payloadTooLarge(limit int) *fault {
	return &fault{code: codePublishFailed, msg: "The payload is larger than " + strconv.Itoa(limit) + " bytes.", tooLarge: true}
}

func writeFault(w http.ResponseWriter, f *fault) {
	writeError(w, f.rule().status, f)
}

// writeError answers {"error": msg, "code": code}.
func writeError(w http.ResponseWriter, status int, f *fault) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("X-Content-Type-Options", "nosniff")
	switch status {
	case http.StatusUnauthorized:
		h.Set("WWW-Authenticate", "Bearer")
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusInsufficientStorage:
		h.Set("Retry-After", f.retryAfter())
	}
	if f.ends {
		h.Set("Connection", "close")
	}
	w.WriteHeader(status)
	_, _ = w.Write(append(appendError(nil, f.code, f.msg), '\n'))
}

// appendError appends the JSON of an HTTP error.
func appendError(dst []byte, c code, msg string) []byte {
	dst = append(dst, `{"error":`...)
	dst = jsonscan.AppendString(dst, msg)
	dst = append(dst, `,"code":`...)
	dst = jsonscan.AppendString(dst, string(c))
	return append(dst, '}')
}
