package facade

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// Bounds of a pull.
const (
	defaultPull     = 100
	maxPull         = 1000
	defaultPullWait = 1_000  // milliseconds
	maxPullWait     = 30_000 // milliseconds
	// leastPullWait is how long a pull waits for its first event at least: so long NATS may take to
	// say what is there.
	leastPullWait = 100 * time.Millisecond
	// pullPause is how long a pull that has an event waits for a next one.
	pullPause = 20 * time.Millisecond
	// pullGather is how long a pull that has an event waits for further ones in all.
	pullGather = 100 * time.Millisecond
	// pullCasts is how long the events of an answer may take to be cast.
	pullCasts = 5 * time.Second
	// pullBytes is the size of an answer from which on no further event is added.
	pullBytes = 4 << 20
	// requestBytes is the largest body of a pull or a settlement: one with as many handles as there
	// may be, whatever the largest payload is.
	requestBytes = 1 << 20
)

// pullRequest is the body of POST /groups/{topic}/{group}/pull.
type pullRequest struct {
	frame *frame // the SUBSCRIBE
	max   int
	wait  time.Duration
}

// servePull serves POST /groups/{topic}/{group}/pull: a member of the group that takes some events.
// Their leases outlive the request.
func (s *Server) servePull(w http.ResponseWriter, r *http.Request) {
	p := principalOf(r)
	q, fail := s.readPull(w, r, p)
	var c *consumer
	if fail == nil {
		c, fail = s.newConsumer(r, q.frame, consumerPull)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	rests := false
	defer func() {
		if !rests {
			c.leave()
		}
	}()
	if fail := c.join(r.Context(), q.frame); fail != nil {
		s.refuse(w, fail)
		return
	}
	handOver(r)
	o := &pulled{consumer: c, max: q.max}
	c.answers(http.NewResponseController(w))
	defer c.answers(nil)
	defer o.free()
	if fail := o.collect(r.Context(), time.Now().Add(max(q.wait, leastPullWait))); fail != nil {
		c.stop(r.Context(), Subscription.Stop)
		if r.Context().Err() == nil {
			s.refuse(w, fail)
		}
		return
	}
	header := w.Header()
	header.Set("Content-Type", "application/json")
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Length", strconv.Itoa(len(o.out.bytes)))
	if err := c.send(w, &o.out, s.cfg.Limits.AnswerStall, true); err != nil {
		c.stop(r.Context(), Subscription.Stop) // gives all back: half an answer is none
		return
	}
	rests = true
	c.rest()
	s.wg.Go(func() {
		defer c.leave()
		_ = c.sub.bus.Drain(s.ctx) // the leases outlive the request, and not the server
		c.sub.end()
	})
}

// readPull reads path and body.
func (s *Server) readPull(w http.ResponseWriter, r *http.Request, p Principal) (q pullRequest, fail *fault) {
	topic, fail := topicParam(r)
	if fail != nil {
		return q, fail
	}
	group, err := pathParam(r, "group")
	if err != nil {
		return q, &fault{code: codeBadGroup, msg: "The group in the path is not URL-encoded correctly."}
	}
	q.frame = &frame{op: opSubscribe, topic: []byte(topic), group: []byte(group)}
	// No byte of the body is read before the client has permission.
	if fail := s.maySubscribe(p, newSubscription(q.frame, s.cfg.Limits.Lease)); fail != nil {
		return q, fail
	}
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	if fail := s.readRequest(w, r, p, b, true); fail != nil {
		return q, fail
	}
	return q, q.parse(*b)
}

// parse reads the body, which is an object.
func (q *pullRequest) parse(body []byte) *fault {
	var most, wait, opts []byte
	for walk := jsonscan.Walk(body, 0); walk.Next(); {
		switch string(unquoteName(walk.Key, nil)) {
		case "max":
			most = walk.Value
		case "wait_ms":
			wait = walk.Value
		case "opts":
			opts = walk.Value
		}
	}
	n, fail := bodyInt("max", most, defaultPull, 1, maxPull)
	if fail == nil {
		q.max = int(n)
		n, fail = bodyInt("wait_ms", wait, defaultPullWait, 0, maxPullWait)
		q.wait = time.Duration(n) * time.Millisecond
	}
	if fail == nil {
		fail = subscribeOptions(&q.frame.subscribe, opts)
	}
	if fail != nil {
		return fail
	}
	given := &q.frame.subscribe
	if given.MaxInFlight != 0 || given.BatchSize != 0 {
		return &fault{code: codeBadOptions, msg: "A pull has no opts.maxInFlight and no opts.batchSize: max is both."}
	}
	given.MaxInFlight, given.BatchSize = q.max, q.max
	return nil
}

// readRequest reads a body that is a JSON object. If mayBeEmpty is set, an empty body counts as an
// empty object.
func (s *Server) readRequest(w http.ResponseWriter, r *http.Request, p Principal, b *[]byte, mayBeEmpty bool) *fault {
	fail := s.readBody(w, r, p, b, requestBytes, mayBeEmpty)
	switch {
	case fail != nil && fail.tooLarge:
		return &fault{code: codeBadOptions, msg: "The body is larger than " + strconv.Itoa(requestBytes) + " bytes."}
	case fail != nil:
		return fail
	case mayBeEmpty && string(*b) == string(nullPayload):
		*b = append((*b)[:0], "{}"...)
	case !isObject(*b):
		return &fault{code: codeBadOptions, msg: "The body must be a JSON object, not " + kind(*b) + "."}
	}
	return nil
}

// bodyInt reads an integer of a body.
func bodyInt(name string, raw []byte, byDefault, least, limit int64) (int64, *fault) {
	if missing(raw) {
		return byDefault, nil
	}
	n, ok := integer(raw)
	if !ok || n < least || n > limit {
		return 0, &fault{code: codeBadOptions, msg: name + " must be an integer from " + strconv.FormatInt(least, 10) + " to " +
			strconv.FormatInt(limit, 10) + ", not " + short(raw)}
	}
	return n, nil
}

// pulled is the answer to a pull.
type pulled struct {
	*consumer
	max   int
	out   outgoing
	taken int // bytes of the server's memory for pages
}

// free gives back the memory of the answer.
func (o *pulled) free() { o.srv.pages.give(o.who.Key(), o.taken) }

// collect waits for events, and encodes them. It returns without any at the deadline, and with some
// when there are max, when there is no further one at once, or when the answer is large.
func (o *pulled) collect(ctx context.Context, deadline time.Time) *fault {
	end := time.NewTimer(time.Until(deadline))
	defer end.Stop()
	pause := time.NewTimer(time.Hour)
	defer pause.Stop()
	var first time.Time
	for {
		select {
		case <-ctx.Done():
			return &fault{code: codeOverloaded, msg: "The client has gone."}
		case <-o.over:
			if o.why() == 0 {
				return &fault{code: codeSubscribeFailed, msg: "The group was deleted at this moment."}
			}
			if o.why() == closeByOperator {
				return &fault{code: codeOverloaded, msg: "An operator ended the pull."}
			}
			return errDraining
		case <-o.some:
			if n := o.waiting(); 0 < n && n < o.max {
				if first.IsZero() {
					first = time.Now()
				}
				pause.Reset(max(0, min(pullPause, pullGather-time.Since(first))))
				continue
			}
		case <-pause.C:
		case <-end.C:
			_, fail := o.encode(ctx)
			return fail
		}
		if ctx.Err() != nil {
			continue
		}
		if done, fail := o.encode(ctx); done || fail != nil {
			return fail
		}
	}
}

// encode makes the answer of what is queued. done is false if that is no event any more. What takes
// long to cast is left out after pullCasts, and given back.
func (o *pulled) encode(ctx context.Context) (done bool, fail *fault) {
	ctx, cancel := context.WithTimeout(ctx, o.srv.pullCasts)
	defer cancel()
	if why := o.invalid(time.Now()); why != "" {
		return true, &fault{code: codeTokenExpired, msg: why}
	}
	notices, held := o.take(o.max)
	o.out.bytes = append(o.out.bytes[:0], `{"events":[`...)
	for _, h := range held { // an answer that is full leaves some out, which are given back
		o.encoding(h)
	}
	for _, h := range held {
		ok, err := h.Cast(ctx)
		if err != nil {
			if len(o.out.events) == 0 {
				fail = busFault(castFault(err), codeOverloaded, "The client has gone.")
			}
			break
		}
		if !ok {
			continue
		}
		size := eventSize(&h.Event)
		if len(o.out.events) > 0 && len(o.out.bytes)+size > pullBytes {
			break
		}
		if ok, mine := o.srv.pages.take(o.who.Key(), size); !ok {
			name := "page_total"
			if mine {
				name = "principal_page_total"
			}
			o.srv.cfg.Observer.LimitReached(name)
			if len(o.out.events) == 0 {
				fail = &fault{code: codeOverloaded, msg: "The hub has reached its limit of answers that clients have not taken yet."}
			}
			break
		}
		o.taken += size
		o.add(h)
	}
	o.out.bytes = append(o.out.bytes, ']')
	for i, n := range notices {
		if i == 0 {
			o.out.bytes = append(o.out.bytes, `,"notices":[`...)
		} else {
			o.out.bytes = append(o.out.bytes, ',')
		}
		o.out.bytes = append(o.out.bytes, n.frame...)
	}
	if len(notices) > 0 {
		o.out.bytes = append(o.out.bytes, ']')
	}
	o.out.bytes = append(o.out.bytes, "}\n"...)
	return len(o.out.events)+len(notices) > 0, fail
}

// add adds one event.
func (o *pulled) add(h *jetstream.Held) {
	o.out.add(h, func(dst []byte) []byte {
		if len(o.out.events) > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '{')
		dst = appendDelivery(dst, &h.Event, h.Attempt, o.sub.ackDeadlineMS)
		return append(appendAck(dst, h.Handle()), '}')
	})
}
