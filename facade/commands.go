package facade

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream"
)

// nullPayload is what a PUBLISH without a payload publishes.
var nullPayload = []byte("null")

// unauthorized is the message of the code of that name.
const unauthorized = "Call AUTH first."

// opNames are for the Observer.
var opNames = [...]string{
	opUnknown: "unknown", opAuth: "AUTH", opPublish: "PUBLISH", opSubscribe: "SUBSCRIBE", opUnsubscribe: "UNSUBSCRIBE",
	opAck: "ACK", opNack: "NACK", opModack: "MODACK", opPause: "PAUSE", opResume: "RESUME",
}

// execute carries out one message, and returns for how long no more should be read. mu is held.
func (s *session) execute(msg []byte) (wait time.Duration) {
	f := &s.frame
	fail := f.cut(msg)
	s.srv.cfg.Observer.FrameReceived(opNames[f.op])
	now := s.wire.readAt
	switch {
	case fail != nil && fail.code == codeBadJSON:
	case s.principal == nil && f.op != opAuth:
		s.fail(replyTo{corr: f.corr}, codeUnauthorized, unauthorized)
		if !s.frames.take(s.srv.frames, now.Sub(s.srv.started)) {
			s.limit("frame_rate")
			s.misread(codeBadFrame) // who goes on like this gets no answers any more
		}
		return 0
	case !settles(f.op) && !s.frames.take(s.srv.frames, now.Sub(s.srv.started)):
		s.limit("frame_rate")
		s.fail(replyTo{corr: f.corr}, codeRateLimited, "This connection sends more than "+strconv.Itoa(s.srv.cfg.Limits.FrameRate)+" frames a second: slow down.")
		return 0
	case fail != nil:
	case f.op == opUnknown:
		fail = &fault{code: codeUnknownOp, msg: "This op is not known."}
	default:
		fail = f.decode()
	}
	if fail != nil {
		s.fail(replyTo{corr: f.corr}, fail.code, fail.msg)
		s.misread(fail.code)
		return 0
	}
	s.faults = 0
	if d := s.due.Load(); d != nil && d.code == closeTokenExpired && !now.Before(d.at) {
		// The ticker is about to say so; nothing is done on an expired token meanwhile.
		if s.due.CompareAndSwap(d, nil) {
			s.expire(d)
		}
		return 0
	}
	s.command(f)
	if settles(f.op) {
		// What came is carried out at once, for the client holds leases; what comes next waits.
		return s.settles.spend(s.srv.settles, max(1, len(f.ids)), now.Sub(s.srv.started))
	}
	return 0
}

// settles reports whether an op is about events that the client holds.
func settles(o op) bool { return o == opAck || o == opNack || o == opModack }

// misread counts frames that make no sense, and gives up on a client that sends nothing else.
func (s *session) misread(c code) {
	switch c {
	case codeBadJSON, codeBadFrame, codeUnknownOp:
		if s.faults++; s.faults > s.srv.cfg.Limits.Faults {
			s.limit("faults")
			s.giveUp(closeProtocolErrors)
		}
	default:
		s.faults = 0
	}
}

// giveUp ends the session from within a frame.
func (s *session) giveUp(c websocket.StatusCode) {
	s.ended = true
	s.out.shut(c)
}

// command carries out the session's frame, or makes it an operation when it would wait for the bus,
// or has to wait for an operation before it.
func (s *session) command(f *frame) {
	switch f.op {
	case opAuth:
		s.auth(f)
	case opPublish:
		s.publish(f)
	case opSubscribe, opUnsubscribe, opPause:
		s.enqueue(nil)
	default:
		if len(s.pending) > 0 && s.pending.concerns(f) {
			s.enqueue(nil)
			return
		}
		to := replyTo{corr: f.corr}
		sub := s.subscriptionOf(f)
		if sub == nil {
			s.failNotSubscribed(to, f)
			return
		}
		s.settle(to, f, sub)
	}
}

// subscriptionOf returns the subscription that a frame is about, or nil.
func (s *session) subscriptionOf(f *frame) *subscription {
	s.key = appendKey(s.key[:0], f.topic, f.group)
	return s.subs[string(s.key)]
}

func (s *session) failNotSubscribed(to replyTo, f *frame) {
	s.fail(to, codeNotSubscribed, string(f.topic)+"::"+string(f.group))
}

