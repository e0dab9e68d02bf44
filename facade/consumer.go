package facade

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

const (
	// consumerTick is how often a stream looks whether its token still counts.
	consumerTick = time.Second
	// maxNotices is how many notices wait for a client that does not read; further ones are
	// dropped.
	maxNotices = 16
)

// consumer is a member of a group over HTTP: the events of a stream, or those of one pull. It is
// registered from before it joins until none of its leases is left. The methods may be called
// concurrently, except join.
type consumer struct {
	srv    *Server
	who    Principal
	kind   consumerKind
	number uint64 // among the connections of the server
	remote string
	since  time.Time
	sub    *subscription
	places *share // of which it has one

	// over is closed when the delivery of events is to end.
	over chan struct{}
	// some holds an element while something is queued.
	some chan struct{}

	mu      sync.Mutex
	joined  bool                     // sub.bus is set
	ended   bool                     // over is closed
	code    websocket.StatusCode     // why; 0: the group was deleted
	grace   time.Time                // until when an answer may be written after the end
	ctrl    *http.ResponseController // of the answer under way, or nil
	queue   []*jetstream.Held        // bounded by maxInFlight, and pruned of what has ended
	notices []notice                 // to be sent before the queue
	events  backlog                  // not encoded yet; some may have been given back
	unsent  int                      // bytes of what is encoded
	resting bool                     // there is no answer any more, only leases
}

// newConsumer registers a consumer for the SUBSCRIBE of a request, or says why there is none. The
// caller calls leave.
func (s *Server) newConsumer(r *http.Request, f *frame, kind consumerKind) (*consumer, *fault) {
	p := principalOf(r)
	sub := newSubscription(f, s.cfg.Limits.Lease)
	if fail := s.maySubscribe(p, sub); fail != nil {
		return nil, fail
	}
	sub.countFor(s, p)
	return s.enterConsumer(r, p, sub, kind)
}

// enterConsumer is newConsumer without the question to the policy.
func (s *Server) enterConsumer(r *http.Request, p Principal, sub *subscription, kind consumerKind) (*consumer, *fault) {
	c := &consumer{
		srv: s, who: p, kind: kind, number: s.numbered.Add(1), remote: s.remoteOf(r), since: time.Now(),
		sub: sub, places: s.streams, over: make(chan struct{}), some: make(chan struct{}, 1),
	}
	if kind == consumerPull {
		c.places = s.pulls
	}
	if ok, mine := c.places.take(p.Key(), 1); !ok {
		if mine {
			s.cfg.Observer.LimitReached("principal_" + string(kind) + "s")
			return nil, &fault{code: codeRateLimited, msg: "This client has reached its limit of " + kind.plural() + "."}
		}
		s.cfg.Observer.LimitReached(string(kind) + "s")
		return nil, &fault{code: codeOverloaded, msg: "The hub has reached its limit of " + kind.plural() + "."}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || s.closed {
		c.places.give(p.Key(), 1)
		return nil, errDraining
	}
	s.consumers[c] = struct{}{}
	s.wg.Add(1)
	s.cfg.Observer.Consumers(string(kind), 1)
	return c, nil
}

// consumerKind is one of the ways to consume over HTTP, as metrics and limits name it.
type consumerKind string

const (
	consumerStream consumerKind = "stream"
	consumerPull   consumerKind = "pull"
)

func (k consumerKind) plural() string {
	if k == consumerPull {
		return "pulls that wait or have unsettled events"
	}
	return "streams"
}

var errDraining = &fault{code: codeOverloaded, msg: "The hub is shutting down."}

// maySubscribe checks the names, and asks the policy.
func (s *Server) maySubscribe(p Principal, sub *subscription) *fault {
	if fail := sub.validate(); fail != nil {
		return fail
	}
	if denied := s.deniedTopic(p, sub); denied != "" {
		return deniedGroup(denied, sub.group)
	}
	return nil
}

func deniedGroup(topic, group string) *fault {
	return &fault{code: codeForbidden, msg: "The policy does not allow to subscribe to " + topic + "::" + group + "."}
}

// leave ends the registration. No lease is left.
func (c *consumer) leave() {
	s := c.srv
	c.places.give(c.who.Key(), 1)
	s.cfg.Observer.Consumers(string(c.kind), -1)
	s.mu.Lock()
	delete(s.consumers, c)
	s.endedLocked()
	s.mu.Unlock()
	s.wg.Done()
}

// join makes the subscription and starts the delivery of events.
func (c *consumer) join(ctx context.Context, f *frame) *fault {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s := c.srv
	opts := s.busOptions(f, c.sub)
	opts.Handles = true
	opts.OnDeleted = func(string) { c.end(0) }
	opts.OnReset = func(string) { c.notice(codeGroupReset, c.sub.topic+"::"+c.sub.group) }
	opts.OnLost = func(l jetstream.Loss) { c.notice(codeEventsLost, c.sub.lossText(l)) }
	if opts.OrderByKey && c.kind == consumerStream { // a pull is a member for a moment
		opts.OnAssign = func(a jetstream.Assignment) { c.assign(&a) }
	}
	joined, err := s.joinInTurn(ctx, c.sub, opts, c.push)
	if err != nil {
		c.sub.end()
		s.logCause(ctx, c.sub.topic, c.who.Key(), err)
		return busFault(err, codeSubscribeFailed, "The subscription could not be made.")
	}
	c.mu.Lock()
	c.sub.bus, c.joined = joined, true
	ended := c.ended
	c.mu.Unlock()
	if ended {
		c.stop(ctx, Subscription.Stop)
		return errDraining
	}
	joined.Resume()
	return nil
}

// stop ends the subscription in the given way. The end of the request does not cut this short.
func (c *consumer) stop(ctx context.Context, how ending) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	c.srv.endSub(ctx, c.who.Key(), c.sub, how)
}

