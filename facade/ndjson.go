package facade

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

const (
	ndjsonType = "application/x-ndjson"
	// lineEnvelope is how many bytes a line may have beyond its payload.
	lineEnvelope = 64 << 10
	// answerBuffer is how many bytes of answers are sent at a time when there are many.
	answerBuffer = 16 << 10
)

// errAnswersLost ends a request whose client does not take the answers.
var errAnswersLost = errors.New("facade: send answers: the client does not take them")

// lineReaders have large buffers, because lines come in bulk.
var lineReaders = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 64<<10) }}

// line is one line of a request. Its answer is sent in the order of the lines.
type line struct {
	fail *fault
	id   string
	done chan struct{} // receives one value when fail or id is set
}

// lines publishes the lines of one request. Its reader (the handler) and its answerer run
// concurrently. The channel between them keeps the order, and bounds the lines in flight.
type lines struct {
	srv *Server
	// topic is "" if each event names its own; parse then takes the event from the quota of its
	// topic.
	topic     string
	principal Principal
	pub       Publisher
	ctrl      *http.ResponseController
	queue     chan *line
	gone      chan struct{} // closed when answers can no longer be written
	// parse reads an event, and returns its topic.
	parse func(text []byte) (topic string, payload []byte, opts jetstream.PublishOptions, fail *fault)
}

func (s *Server) newLines(w http.ResponseWriter, topic string, p Principal, pub Publisher) *lines {
	return &lines{
		srv: s, topic: topic, principal: p, pub: pub, ctrl: http.NewResponseController(w),
		queue: make(chan *line, s.cfg.Limits.Window), gone: make(chan struct{}),
	}
}

// publishLines publishes each line of the body and streams the answers while it still reads the
// body. A client must read the answers meanwhile: when Limits.Window answers wait, the body is not
// read on.
func (s *Server) publishLines(w http.ResponseWriter, r *http.Request, topic string, p Principal, pub Publisher) {
	l := s.newLines(w, topic, p, pub)
	l.parse = func(text []byte) (string, []byte, jetstream.PublishOptions, *fault) {
		payload, opts, fail := parseLine(text)
		return topic, payload, opts, fail
	}
	// HTTP/1 would otherwise read the rest of the body before it sends the first answer. HTTP/2
	// needs no permission.
	if err := l.ctrl.EnableFullDuplex(); err != nil && !errors.Is(err, http.ErrNotSupported) {
		s.refuse(w, &fault{code: codeInternal, msg: "This connection cannot stream."})
		return
	}
	l.serve(r.Context(), w, func(ctx context.Context) error { return l.read(ctx, s.steady(r.Body, l.ctrl, p, true)) })
}

// serve answers while publish publishes.
func (l *lines) serve(ctx context.Context, w http.ResponseWriter, publish func(context.Context) error) {
	w.Header().Set("Content-Type", ndjsonType)
	w.WriteHeader(http.StatusOK)
	_ = l.ctrl.Flush() // a client may wait for the status before it sends the first line

	answered := make(chan struct{})
	go func() {
		defer close(answered)
		l.answer(w)
	}()
	err := publish(ctx)
	close(l.queue)
	<-answered
	if err != nil {
		// The client must not take this for a complete answer.
		panic(http.ErrAbortHandler)
	}
	// The next request on this connection must start without these deadlines.
	_ = l.ctrl.SetReadDeadline(time.Time{})
	_ = l.ctrl.SetWriteDeadline(time.Time{})
}

// read publishes line by line until the body ends. It returns an error when the body ended early.
func (l *lines) read(ctx context.Context, body io.Reader) error {
	br, _ := lineReaders.Get().(*bufio.Reader)
	br.Reset(body)
	defer func() {
		br.Reset(nil)
		lineReaders.Put(br)
	}()
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	for {
		whole, err := l.next(br, b)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if len(*b) > 0 || !whole { // nothing follows the last line break
			if err := l.publish(ctx, bytes.TrimSpace(*b), whole); err != nil {
				return err
			}
		}
		if err != nil {
			return nil
		}
	}
}

