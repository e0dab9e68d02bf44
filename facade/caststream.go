package facade

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade/textmsg"
	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/panics"
)

// castParams are the parameters of GET /broadcast/{topic}: the options of a SUBSCRIBE.
var castParams = []string{"history", "snapshot", "from", "pos", "ts", "afterId", "slow", "conflate", "minIntervalMs", "presence", optSchemaVersion}

// followParams are the parameters of Follow.
var followParams = []string{"history"}

// castQuery reads a query for a broadcast, which may have the parameters params. A client that had
// an earlier stream goes on behind lastID, whatever the query says.
func castQuery(raw, lastID string, params []string) (*castOptions, *fault) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, &fault{code: codeBadOptions, msg: "The query is not URL-encoded correctly."}
	}
	if fail := checkParams(values, params); fail != nil {
		return nil, fail
	}
	if lastID != "" {
		for _, name := range []string{"history", "snapshot", "ts", "afterId"} {
			values.Del(name)
		}
		values.Set("from", "pos")
		values.Set("pos", lastID)
	}
	// The name of a message tells clients what it is, so this one needs no option.
	opts := []byte(`{"mode":"` + modeBroadcast + `","snapshotEnd":true`)
	for _, name := range castParams {
		if !values.Has(name) {
			continue
		}
		opts = append(jsonscan.AppendString(append(opts, ','), name), ':')
		value := values.Get(name)
		switch {
		case (name == "snapshot" || name == "presence") && (value == "true" || value == "false"),
			isDecimal(value) && name != "pos" && name != "afterId":
			opts = append(opts, value...)
		default:
			opts = jsonscan.AppendString(opts, value)
		}
	}
	return readCastOptions(opSubscribe, append(opts, '}'))
}

// castRequest reads a request for a broadcast of a topic.
func castRequest(r *http.Request, topic string, params []string) (opts *castOptions, fail *fault) {
	if r.ContentLength != 0 {
		// net/http would not notice that a client leaves before the body has ended.
		return nil, &fault{code: codeBadOptions, msg: "A request for a stream has no body.", ends: true}
	}
	given := r.Header["Last-Event-Id"]
	if len(given) > 1 || len(given) == 1 && len(given[0]) > maxLastID {
		return nil, &fault{code: codeBadOptions, msg: "The header Last-Event-ID must be one pos."}
	}
	if opts, fail = castQuery(r.URL.RawQuery, r.Header.Get("Last-Event-Id"), params); fail != nil {
		return nil, fail
	}
	if err := jetstream.ValidTopic(topic); err != nil {
		return nil, busFault(err, codeBadTopic, "The topic is not well formed.")
	}
	return opts, nil
}

// serveBroadcast serves GET /broadcast/{topic}: a broadcast as server-sent events.
func (s *Server) serveBroadcast(w http.ResponseWriter, r *http.Request) {
	p := principalOf(r)
	topic, fail := topicParam(r)
	var opts *castOptions
	if fail == nil {
		opts, fail = castRequest(r, topic, castParams)
	}
	if fail == nil {
		fail = s.mayBroadcast(p, topic, opts)
	}
	present := s.cfg.Bus.Rule(topic).Presence
	if fail == nil && opts.presence && !present {
		fail = &fault{code: codeBadOptions, msg: "topic " + topic + " has no presence; its rule needs presence: true"}
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.serveCast(w, r, p, &cast{srv: s, topic: topic, client: p.Key(), opts: *opts, shown: present}, nil)
}

// Follow serves the events of a topic as they come, as server-sent events: what GET
// /broadcast/{topic} serves, for an operator, who is not present at the topic. The caller has asked
// the policy for p, and Follow ends when p does not count any more. The parameter history of the
// request is how many events come first, and its header Last-Event-ID goes on behind an earlier
// stream. Each EVENT frame is sent as hide returns it; hide must not keep or change what it gets. A
// nil hide sends frames as they are. A topic that does not exist is not created; its answer is 404.
func (s *Server) Follow(w http.ResponseWriter, r *http.Request, p Principal, topic string, hide func(frame []byte) []byte) {
	opts, fail := castRequest(r, topic, followParams)
	if fail == nil {
		fail = s.exists(r.Context(), topic, p)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.serveCast(w, r, p, &cast{srv: s, topic: topic, client: p.Key(), opts: *opts}, hide)
}

// exists returns nil if a topic exists.
func (s *Server) exists(ctx context.Context, topic string, p Principal) *fault {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := s.cfg.Bus.History(topic).Place(ctx, "")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jetstream.ErrNotFound):
		return &fault{code: codeNotFound, msg: "There is no such topic."}
	}
	s.logCause(ctx, topic, p.Key(), err)
	return busFault(err, codeSubscribeFailed, "The broadcast could not be begun.")
}