// end ends the delivery of events. A code of 0 means that the group was deleted.
func (c *consumer) end(code websocket.StatusCode) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.ended, c.code = true, code
	c.grace = time.Now().Add(c.srv.cfg.Limits.CloseGrace)
	close(c.over)
	if c.ctrl != nil {
		_ = c.ctrl.SetWriteDeadline(c.grace)
	}
}

// drain gives the client the time grace to settle what it holds, gives the rest back, and ends the
// delivery.
func (c *consumer) drain(ctx context.Context, grace time.Duration) {
	defer c.end(closeDraining)
	c.mu.Lock()
	joined := c.joined
	c.mu.Unlock()
	if !joined {
		return
	}
	settle, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	defer c.sub.end()
	_ = c.sub.bus.Drain(settle)
}

// push queues an event. The bus calls it, so it does not block.
func (c *consumer) push(h *jetstream.Held) {
	c.mu.Lock()
	if c.resting {
		c.mu.Unlock()
		return
	}
	if len(c.queue) == cap(c.queue) { // before it grows, what was given back goes
		c.queue = slices.DeleteFunc(c.queue, func(h *jetstream.Held) bool {
			ended := !h.Valid()
			if ended {
				c.countLocked(h, -1)
			}
			return ended
		})
	}
	c.queue = append(c.queue, h)
	c.countLocked(h, 1)
	c.mu.Unlock()
	c.wake()
}

// notice is a frame beside the events.
type notice struct {
	message string // the name of a server-sent event
	topic   string // of an ASSIGN
	frame   []byte
}

// assign queues an ASSIGN frame, in place of one of its topic that was not sent yet: each names all
// slots.
func (c *consumer) assign(a *jetstream.Assignment) {
	n := notice{message: "assign", topic: a.Topic, frame: appendAssign(nil, c.sub.groupJSON, a)}
	c.mu.Lock()
	c.notices = append(slices.DeleteFunc(c.notices, func(old notice) bool { return old.message == n.message && old.topic == n.topic }), n)
	c.mu.Unlock()
	c.wake()
}

// notice queues an ERR frame.
func (c *consumer) notice(code code, msg string) {
	c.srv.cfg.Observer.ErrorSent(string(code))
	c.mu.Lock()
	if len(c.notices) < maxNotices {
		c.notices = append(c.notices, notice{message: "error", frame: appendErr(nil, nil, code, msg, false)})
	}
	c.mu.Unlock()
	c.wake()
}

func (c *consumer) wake() {
	select {
	case c.some <- struct{}{}:
	default:
	}
}

// take returns what is queued, at most limit events.
func (c *consumer) take(limit int) (notices []notice, held []*jetstream.Held) {
	c.mu.Lock()
	defer c.mu.Unlock()
	notices, c.notices = c.notices, nil
	if len(c.queue) <= limit {
		held, c.queue = c.queue, nil
		return notices, held
	}
	held = slices.Clone(c.queue[:limit])
	c.queue = slices.Delete(c.queue, 0, limit)
	return notices, held
}

// rest ends the use of the queue: the events that it has, and what still comes, are given back.
func (c *consumer) rest() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.resting = true
	c.queue, c.events = nil, backlog{}
}

// countLocked counts an event that waits. mu is held.
func (c *consumer) countLocked(h *jetstream.Held, n int) {
	c.events.frames += n
	c.events.bytes += n * (itemCost + len(h.Event.Payload))
}

// encoding notes that an event does not wait any more. It comes before BeginSend, which empties the
// event.
func (c *consumer) encoding(h *jetstream.Held) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.countLocked(h, -1)
}

// sending notes how many bytes wait for the kernel.
func (c *consumer) sending(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unsent = n
}

// queued returns what waits until the kernel takes it.
func (c *consumer) queued() backlog {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.events
	b.bytes += c.unsent
	return b
}

// waiting returns how many events are queued.
func (c *consumer) waiting() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue)
}

// why returns why the delivery has ended; 0 means that the group was deleted.
func (c *consumer) why() websocket.StatusCode {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.code
}

