package facade

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

const (
	// streamRetry is how long a browser waits before it opens an ended stream again.
	streamRetry = time.Second
	// streamBatch is how many events are encoded at a time.
	streamBatch = 64
	// maxLastID is the most bytes of a Last-Event-ID.
	maxLastID = 1024
)

// consumeParams are the parameters of GET /subscribe: the names, and the options of a SUBSCRIBE.
var consumeParams = []string{"topic", "group", "from", "ts", "afterId", "batchSize", "maxInFlight", "ackTimeoutMs", "maxAttempts", "topics", "groupTtlMs", "ordered", "slots", optSchemaVersion}

// parseConsume reads the query of GET /subscribe.
func parseConsume(raw string) (url.Values, *fault) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, &fault{code: codeBadOptions, msg: "The query is not URL-encoded correctly."}
	}
	return values, checkParams(values, consumeParams)
}

// serveStream serves GET /subscribe: the events of a group as server-sent events. The client
// settles them by their handles, with other requests.
func (s *Server) serveStream(w http.ResponseWriter, r *http.Request) {
	f, fail := queryFrame(r.URL.RawQuery)
	if r.ContentLength != 0 {
		// net/http would not notice that a client leaves before the body has ended.
		fail = &fault{code: codeBadOptions, msg: "A request for a stream has no body.", ends: true}
	}
	if fail == nil {
		fail = lastEventID(r, f)
	}
	var c *consumer
	if fail == nil {
		c, fail = s.newConsumer(r, f, consumerStream)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	defer c.leave()
	if fail := c.join(r.Context(), f); fail != nil {
		s.refuse(w, fail)
		return
	}
	handOver(r)
	beginStream(w)
	o := &stream{consumer: c, w: w}
	c.answers(http.NewResponseController(w))
	o.retry(streamRetry)
	o.comment(": subscribed")
	code := o.run(r.Context(), o.events)
	c.answers(nil)
	s.cfg.Observer.StreamClosed(int(code))
	// What the client was sent and has not settled counts as a failed attempt, as on a WebSocket.
	c.stop(r.Context(), Subscription.Disconnect)
}

func beginStream(w http.ResponseWriter) {
	header := w.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-store, no-transform")
	header.Set("X-Accel-Buffering", "no") // nginx would keep events back
}

// lastEventID reads the id of the last event that a client had of an earlier stream. A new group
// starts behind it; for a group that exists it means nothing, because the group knows what is
// settled.
func lastEventID(r *http.Request, f *frame) *fault {
	given := r.Header["Last-Event-Id"]
	switch {
	case len(given) == 0 || given[0] == "":
		return nil
	case len(given) > 1 || len(given[0]) > maxLastID || !utf8.ValidString(given[0]):
		return &fault{code: codeBadOptions, msg: "The header Last-Event-ID must be one id of an event."}
	}
	f.subscribe.From = jetstream.FromAfterID(given[0])
	return nil
}

// stream writes the events of a consumer as they come.
type stream struct {
	*consumer
	w     http.ResponseWriter
	out   outgoing
	quiet time.Time // since when nothing was sent
}

// run writes with write what comes, until the client goes, the token does not count any more, or
// the delivery ends. It returns the code for that, which the client is told if it is one of the
// hub's.
func (o *stream) run(ctx context.Context, write func(context.Context) error) websocket.StatusCode {
	if o.flush() != nil {
		return websocket.StatusAbnormalClosure
	}
	tick := time.NewTicker(min(consumerTick, o.srv.cfg.Limits.StreamBeat))
	defer tick.Stop()
	o.quiet = time.Now()
	for {
		select {
		case <-ctx.Done():
			return websocket.StatusAbnormalClosure
		case <-o.over:
			return o.close()
		case <-o.some:
			o.quiet = time.Now()
			if err := write(ctx); err != nil {
				return o.lost(err)
			}
		case now := <-tick.C:
			if o.lapsed(now) {
				continue
			}
			if err := o.beat(now); err != nil {
				return o.lost(err)
			}
		}
	}
}

// beat writes a comment if it is time for one.
func (o *stream) beat(now time.Time) error {
	if now.Sub(o.quiet) < o.srv.cfg.Limits.StreamBeat {
		return nil
	}
	o.quiet = now
	o.comment(": beat")
	return o.flush()
}

// cast casts an event. Before a long cast, it sends the events before, and during the cast, beats.
func (o *stream) cast(ctx context.Context, h *jetstream.Held) (ok bool, err error) {
	ok, long := h.CastBriefly()
	if !long {
		return ok, nil
	}
	if err := o.flush(); err != nil {
		return false, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan bool, 1)
	go func() {
		defer close(done)
		ok, err := h.CastSlowly(ctx)
		done <- ok && err == nil
	}()
	defer func() {
		cancel()
		for range done {
		}
	}()
	tick := time.NewTicker(min(consumerTick, o.srv.cfg.Limits.StreamBeat))
	defer tick.Stop()
	for {
		select {
		case ok := <-done:
			return ok, ctx.Err()
		case <-o.over:
			return false, nil // what is left goes back
		case now := <-tick.C:
			if o.lapsed(now) {
				return false, nil
			}
			if err := o.beat(now); err != nil {
				return false, err
			}
		}
	}
}

// lost is the code of a stream whose client did not take what was sent.
func (o *stream) lost(err error) websocket.StatusCode {
	if code := o.why(); code != 0 {
		return code // the end of the delivery hurried the client
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		return websocket.StatusAbnormalClosure
	}
	o.srv.cfg.Observer.LimitReached("write_stall")
	return closeSlowConsumer
}

// events writes all that is queued.
func (o *stream) events(ctx context.Context) error {
	for ctx.Err() == nil {
		notices, held := o.take(streamBatch)
		if len(notices)+len(held) == 0 {
			return nil
		}
		for _, n := range notices {
			o.message(n.message, "", n.frame)
		}
		for _, h := range held {
			if o.lapsed(time.Now()) {
				return o.flush() // no event goes out after that
			}
			o.encoding(h)
			ok, err := o.cast(ctx, h)
			if err != nil {
				return err
			}
			if !ok {
				continue
			}
			o.event(h)
			if len(o.out.bytes) >= flushSize {
				if err := o.flush(); err != nil {
					return err
				}
			}
		}
		if err := o.flush(); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// event adds an EVENT frame with a handle, on one line.
func (o *stream) event(h *jetstream.Held) {
	o.out.add(h, func(dst []byte) []byte {
		dst = appendField(dst, "event", "event")
		if id := h.Event.ID; onOneLine(id) {
			dst = appendField(dst, "id", id)
		}
		dst = append(dst, "data: "...)
		start := len(dst)
		dst = o.sub.appendEvent(dst, h)
		dst = append(appendAck(dst[:len(dst)-1], h.Handle()), '}')
		spaceBreaks(dst[start:])
		return append(dst, "\n\n"...)
	})
}

// onOneLine reports whether an id may be the id of a server-sent event. Native publishers may give
// any.
func onOneLine(id string) bool {
	for i := range len(id) {
		if id[i] < ' ' {
			return false
		}
	}
	return id != "" && utf8.ValidString(id)
}

func appendField(dst []byte, name, value string) []byte {
	dst = append(append(dst, name...), ": "...)
	return append(append(dst, value...), '\n')
}

// message adds a message of one line.
func (o *stream) message(name, id string, data []byte) {
	b := appendField(o.out.bytes, "event", name)
	if id != "" {
		b = appendField(b, "id", id)
	}
	b = append(append(b, "data: "...), data...)
	o.out.bytes = append(b, "\n\n"...)
}

// retry adds a line that says when to open the stream again, to what follows.
func (o *stream) retry(after time.Duration) {
	o.out.bytes = appendField(o.out.bytes, "retry", strconv.FormatInt(after.Milliseconds(), 10))
}

// comment adds lines that are no message.
func (o *stream) comment(text string) {
	o.out.bytes = append(append(o.out.bytes, text...), "\n\n"...)
}

func (o *stream) flush() error {
	return o.send(o.w, &o.out, o.srv.cfg.Limits.WriteStall, false)
}

// close tells the client why the hub ends the stream, and returns the code.
func (o *stream) close() websocket.StatusCode {
	code := o.why()
	if code == 0 {
		o.notice(codeNotSubscribed, o.sub.topic+"::"+o.sub.group)
		code = websocket.StatusNormalClosure
	}
	notices, _ := o.take(0)
	for _, n := range notices {
		o.message(n.message, "", n.frame)
	}
	if reason, ours := closings[code]; ours {
		data := strconv.AppendInt([]byte(`{"code":`), int64(code), 10)
		data = jsonscan.AppendString(append(data, `,"reason":`...), reason.name)
		if code == closeDraining {
			pause := o.srv.returns.pause()
			o.retry(pause + streamRetry)
			data = strconv.AppendInt(append(data, `,"retry_after_ms":`...), pause.Milliseconds(), 10)
		}
		o.message("close", "", append(data, '}'))
	}
	o.parting()
	_ = o.flush() // the client may be gone
	return code
}