// serveCast serves a broadcast to p as server-sent events. hide is as in Follow.
func (s *Server) serveCast(w http.ResponseWriter, r *http.Request, p Principal, c *cast, hide func([]byte) []byte) {
	member, fail := s.enterConsumer(r, p, &subscription{topic: c.topic}, consumerStream)
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	defer member.leave()
	ctx, cancel := context.WithCancel(r.Context())
	o := &castStream{stream: stream{consumer: member, w: w}, cast: c, hide: hide, below: make(chan struct{}, 1), ended: ctx.Done()}
	defer o.calls.Wait()
	defer cancel()
	c.to = o
	start, err := o.join(ctx)
	if err != nil {
		s.refuse(w, o.joinFault(ctx, err))
		return
	}
	defer c.stop()
	c.seat(p.Name())
	handOver(r)
	beginStream(w)
	o.answers(http.NewResponseController(w))
	defer o.answers(nil)
	o.retry(streamRetry)
	pos := string(appendPos(nil, c.tail.Place().Made.UnixNano(), start.from))
	id := pos
	if c.opts.snapshot {
		id = "" // a client that goes on from here would miss the snapshot
	}
	o.stream.message("subscribed", id, appendOKAt(nil, nil, pos, start.reason))
	c.begin(start)
	s.cfg.Observer.StreamClosed(int(o.run(ctx, o.write)))
}

// castStream is a broadcast over HTTP. The goroutine of its request is the flusher.
type castStream struct {
	stream
	cast  *cast
	hide  func([]byte) []byte // nil: EVENT frames go as they are
	calls sync.WaitGroup
	below chan struct{} // holds an element after what was queued has been sent
	ended <-chan struct{}

	mu      sync.Mutex
	posted  []byte // framed messages
	unnamed int    // bytes of them, at the beginning, whose messages have no id
	writing int    // bytes that were taken from posted
	spare   []byte // for the next messages
}

// join begins the broadcast, unless the server begins to drain.
func (o *castStream) join(ctx context.Context) (castStart, error) {
	within, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	defer context.AfterFunc(o.srv.streaming, cancel)() //nolint:contextcheck // it is for all streams
	return o.cast.join(within, ctx)
}

func (o *castStream) joinFault(ctx context.Context, err error) *fault {
	if o.srv.streaming.Err() != nil {
		return errDraining
	}
	o.srv.logCause(ctx, o.cast.topic, o.cast.client, err)
	return busFault(err, codeSubscribeFailed, "The broadcast could not be begun.")
}

func (o *castStream) post(framed []byte) {
	o.mu.Lock()
	o.posted = append(o.posted, framed...)
	if o.cast.snapping.Load() {
		o.unnamed = len(o.posted)
	}
	o.mu.Unlock()
	o.consumer.wake()
}

func (o *castStream) waitBelow(n int) bool {
	for {
		o.mu.Lock()
		size := len(o.posted) + o.writing
		o.mu.Unlock()
		if size < n {
			return true
		}
		select {
		case <-o.below:
		case <-o.over:
			return false
		case <-o.ended:
			return false
		}
	}
}

func (o *castStream) wake(*cast) { o.consumer.wake() }

func (o *castStream) shut(code websocket.StatusCode) { o.end(code) }

func (o *castStream) gone(topic string) {
	o.notice(codeNotSubscribed, topic)
	o.end(websocket.StatusNormalClosure)
}