// answers sets the controller of the answer, until the answer has ended.
func (c *consumer) answers(ctrl *http.ResponseController) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ctrl = ctrl
}

// limitWrite gives the client a time for what is written next. After the end of the delivery, all
// of the answer together has Limits.CloseGrace: a client that reads slowly must not keep the hub.
func (c *consumer) limitWrite(within time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	until := time.Now().Add(within)
	if c.ended && c.grace.Before(until) {
		until = c.grace
	}
	_ = c.ctrl.SetWriteDeadline(until)
}

// parting gives the client Limits.CloseGrace anew, for the last message.
func (c *consumer) parting() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.grace = time.Now().Add(c.srv.cfg.Limits.CloseGrace)
}

// lapsed ends the delivery if the token does not count any more, and reports whether that is so.
func (c *consumer) lapsed(now time.Time) bool {
	why := c.invalid(now)
	if why == "" {
		return false
	}
	c.mu.Lock()
	ended := c.ended
	c.mu.Unlock()
	if !ended {
		c.notice(codeTokenExpired, why)
		c.end(closeTokenExpired)
	}
	return true
}

// invalid returns why the token does not count any more, or "".
func (c *consumer) invalid(now time.Time) string {
	switch {
	case revoked(c.who):
		return tokenRevoked
	case expired(c.who, now):
		return "The token has expired."
	}
	return ""
}

// appendAck appends the member ack.
func appendAck(dst []byte, handle string) []byte {
	dst = append(dst, `,"ack":"`...) // letters, digits, - and _
	return append(append(dst, handle...), '"')
}

// sentEvent is one event in an answer.
type sentEvent struct {
	start   int // of its bytes
	sending jetstream.Sending
}

// outgoing is a part of an answer with events. Their leases run from the moment at which the kernel
// has taken them.
type outgoing struct {
	bytes  []byte
	events []sentEvent
}

// add adds an event as encode writes it, and begins its lease. If the event does not belong to the
// consumer any more, nothing is added.
func (o *outgoing) add(h *jetstream.Held, encode func(dst []byte) []byte) {
	start := len(o.bytes)
	o.bytes = encode(o.bytes)
	sending, begun := h.BeginSend()
	if !begun {
		o.bytes = o.bytes[:start]
		return
	}
	o.events = append(o.events, sentEvent{start, sending})
}

// send hands a part of an answer to the kernel, piece by piece, each within a time, and empties it.
// After an error, events of which the kernel took no piece did not reach the client, and those of a
// part that is of use only as a whole did not either. A part that is of use piece by piece is
// hurried when the token does not count any more.
func (c *consumer) send(w http.ResponseWriter, o *outgoing, within time.Duration, whole bool) error {
	sent := 0
	var err error
	for sent < len(o.bytes) && err == nil {
		piece := o.bytes[sent:min(sent+answerPiece, len(o.bytes))]
		if !whole {
			c.lapsed(time.Now())
		}
		c.limitWrite(within)
		c.sending(len(o.bytes) - sent)
		if _, err = w.Write(piece); err == nil {
			err = c.ctrl.Flush()
		}
		if err == nil {
			sent += len(piece)
		}
	}
	c.sending(0)
	if err != nil && whole {
		sent = 0
	}
	for _, e := range o.events {
		if e.start < sent {
			e.sending.Written()
		} else {
			e.sending.TakeBack()
		}
	}
	clear(o.events)
	o.bytes, o.events = o.bytes[:0], o.events[:0]
	if cap(o.bytes) > maxKeptText {
		o.bytes = nil
	}
	return err
}

// queryFrame is the SUBSCRIBE of a query. The options are those of the frame.
func queryFrame(raw string) (*frame, *fault) {
	values, fail := parseConsume(raw)
	if fail != nil {
		return nil, fail
	}
	opts := []byte{'{'}
	for _, name := range consumeParams[2:] {
		given, ok := values[name]
		if !ok {
			continue
		}
		if len(opts) > 1 {
			opts = append(opts, ',')
		}
		opts = append(jsonscan.AppendString(opts, name), ':')
		switch {
		case name == "topics":
			opts = append(opts, '[')
			for i, topic := range given {
				if i > 0 {
					opts = append(opts, ',')
				}
				opts = jsonscan.AppendString(opts, topic)
			}
			opts = append(opts, ']')
		case isDecimal(given[0]) && name != "afterId":
			opts = append(opts, given[0]...)
		default:
			opts = jsonscan.AppendString(opts, given[0])
		}
	}
	f := &frame{op: opSubscribe, topic: []byte(values.Get("topic")), group: []byte(values.Get("group"))}
	return f, subscribeOptions(&f.subscribe, append(opts, '}'))
}

// isDecimal reports whether s is an integer as JSON has it.
func isDecimal(s string) bool {
	n, err := strconv.ParseInt(s, 10, 64)
	return err == nil && strconv.FormatInt(n, 10) == s
}
