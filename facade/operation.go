package facade

import (
	"bytes"
	"context"
	"slices"
	"time"
)

const (
	// authGrace is how long an AUTH waits for earlier frames after its own deadline, and the least
	// time that it then has itself. Frames that arrive together have the same deadline.
	authGrace = time.Second
	// awayTicks is how many ticks the reader may be busy with one frame before it counts as away.
	awayTicks = uint64(time.Second / tickInterval)
)

// An operation is a frame that waits for the bus, or for an earlier operation. It keeps the
// message, so the reader goes on with a new buffer. The session's mu guards all fields; only the
// operation's own goroutine works without mu.
type operation struct {
	frame   frame
	message *[]byte // holds the bytes of frame's fields
	memory  int     // bytes of the server's inbound memory that the message takes
	to      replyTo
	arrived time.Time

	topic   *sessionTopic // of a PUBLISH
	topics  []string      // further topics of the frame's subscription, as far as known
	running bool          // its goroutine runs
	flushed bool          // of a SUBSCRIBE: all earlier publishes are confirmed
	// throttled is set for a PUBLISH that has taken from its quotas, and has to.
	throttled bool
}

// deadline returns the time by which the frame must be answered.
func (o *operation) deadline() time.Time { return o.arrived.Add(callTimeout) }

// late reports whether the frame's deadline passed before the frame began.
func (o *operation) late() bool { return !time.Now().Before(o.deadline()) }

// concerns reports whether an operation is about a topic.
func (o *operation) concerns(topic []byte) bool {
	return bytes.Equal(o.frame.topic, topic) || slices.Contains(o.topics, string(topic))
}

// A pipeline lists the operations of one session that have not ended, in the order of their frames.
// It never contains an AUTH, which waits until the pipeline is empty.
type pipeline []*operation

// blocked reports whether an operation must wait for an earlier one.
func (p pipeline) blocked(o *operation) bool {
	for _, before := range p {
		if before == o {
			return false
		}
		if o.follows(before) {
			return true
		}
	}
	return false
}

// follows reports whether an operation must wait for before, which was sent earlier.
//
//   - Frames about one topic and group keep their order.
//   - Publishes keep their order. Publishes that may block wait for each other, because a Publisher
//     is for one goroutine.
//   - A SUBSCRIBE waits for earlier publishes. Later publishes wait until the earlier ones are
//     confirmed: otherwise a client that never stops publishing would never be subscribed.
//   - A publish waits for earlier operations of its client on subscriptions to its topic.
func (o *operation) follows(before *operation) bool {
	a, b := before.frame.op, o.frame.op
	switch {
	case a == opPublish:
		return b == opPublish || b == opSubscribe
	case b == opPublish:
		return before.concerns(o.frame.topic) || a == opSubscribe && !before.flushed
	case !bytes.Equal(before.frame.group, o.frame.group):
		return false
	case before.concerns(o.frame.topic):
		return true
	}
	return slices.ContainsFunc(o.topics, func(topic string) bool { return before.concerns([]byte(topic)) })
}

// concerns reports whether any operation is about the subscription of a frame.
func (p pipeline) concerns(f *frame) bool {
	for _, o := range p {
		if o.frame.op != opPublish && bytes.Equal(o.frame.group, f.group) && o.concerns(f.topic) {
			return true
		}
	}
	return false
}

// advance begins every operation that need not wait, in order. begin reports whether the operation
// has already ended.
func (p *pipeline) advance(begin func(*operation) (ended bool)) {
	for i := 0; i < len(*p); {
		o := (*p)[i]
		if !o.running && !p.blocked(o) && begin(o) {
			p.remove(o)
			continue
		}
		i++
	}
}

func (p *pipeline) remove(o *operation) {
	if i := slices.Index(*p, o); i >= 0 {
		*p = slices.Delete(*p, i, i+1)
	}
}

// enqueue turns the session's frame into an operation, and begins the operation unless it must
// wait. mu is held, and is released while there are Limits.Operations. topic is set for a PUBLISH.
func (s *session) enqueue(topic *sessionTopic) {
	s.enqueueOp(&operation{frame: s.frame, arrived: s.wire.arrived, topic: topic, topics: s.frame.subscribe.Topics})
}