// settle carries out a frame on a subscription. It does not wait for the bus.
func (s *session) settle(to replyTo, f *frame, sub *subscription) {
	switch f.op {
	case opAck:
		if f.ids == nil {
			sub.bus.Ack(string(f.id))
		}
		for _, id := range f.ids {
			sub.bus.Ack(string(id))
		}
	case opNack:
		sub.bus.Nack(string(f.id), string(f.reason), f.delay)
	case opModack:
		if !sub.bus.Extend(string(f.id), f.extend) {
			s.fail(to, codeUnknownID, "This subscription holds no event of this id.")
			return
		}
	case opResume:
		sub.bus.Resume()
	default:
		s.fail(to, codeUnknownOp, "This op is not known.")
		return
	}
	s.out.ok(to, "")
}

// auth replaces the connection's policy, after all operations before it have ended. When these take
// too long it is refused like an AUTH with a bad token: what they were allowed to do must not
// outlive the AUTH.
func (s *session) auth(f *frame) {
	deadline := s.wire.arrived.Add(callTimeout)
	var p Principal
	fail := errOperationsLate
	if s.await(deadline.Add(authGrace), func() bool { return len(s.pending) == 0 }) {
		if s.ended {
			return
		}
		if least := time.Now().Add(authGrace); deadline.Before(least) {
			deadline = least
		}
		p, fail = s.authenticate(f, deadline)
	}
	clear(s.topics)
	if fail == nil && !s.srv.connections.move(s.counted, p.Key(), s.srv.cfg.Limits.PrincipalConnections) {
		s.limit("principal_connections")
		fail = &fault{code: codeOverloaded, msg: "This client has as many connections as it may have, which is " +
			strconv.Itoa(s.srv.cfg.Limits.PrincipalConnections) + "."}
	}
	if fail != nil {
		s.refuse(f, fail)
		return
	}
	s.principal, s.counted = p, p.Key()
	s.pub.CountFor(s.counted)
	s.refusals = 0
	s.wantsResets.Store(f.resets)
	s.srv.unauthenticated.remove(s)
	s.due.Store(nil)
	if at := p.Expires(); !at.IsZero() {
		s.due.Store(&due{at: at, code: closeTokenExpired})
	}
	lost := maps.Clone(s.subs)
	maps.DeleteFunc(lost, func(_ string, sub *subscription) bool { return s.srv.maySubscribe(p, sub) })
	s.endSubs(lost, Subscription.Stop)
	for _, sub := range lost {
		s.tell(codeForbidden, "The new policy does not allow "+sub.topic+"::"+sub.group+"; the subscription has ended.")
	}
	s.out.ok(replyTo{corr: f.corr}, "")
}

// errOperationsLate refuses an AUTH whose turn did not come.
var errOperationsLate = &fault{code: codeOverloaded, msg: "The frames before it took too long: AUTH again."}

func (s *session) authenticate(f *frame, deadline time.Time) (Principal, *fault) {
	ctx, cancel := context.WithDeadline(s.ctx, deadline)
	defer cancel()
	return s.srv.authenticate(ctx, string(f.token))
}

// refuse answers an AUTH that failed. The connection is unauthenticated again, whatever it was.
func (s *session) refuse(f *frame, fail *fault) {
	if s.principal != nil {
		s.principal = nil
		s.srv.connections.remove(s.counted)
		s.counted = ""
		s.awaitAuth()
		s.endSubs(s.subs, Subscription.Stop)
	}
	s.fail(replyTo{corr: f.corr}, fail.code, fail.msg)
	if fail.rule().retry {
		return // nothing is wrong with the token
	}
	if s.refusals++; s.refusals > s.srv.cfg.Limits.AuthTries {
		s.limit("auth_tries")
		s.giveUp(closeAuthRefused)
	}
}

// publish sends an event. The answer comes when the stream has stored it; frames behind it go on.
// The first publish to a topic may wait until the topic is made, so that it becomes an operation.
func (s *session) publish(f *frame) {
	topic, fail := s.publishTopic(f.topic)
	if fail != nil {
		s.fail(replyTo{corr: f.corr}, fail.code, fail.msg)
		return
	}
	if len(s.pending) > 0 || !topic.known {
		s.enqueue(topic)
		return
	}
	if fail = s.srv.throttle(s.principal, topic.name); fail != nil {
		s.fail(replyTo{corr: f.corr}, fail.code, fail.msg)
		return
	}
	ctx := s.publishContext()
	if ctx.Err() != nil && s.ctx.Err() == nil {
		s.failLate(replyTo{corr: f.corr}, opPublish)
		return
	}
	s.send(ctx, topic.name, f, s.out.replyTo(f.corr))
}