// next reads a line into b. whole is false for a line that exceeds the limit; the rest of such a
// line is skipped.
func (l *lines) next(br *bufio.Reader, b *[]byte) (whole bool, err error) {
	limit := l.srv.cfg.Bus.MaxPayload() + lineEnvelope
	*b = (*b)[:0]
	size := 0
	for {
		part, err := br.ReadSlice('\n')
		if size += len(part); size <= limit {
			*b = append(*b, part...)
		}
		if size > l.srv.cfg.Limits.Skip {
			l.srv.cfg.Observer.LimitReached("skip")
			return false, errMessageTooBig
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return size <= limit, err
		}
	}
}

// publish publishes one line. It returns an error when the answers can no longer be written.
func (l *lines) publish(ctx context.Context, text []byte, whole bool) error {
	select {
	case <-l.gone:
		return errAnswersLost
	default:
	}
	n := &line{done: make(chan struct{}, 1)}
	select {
	case l.queue <- n:
	default:
		l.srv.cfg.Observer.LimitReached("window")
		select {
		case l.queue <- n:
		case <-l.gone:
			return errAnswersLost
		}
	}
	if !whole {
		limit := l.srv.cfg.Bus.MaxPayload()
		n.refuse(&fault{code: codePublishFailed, msg: "The line is too long: a payload may have " + strconv.Itoa(limit) + " bytes."})
		return nil
	}
	fail := l.admit() // also for lines that cannot be read: they take as much time
	if fail != nil {
		n.refuse(fail)
		return nil
	}
	topic, payload, opts, fail := l.parse(text)
	if fail != nil {
		n.refuse(fail)
		return nil
	}
	within, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := l.pub.PublishAsync(within, topic, payload, opts, func(got jetstream.Receipt, err error) {
		if err != nil {
			n.refuse(l.fault(ctx, topic, err))
			return
		}
		n.id = got.ID
		n.done <- struct{}{}
	})
	if err != nil {
		n.refuse(l.fault(ctx, topic, err))
	}
	return nil
}

// admit checks again, for each line, what may change during a request.
func (l *lines) admit() *fault {
	if expired(l.principal, time.Now()) {
		return &fault{code: codeTokenExpired, msg: "The token has expired."}
	}
	if revoked(l.principal) {
		return &fault{code: codeTokenExpired, msg: tokenRevoked}
	}
	if l.topic == "" {
		return l.srv.throttlePrincipal(l.principal)
	}
	return l.srv.throttle(l.principal, l.topic)
}

func (l *lines) fault(ctx context.Context, topic string, err error) *fault {
	l.srv.logCause(ctx, topic, l.principal.Key(), err)
	return busFault(err, codePublishFailed, "The event could not be published.")
}

func (n *line) refuse(f *fault) {
	n.fail = f
	n.done <- struct{}{}
}

// answer writes the answers in the order of the lines. It flushes whenever the next answer is not
// ready.
func (l *lines) answer(w io.Writer) {
	defer close(l.gone)
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	for {
		n, ok := l.wait(w, b)
		if !ok {
			break
		}
		if n.fail != nil {
			l.srv.cfg.Observer.ErrorSent(string(n.fail.code))
			*b = appendError(*b, n.fail.code, n.fail.msg)
		} else {
			*b = append(*b, `{"id":`...)
			*b = jsonscan.AppendString(*b, n.id)
			*b = append(*b, '}')
		}
		*b = append(*b, '\n')
		if len(*b) >= answerBuffer && !l.send(w, b) {
			return
		}
	}
	l.send(w, b)
}

// wait returns the next line once its outcome is known. Before it waits, it sends the buffered
// answers.
func (l *lines) wait(w io.Writer, b *[]byte) (n *line, ok bool) {
	select {
	case n, ok = <-l.queue:
	default:
		if !l.send(w, b) {
			return nil, false
		}
		n, ok = <-l.queue
	}
	if !ok {
		return nil, false
	}
	select {
	case <-n.done:
	default:
		if !l.send(w, b) {
			return nil, false
		}
		<-n.done
	}
	return n, true
}

