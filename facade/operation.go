package facade

import (
	"bytes"
	"context"
	"slices"
	"time"
)

const (
	// authGrace is how long an AUTH waits for the frames before it when their time is over, and how
	// long it then has itself at least. Frames that arrive together have the same deadline.
	authGrace = time.Second
	// awayTicks is for how many ticks the reader may be busy with a frame before it counts as away.
	awayTicks = uint64(time.Second / tickInterval)
)

// An operation is a frame that waits for the bus, or for an operation before it. It keeps the
// message, so the reader goes on with another one. Everything but what its own goroutine does is
// guarded by the session's mu.
type operation struct {
	frame   frame
	message *[]byte // what the fields of frame are parts of
	memory  int     // what the message takes of the server's inbound memory
	to      replyTo
	arrived time.Time

	topic   *sessionTopic // of a PUBLISH
	topics  []string      // further topics of the subscription that the frame is about, as far as they are known
	running bool          // its goroutine runs
	flushed bool          // of a SUBSCRIBE: the publishes before it are confirmed
}

// deadline is when the frame is to be answered at the latest.
func (o *operation) deadline() time.Time { return o.arrived.Add(callTimeout) }

// late reports that the frame's time is over before it has begun.
func (o *operation) late() bool { return !time.Now().Before(o.deadline()) }

// concerns reports whether an operation is about a topic.
func (o *operation) concerns(topic []byte) bool {
	return bytes.Equal(o.frame.topic, topic) || slices.Contains(o.topics, string(topic))
}

// A pipeline is the list of operations of one session that have not ended, in the order of their
// frames. AUTH is never among them: it waits until there are none.
type pipeline []*operation

// blocked reports whether an operation has to wait for one of those before it.
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

// follows reports whether an operation has to wait for one that was sent before it.
//
//   - Frames about one topic and group keep their order.
//   - Publishes keep their order. Those that may block do so for each other, because a Publisher is
//     for one goroutine.
//   - A SUBSCRIBE waits for the publishes before it, and publishes behind it wait until those are
//     confirmed: otherwise a client that never stops publishing would never be subscribed.
//   - A publish waits for what its client did before to a subscription on its topic.
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

// concerns reports whether an operation is about the subscription that a frame is about.
func (p pipeline) concerns(f *frame) bool {
	for _, o := range p {
		if o.frame.op != opPublish && bytes.Equal(o.frame.group, f.group) && o.concerns(f.topic) {
			return true
		}
	}
	return false
}

// advance begins every operation that has nothing to wait for, in order. begin reports whether the
// operation has ended at once.
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

// enqueue makes the session's frame an operation and begins it, unless it has to wait for another.
// mu is held, and is given up while there are Limits.Operations. topic is for a PUBLISH.
func (s *session) enqueue(topic *sessionTopic) {
	o := &operation{frame: s.frame, arrived: s.wire.arrived, topic: topic, topics: s.frame.subscribe.Topics}
	maxPending := s.srv.cfg.Limits.Operations
	if len(s.pending) >= maxPending {
		s.limit("operations")
		if !s.await(o.deadline(), func() bool { return len(s.pending) < maxPending }) {
			s.failLate(replyTo{corr: o.frame.corr}, o.frame.op)
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
	o.to = s.out.replyTo(o.frame.corr)
	if !s.pending.blocked(o) && s.begin(o) {
		return
	}
	s.pending = append(s.pending, o)
	o.message, o.memory = s.text, s.receiving
	s.text, s.receiving = nil, 0
	s.frame = frame{}
}

// begin carries an operation out, as far as that is possible at once, and reports whether it has
// ended. mu is held.
func (s *session) begin(o *operation) (ended bool) {
	switch o.frame.op {
	case opPublish:
		return s.publishSlowly(o)
	case opSubscribe:
		return s.subscribe(o)
	default:
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

// carryOut does the part of an operation that waits for the bus, in a goroutine that the session
// waits for. mu is held, and not while work runs. The context ends with the operation's deadline,
// or with the connection.
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

// finish takes an operation off, and begins those that waited for it. mu is held.
func (s *session) finish(o *operation) {
	s.pending.remove(o)
	s.giveBack(o)
	s.advance()
}

// advance begins the operations that have nothing to wait for, and wakes whoever waits for fewer.
// mu is held.
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

// giveBack ends the use of an operation's message.
func (s *session) giveBack(o *operation) {
	if o.memory > 0 {
		s.srv.inbound.give(o.memory)
	}
	if o.message != nil {
		putBuffer(o.message)
	}
	o.message, o.memory = nil, 0
}

// await waits until the operations have come so far that ready holds. It reports false when that
// did not happen in time, and true when the session has ended. mu is held, and is given up
// meanwhile.
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

// failLate answers a frame whose time was over before it could begin.
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