// enqueueAs is enqueue for a publish that has been throttled, and whose reply has its place.
func (s *session) enqueueAs(topic *sessionTopic, to replyTo) {
	s.enqueueOp(&operation{frame: s.frame, arrived: s.wire.arrived, topic: topic, to: to, throttled: true})
}

func (s *session) enqueueOp(o *operation) {
	maxPending := s.srv.cfg.Limits.Operations
	if len(s.pending) >= maxPending {
		s.limit("operations")
		if !s.await(o.deadline(), func() bool { return len(s.pending) < maxPending }) {
			to := o.to
			if !o.throttled {
				to = replyTo{corr: o.frame.corr}
			}
			s.failLate(to, o.frame.op)
			return
		}
		if s.ended {
			return
		}
	}
	if o.frame.op != opPublish && o.frame.op != opSubscribe {
		if sub := s.subscriptionOf(&o.frame); sub != nil {
			o.topics = sub.more
		}
	}
	if !o.throttled {
		o.to = s.out.replyTo(o.frame.corr)
	}
	if !s.pending.blocked(o) && s.begin(o) {
		return
	}
	s.pending = append(s.pending, o)
	o.message, o.memory = s.text, s.receiving
	s.text, s.receiving = nil, 0
	s.frame = frame{}
}

// begin executes an operation as far as possible at once, and reports whether it has ended. mu is
// held.
func (s *session) begin(o *operation) (ended bool) {
	switch o.frame.op {
	case opPublish:
		return s.publishSlowly(o)
	case opSubscribe:
		if o.frame.cast != nil {
			return s.broadcast(o)
		}
		return s.subscribe(o)
	default:
		if o.frame.cast != nil {
			return s.unbroadcast(o)
		}
	}
	sub := s.subscriptionOf(&o.frame)
	if sub != nil {
		o.topics = sub.more
	}
	switch {
	case sub == nil:
		s.failNotSubscribed(o.to, &o.frame)
	case o.frame.op == opUnsubscribe:
		return s.unsubscribe(o, sub)
	case o.frame.op == opPause:
		return s.pause(o, sub)
	default:
		s.settle(o.to, &o.frame, sub)
	}
	return true
}

// carryOut runs the part of an operation that waits for the bus, in a goroutine that the session
// waits for. mu is held by the caller, and not while work runs. The context ends with the
// operation's deadline, or with the connection.
func (s *session) carryOut(o *operation, work func(context.Context)) {
	o.running = true
	s.calls.Go(func() {
		defer s.survive()
		ctx, cancel := context.WithDeadline(s.ctx, o.deadline())
		defer cancel()
		work(ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.finish(o)
	})
}

// finish removes an operation and begins those that waited for it. mu is held.
func (s *session) finish(o *operation) {
	s.pending.remove(o)
	s.giveBack(o)
	s.advance()
}

// advance begins the operations that need not wait, and wakes goroutines that wait for operations
// to end. mu is held.
func (s *session) advance() {
	if !s.ended {
		s.pending.advance(func(o *operation) bool {
			ended := s.begin(o)
			if ended {
				s.giveBack(o)
			}
			return ended
		})
	}
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// giveBack releases the buffer and the memory of an operation's message.
func (s *session) giveBack(o *operation) {
	if o.memory > 0 {
		s.srv.inbound.give(o.memory)
	}
	if o.message != nil {
		putBuffer(o.message)
	}
	o.message, o.memory = nil, 0
}

// await waits until ready returns true. It returns false when that did not happen before until, and
// true when the session has ended. mu is held, and is released while await waits.
func (s *session) await(until time.Time, ready func() bool) bool {
	ctx, cancel := context.WithDeadline(s.ctx, until)
	defer cancel()
	for !ready() && !s.ended {
		if ctx.Err() != nil {
			return s.ctx.Err() != nil
		}
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
	return true
}

// failLate answers a frame whose deadline passed before it could begin.
func (s *session) failLate(to replyTo, o op) {
	const why = "The frames before it took too long: "
	switch o {
	case opPublish:
		s.fail(to, codePublishFailed, why+"nothing was stored, try again.")
	case opSubscribe:
		s.fail(to, codeSubscribeFailed, why+"nothing was done, try again.")
	case opAck, opNack, opModack:
		s.fail(to, codeAckFailed, why+"nothing was done, try again.")
	default:
		s.fail(to, codeOverloaded, why+"nothing was done, try again.")
	}
}
