package facade

import (
	"context"
	"errors"
	"net/http"
	"strconv"

	"eventhub/jetstream"
	"eventhub/jetstream/cloudevents"
	"eventhub/jetstream/jsonscan"
)

// Headers of the answers to GET /replay and GET /export.
const (
	// headerTruncated is "true" when the beginning of the range is gone.
	headerTruncated = "Event-Truncated"
	// headerFirstID is then the id of the oldest event that is left.
	headerFirstID = "Event-First-Id"
	// headerNewestID is the id of the topic's newest event.
	headerNewestID = "Event-Newest-Id"
	// headerPosition is the place before the first event of the answer, absent at the beginning of
	// the topic. afterId takes a place like an id, and it is always found.
	headerPosition = "Event-Position"
	// headerLastID and headerLastPosition are trailers: the id of the last event of the answer, and
	// its place. Only a complete answer has trailers. A name is a header or a trailer, because
	// proxies add trailers to headers of the same name.
	headerLastID       = "Event-Last-Id"
	headerLastPosition = "Event-Last-Position"
)

// rangeForm is how the events of a range are written.
type rangeForm struct {
	contentType     string
	begin, sep, end string
	count           bool // the number of events comes before end
	cloud           *cloudForm
}

// batchForm is an array of CloudEvents.
func batchForm(cloud *cloudForm) rangeForm {
	return rangeForm{contentType: cloudevents.BatchMediaType, begin: "[", sep: ",\n", end: "]\n", cloud: cloud}
}

// serveReplay serves GET /replay.
func (s *Server) serveReplay(w http.ResponseWriter, r *http.Request) {
	q, fail := parseReplay(r.URL.RawQuery)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	cloud := s.cloudFormFor(w, r, q.topic)
	s.serveRange(w, r, &q, func(found *jetstream.Range) rangeForm {
		if cloud != nil {
			return batchForm(cloud)
		}
		begin := jsonscan.AppendString([]byte(`{"topic":`), q.topic)
		if found.Truncated {
			begin = append(begin, `,"truncated":true`...)
			if found.FirstID != "" {
				begin = jsonscan.AppendString(append(begin, `,"first":`...), found.FirstID)
			}
		}
		return rangeForm{contentType: "application/json", begin: string(begin) + `,"events":[`, sep: ",", end: "}\n", count: true}
	})
}

// serveExport serves GET /export.
func (s *Server) serveExport(w http.ResponseWriter, r *http.Request) {
	q, fail := parseExport(r.URL.RawQuery)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	cloud := s.cloudFormFor(w, r, q.topic)
	s.serveRange(w, r, &q, func(*jetstream.Range) rangeForm {
		switch {
		case q.ndjson:
			return rangeForm{contentType: ndjsonType, sep: "\n", end: "\n", cloud: cloud}
		case cloud != nil:
			return batchForm(cloud)
		}
		return rangeForm{contentType: "application/json", begin: "[", sep: ",\n", end: "]\n"}
	})
}

// serveRange answers with the events of a range, while it reads them, when it is the principal's
// turn. The answer ends early, and the connection with it, when the events cannot be read, when the
// token expires or is revoked, and when the server drains: the client must not take a part for the
// whole.
func (s *Server) serveRange(w http.ResponseWriter, r *http.Request, q *rangeQuery, form func(*jetstream.Range) rangeForm) {
	p := principalOf(r)
	if fail := s.mayRead(p, q.topic); fail != nil {
		s.refuse(w, fail)
		return
	}
	ctx, cancel := s.rangeContext(r.Context(), p)
	defer cancel()
	waiting, stop := context.WithTimeout(ctx, callTimeout)
	defer stop()
	if !s.exporting.Enter(waiting, p.Key(), principalWaits, func() { s.cfg.Observer.LimitReached("exports") }) {
		s.refuse(w, &fault{code: codeOverloaded, msg: "The hub has reached its limit of concurrent replays and exports."})
		return
	}
	defer s.exporting.Leave(p.Key())
	q.opts.CountFor = p.Key()
	cast, err := s.casterOf(waiting, q.topic, q.version, p.Key())
	if err != nil {
		s.refuse(w, s.readFault(r, q.topic, err))
		return
	}
	found, err := s.cfg.Bus.History(q.topic).Range(waiting, q.opts)
	if err != nil {
		s.refuse(w, s.readFault(r, q.topic, err))
		return
	}
	f := form(found)
	header := w.Header()
	header.Set("Cache-Control", "no-cache")
	header.Set("Content-Type", f.contentType)
	if found.Truncated {
		header.Set(headerTruncated, "true")
		if found.FirstID != "" {
			header.Set(headerFirstID, found.FirstID)
		}
	}
	if found.LastID != "" {
		header.Set(headerNewestID, found.LastID)
	}
	if at := found.Before(); at != "" {
		header.Set(headerPosition, at)
	}
	header.Add("Trailer", headerLastID)
	header.Add("Trailer", headerLastPosition)
	out := s.newRangeWriter(w, r, q, f)
	out.caster = cast
	if r.Method == http.MethodHead {
		return
	}
	if err := out.copy(ctx, found); err != nil {
		if ctx.Err() == nil {
			s.logFailed(r, q.topic, err)
		}
		panic(http.ErrAbortHandler)
	}
}