func (o *castStream) call(f func()) {
	o.calls.Go(func() {
		defer func() {
			if p := recover(); p != nil {
				panics.Note(o.srv.often.By("func"), "broadcast", p)
				o.end(websocket.StatusInternalError)
			}
		}()
		f()
	})
}

// write writes what has come.
func (o *castStream) write(context.Context) error {
	notices, _ := o.take(0)
	for _, n := range notices {
		o.stream.message(n.message, "", n.frame)
	}
	if err := o.flush(); err != nil {
		return err
	}
	// What was queued before the broadcast was live goes out before what the ring has.
	o.cast.ready = o.cast.live.Load()
	o.mu.Lock()
	framed, unnamed := o.posted, o.unnamed
	o.posted, o.unnamed, o.writing, o.spare = o.spare[:0], 0, len(framed), nil
	o.mu.Unlock()
	if err := o.messages(framed[:unnamed], false); err != nil {
		return err
	}
	if err := o.messages(framed[unnamed:], true); err != nil {
		return err
	}
	o.mu.Lock()
	o.writing = 0
	if cap(framed) <= 2*flushSize {
		o.spare = framed[:0]
	}
	o.mu.Unlock()
	select {
	case o.below <- struct{}{}:
	default:
	}
	return o.cast.flush()
}

func (o *castStream) send(frames []byte) error { return o.messages(frames, true) }

// messages writes framed messages as server-sent events. It writes their text from where it lies:
// all streams share the memory of the ring.
func (o *castStream) messages(framed []byte, named bool) error {
	if len(framed) == 0 {
		return nil
	}
	defer o.sending(0)
	left := 0 // bytes until the client gets a new time
	for len(framed) > 0 {
		if o.lapsed(time.Now()) {
			return nil // no event goes out after that; run says so
		}
		o.sending(len(framed))
		var text []byte
		text, framed = textmsg.Cut(framed)
		name, id := castMessage(text)
		if !named {
			id = nil
		}
		if o.hide != nil && name == "event" {
			text = o.hide(text)
		}
		if bytes.IndexByte(text, '\n') >= 0 || bytes.IndexByte(text, '\r') >= 0 {
			text = slices.Clone(text) // the payload has line breaks between its tokens
			spaceBreaks(text)
		}
		head := appendField(o.out.bytes[:0], "event", name)
		if len(id) > 0 {
			head = append(append(append(head, "id: "...), id...), '\n')
		}
		o.out.bytes = append(head, "data: "...)
		for _, part := range [][]byte{o.out.bytes, text, []byte("\n\n")} {
			for len(part) > 0 {
				if left <= 0 {
					o.limitWrite(o.srv.cfg.Limits.WriteStall)
					left = answerPiece
				}
				n, err := o.w.Write(part[:min(len(part), answerPiece)])
				if err != nil {
					return err
				}
				part = part[n:]
				left -= n
			}
		}
		o.out.bytes = o.out.bytes[:0]
	}
	o.limitWrite(o.srv.cfg.Limits.WriteStall)
	return o.ctrl.Flush()
}

// castMessage returns what a frame of a broadcast is called as a server-sent event, and the place
// from which a client goes on behind it.
func castMessage(text []byte) (name string, id []byte) {
	switch {
	case bytes.HasPrefix(text, []byte(`{"op":"EVENT"`)): // ends with "pos":"…"}}
		text = bytes.TrimSuffix(text, []byte(`"}}`))
		return "event", text[bytes.LastIndexByte(text, '"')+1:]
	case bytes.HasPrefix(text, []byte(`{"op":"GAP"`)):
		_, text, _ = bytes.Cut(text, []byte(`","to":"`))
		id, _, _ = bytes.Cut(text, []byte(`"`))
		return "gap", id
	case bytes.HasPrefix(text, []byte(`{"op":"SNAPSHOT"`)): // ends with "pos":"…"}
		text = bytes.TrimSuffix(text, []byte(`"}`))
		return "snapshot", text[bytes.LastIndexByte(text, '"')+1:]
	}
	return "presence", nil
}