// send writes b and empties it. It returns false when the client is gone.
func (l *lines) send(w io.Writer, b *[]byte) bool {
	if len(*b) == 0 {
		return true
	}
	_ = l.ctrl.SetWriteDeadline(time.Now().Add(l.srv.cfg.Limits.AnswerStall))
	_, err := w.Write(*b)
	*b = (*b)[:0]
	if err == nil {
		err = l.ctrl.Flush()
	}
	return err == nil
}

// parseLine reads {"payload": any, "opts"?: object}. Both results are parts of text. A tombstone
// needs no payload.
func parseLine(text []byte) (payload []byte, opts jetstream.PublishOptions, fail *fault) {
	if len(text) == 0 {
		return nil, opts, badFrame("the line is empty: it must be an object with a payload")
	}
	if !isObject(text) {
		if jsonscan.Valid(text) {
			return nil, opts, badFrame("a line must be an object with a payload")
		}
		return nil, opts, badJSON()
	}
	var rawOpts []byte
	unknown := ""
	w := jsonscan.Walk(text, jetstream.PayloadLevels-1)
	for w.Next() {
		var buf [16]byte
		switch string(unquoteName(w.Key, buf[:0])) {
		case "payload":
			payload = w.Value
		case "opts":
			rawOpts = w.Value
		default:
			unknown = string(w.Key)
		}
	}
	switch {
	case w.Err() != nil:
		return nil, opts, badJSON()
	case unknown != "":
		return nil, opts, badFrame("a line has payload and opts, and nothing called " + short([]byte(unknown)))
	}
	fail = publishOptions(&opts, rawOpts)
	if payload == nil && opts.Tombstone {
		payload = nullPayload
	}
	if payload == nil {
		return nil, opts, badFrame("payload is missing")
	}
	return payload, opts, fail
}

// bodyGrace is how long a body is read after its token has expired, so that the sender can be told.
const bodyGrace = 5 * time.Second

// steadyReader reads a body whose sender may not pause for longer than Limits.BodyStall, nor send
// more slowly than Limits.BodyRate, nor go on for long when its token ends.
type steadyReader struct {
	r     io.Reader
	ctrl  *http.ResponseController
	stall time.Duration
	rate  int       // bytes a second; 0 for any
	lines bool      // the rate is that of each line
	token time.Time // when it ends; zero for never
	slow  func()    // called when the rate was missed

	began time.Time // of what the rate counts from; zero when nothing has come of it
	size  int       // bytes since then
}

// steady returns a reader of a request's body. With lines, pauses between lines are as long as
// Limits.BodyStall allows, however short the lines.
func (s *Server) steady(r io.Reader, ctrl *http.ResponseController, p Principal, lines bool) *steadyReader {
	return &steadyReader{
		r: r, ctrl: ctrl, stall: s.cfg.Limits.BodyStall, rate: max(s.cfg.Limits.BodyRate, 0), lines: lines, token: p.Expires(),
		slow: func() { s.cfg.Observer.LimitReached("body_rate") },
	}
}

func (s *steadyReader) Read(p []byte) (int, error) {
	now := time.Now()
	by := now.Add(s.stall)
	if end := s.token.Add(bodyGrace); !s.token.IsZero() && end.Before(by) {
		by = end
	}
	if s.began.IsZero() && !s.lines {
		s.began = now
	}
	paced := false
	if s.rate > 0 && !s.began.IsZero() {
		if due := s.began.Add(s.stall + time.Duration(s.size)*time.Second/time.Duration(s.rate)); due.Before(by) {
			by, paced = due, true
		}
	}
	if err := s.ctrl.SetReadDeadline(by); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	n, err := s.r.Read(p)
	if paced && errors.Is(err, os.ErrDeadlineExceeded) {
		s.slow()
	}
	s.size += n
	if s.lines && n > 0 {
		if i := bytes.LastIndexByte(p[:n], '\n'); i >= 0 {
			s.began, s.size = time.Time{}, n-i-1
		}
		if s.size > 0 && s.began.IsZero() {
			s.began = time.Now()
		}
	}
	return n, err
}