// rangeContext returns a context that ends when the client goes, its token expires, or the server
// begins to drain.
func (s *Server) rangeContext(parent context.Context, p Principal) (context.Context, context.CancelFunc) {
	var ctx context.Context
	var cancel context.CancelFunc
	if at := p.Expires(); at.IsZero() {
		ctx, cancel = context.WithCancel(parent)
	} else {
		ctx, cancel = context.WithDeadline(parent, at)
	}
	stop := context.AfterFunc(s.streaming, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// rangeWriter writes the events of a range as they come, in pieces that the client must take in
// time.
type rangeWriter struct {
	srv    *Server
	answer *answer
	// principal is asked for before each piece whether it may still read.
	principal Principal
	header    http.Header
	query     *rangeQuery
	form      rangeForm
	caster    *caster
	packer    *packer // nil: not compressed
}

func (s *Server) newRangeWriter(w http.ResponseWriter, r *http.Request, q *rangeQuery, f rangeForm) *rangeWriter {
	o := &rangeWriter{srv: s, principal: principalOf(r), answer: s.newAnswer(w), header: w.Header(), query: q, form: f}
	o.header.Add("Vary", "Accept-Encoding")
	if name := contentCoding(r.Header.Values("Accept-Encoding")); name != "" {
		o.header.Set("Content-Encoding", name)
		if r.Method != http.MethodHead {
			o.packer = newPacker(name, s.cfg.Computing, o.principal.Key())
		}
	}
	return o
}

// copy writes the whole answer.
func (o *rangeWriter) copy(ctx context.Context, found *jetstream.Range) error {
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	out := append((*b)[:0], o.form.begin...)
	_ = o.answer.ctrl.Flush() // a client may wait for the header
	n, told := 0, 0
	var last jetstream.Event // its id and its place
	defer func() { o.srv.cfg.Observer.EventsRead(n - told) }()
	for e, err := range found.Events(ctx) {
		if err != nil {
			return err
		}
		if n > 0 {
			out = append(out, o.form.sep...)
		}
		if out, err = o.record(ctx, out, e); err != nil {
			return err
		}
		last.ID, last.Stream, last.Sequence = e.ID, e.Stream, e.Sequence
		n++
		if len(out) >= answerPiece {
			if err := o.write(ctx, out, false); err != nil {
				return err
			}
			out = out[:0]
			o.srv.cfg.Observer.EventsRead(n - told)
			told = n
		}
	}
	switch {
	case o.form.count:
		out = strconv.AppendInt(append(out, `],"count":`...), int64(n), 10)
		out = append(out, o.form.end...)
	case n > 0 || o.form.begin != "":
		out = append(out, o.form.end...)
	}
	*b = out
	if err := o.write(ctx, out, true); err != nil {
		return err
	}
	if n > 0 {
		o.header.Set(headerLastID, last.ID)
		o.header.Set(headerLastPosition, last.Stream+"@"+strconv.FormatUint(last.Sequence, 10))
	}
	o.answer.end()
	return nil
}

// record appends an event as one line: a payload may have line breaks between its tokens.
func (o *rangeWriter) record(ctx context.Context, dst []byte, e *jetstream.Event) ([]byte, error) {
	at := len(dst)
	marked := o.query.tombstones && e.Tombstone
	why, err := o.caster.cast(ctx, e)
	if err != nil {
		return dst, err
	}
	if o.form.cloud != nil && why == "" {
		ce := o.form.cloud.of(e)
		if marked {
			delete(ce.Attributes, "tombstone") // the event's own attribute of that name gives way
		}
		dst = ce.Append(dst)
	} else {
		dst = appendRead(dst, e, o.form.cloud, why)
	}
	if marked {
		dst = append(dst[:len(dst)-1], `,"tombstone":true}`...)
	}
	if o.query.ndjson {
		spaceBreaks(dst[at:])
	}
	return dst, nil
}

// spaceBreaks replaces the line breaks of JSON, which lie between tokens only, by blanks.
func spaceBreaks(text []byte) {
	for i, c := range text {
		if c == '\n' || c == '\r' {
			text[i] = ' '
		}
	}
}

// errRevoked ends an answer whose token was withdrawn.
var errRevoked = errors.New("facade: send events: the token was revoked")

func (o *rangeWriter) write(ctx context.Context, b []byte, last bool) error {
	if revoked(o.principal) {
		return errRevoked
	}
	if o.packer != nil {
		var err error
		if b, err = o.packer.pack(ctx, b, last); err != nil {
			return err
		}
	}
	o.answer.write(b)
	return nil
}