// publishSlowly is publish for an operation.
func (s *session) publishSlowly(o *operation) (ended bool) {
	if o.late() {
		s.failLate(o.to, opPublish)
		return true
	}
	if s.principal == nil { // an AUTH did not wait for this any longer
		s.fail(o.to, codeUnauthorized, unauthorized)
		return true
	}
	if fail := s.srv.throttle(s.principal, o.topic.name); fail != nil {
		s.fail(o.to, fail.code, fail.msg)
		return true
	}
	s.carryOut(o, func(ctx context.Context) {
		if s.send(ctx, o.topic.name, &o.frame, o.to) {
			s.mu.Lock()
			defer s.mu.Unlock()
			o.topic.known = true
		}
	})
	return false
}

// send hands an event to the bus, and reports whether it was taken. Exactly one answer comes.
func (s *session) send(ctx context.Context, topic string, f *frame, to replyTo) bool {
	payload := f.payload
	if payload == nil {
		payload = nullPayload
	}
	r := s.newReceipt(to)
	if err := s.pub.PublishAsync(ctx, topic, payload, f.publish, r.done); err != nil {
		r.free()
		s.failBus(to, err, codePublishFailed, "The event could not be published.")
		return false
	}
	return true
}

// sessionTopic is a topic that the client may publish to.
type sessionTopic struct {
	name  string
	known bool // the session has published there, so that the next publish finds the topic made
}

// publishTopic returns the topic that the client may publish to. It remembers the answers of one policy, which saves the
// check and the string.
func (s *session) publishTopic(name []byte) (*sessionTopic, *fault) {
	if topic, ok := s.topics[string(name)]; ok {
		return topic, nil
	}
	topic := string(name)
	if fail := s.srv.mayPublish(s.principal, topic); fail != nil {
		return nil, fail
	}
	if s.topics == nil {
		s.topics = make(map[string]*sessionTopic)
	}
	for other := range s.topics { // any other will do
		if len(s.topics) < maxTopicsKnown {
			break
		}
		delete(s.topics, other)
	}
	s.topics[topic] = &sessionTopic{name: topic}
	return s.topics[topic], nil
}

// receipt waits for the outcome of one publish. Receipts are pooled, with the bound method that the bus calls.
type receipt struct {
	session *session
	to      replyTo // corr is the receipt's own
	hasCorr bool
	done    func(jetstream.Receipt, error)
}

var receipts sync.Pool

func (s *session) newReceipt(to replyTo) *receipt {
	r, ok := receipts.Get().(*receipt)
	if !ok {
		r = new(receipt)
		r.done = r.answer
	}
	r.session = s
	r.to.turn = to.turn
	r.to.corr = append(r.to.corr[:0], to.corr...)
	r.hasCorr = to.corr != nil
	return r
}

// answer is called by the bus, and must not block.
func (r *receipt) answer(got jetstream.Receipt, err error) {
	to := r.to
	if !r.hasCorr {
		to.corr = nil
	}
	if err != nil {
		r.session.failBus(to, err, codePublishFailed, "The event could not be published.")
	} else {
		r.session.out.ok(to, got.ID)
	}
	r.free()
}

func (r *receipt) free() {
	r.session = nil
	receipts.Put(r)
}

// failBus answers with an error of the bus. Only what the bus meant for clients is shown; the rest goes to the log.
func (s *session) failBus(to replyTo, err error, otherwise code, msg string) {
	fail := busFault(err, otherwise, msg)
	s.srv.logCause(err)
	s.fail(to, fail.code, fail.msg)
}

// busFault is what a client is told about an error of the bus; otherwise and msg are for errors not meant for clients.
func busFault(err error, otherwise code, msg string) *fault {
	if known, ok := errors.AsType[*jetstream.Error](err); ok {
		return &fault{code: code(known.Code), msg: known.Msg, tooLarge: errors.Is(err, jetstream.ErrTooLarge)}
	}
	return &fault{code: otherwise, msg: msg}
}
