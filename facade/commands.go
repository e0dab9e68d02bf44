package facade

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
)

// nullPayload is what a PUBLISH without a payload publishes.
var nullPayload = []byte("null")

// unauthorized is the message of the code unauthorized.
const unauthorized = "Call AUTH first."

// opNames are the names of the ops for the Observer.
var opNames = [...]string{
	opUnknown: "unknown", opAuth: "AUTH", opPublish: "PUBLISH", opSubscribe: "SUBSCRIBE", opUnsubscribe: "UNSUBSCRIBE",
	opAck: "ACK", opNack: "NACK", opModack: "MODACK", opPause: "PAUSE", opResume: "RESUME",
}

// execute executes one message and returns how long the reader must wait before it reads on. mu is
// held.
func (s *session) execute(msg []byte) (wait time.Duration) {
	f := &s.frame
	fail := f.cut(msg)
	s.srv.cfg.Observer.FrameReceived(opNames[f.op])
	now := s.wire.readAt
	switch {
	case fail != nil && fail.code == codeBadJSON && !utf8.Valid(msg):
		s.giveUp(websocket.StatusInvalidFramePayloadData)
		return 0
	case fail != nil && fail.code == codeBadJSON:
	case s.principal == nil && f.op != opAuth:
		s.fail(replyTo{corr: f.corr}, codeUnauthorized, unauthorized)
		if !s.frames.take(s.srv.frames, now.Sub(s.srv.started)) {
			s.limit("frame_rate")
			s.misread(codeBadFrame) // a client that goes on like this is closed
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
		s.failWith(replyTo{corr: f.corr}, fail)
		s.misread(fail.code)
		return 0
	}
	s.faults = 0
	if d := s.due.Load(); d != nil && d.code == closeTokenExpired && !now.Before(d.at) {
		// The ticker is about to end the connection. Until then an expired token permits nothing.
		if s.due.CompareAndSwap(d, nil) {
			s.expire(d)
		}
		return 0
	}
	settled := 0
	if settles(f.op) {
		settled = max(1, len(f.ids)) // command takes over the frame if another has to come first
	}
	s.command(f)
	if settled > 0 {
		// The client holds leases, so its frame is executed at once. The reader waits before the
		// next one.
		return s.settles.spend(s.srv.settles, settled, now.Sub(s.srv.started))
	}
	return 0
}

// settles reports whether an op is about events that the client holds.
func settles(o op) bool { return o == opAck || o == opNack || o == opModack }

// misread counts consecutive frames that make no sense, and closes a client that sends nothing
// else.
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

// giveUp ends the session while a frame is executed.
func (s *session) giveUp(c websocket.StatusCode) {
	s.ended = true
	s.out.shut(c)
}

// command executes the session's frame. A frame that would wait for the bus, or that must wait for
// an earlier operation, becomes an operation.
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

// settle executes a frame on a subscription. It does not wait for the bus.
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

// auth replaces the connection's policy after all earlier operations have ended. If they take too
// long, the AUTH is refused like one with a bad token: the permissions of those operations must not
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
		fail = &fault{code: codeOverloaded, msg: "This client has reached its limit of " +
			strconv.Itoa(s.srv.cfg.Limits.PrincipalConnections) + " connections."}
	}
	if fail != nil {
		s.refuse(f, fail)
		return
	}
	s.principal, s.counted = p, p.Key()
	if s.who.Swap(&p) == nil {
		s.srv.log.LogAttrs(s.ctx, slog.LevelDebug, "client connected", s.attrs(p))
	} else {
		s.srv.log.LogAttrs(s.ctx, slog.LevelDebug, "client changed its token", s.attrs(p))
	}
	s.pub.CountFor(s.counted)
	s.refusals = 0
	s.wantsResets.Store(f.resets)
	s.wantsLosses.Store(f.losses)
	s.wantsPause.Store(f.pauses)
	s.srv.unauthenticated.remove(s)
	s.due.Store(nil)
	if at := p.Expires(); !at.IsZero() {
		s.due.Store(&due{at: at, code: closeTokenExpired})
	}
	s.endBroadcasts(p)
	lost, denied := make(map[string]*subscription), make(map[string]string)
	for key, sub := range s.subs {
		if topic := s.srv.deniedTopic(p, sub); topic != "" {
			lost[key], denied[key] = sub, topic
		}
	}
	s.endSubs(lost, Subscription.Stop)
	for key, sub := range lost {
		which := ""
		if denied[key] != sub.topic {
			which = " " + sub.topic + "::" + sub.group
		}
		s.tell(codeForbidden, "The new policy does not allow "+denied[key]+"::"+sub.group+"; the subscription"+which+" has ended.")
	}
	s.out.ok(replyTo{corr: f.corr}, "")
}

// errOperationsLate refuses an AUTH whose earlier operations did not end in time.
var errOperationsLate = &fault{code: codeOverloaded, msg: "The frames before it took too long: AUTH again."}

func (s *session) authenticate(f *frame, deadline time.Time) (Principal, *fault) {
	ctx, cancel := context.WithDeadline(s.ctx, deadline)
	defer cancel()
	return s.srv.authenticate(ctx, string(f.token), guesser{address: sourceOf(s.remote), authenticated: s.principal != nil})
}

// refuse answers an AUTH that failed. The connection is unauthenticated afterwards, even if it was
// authenticated before.
func (s *session) refuse(f *frame, fail *fault) {
	if s.principal != nil {
		s.principal = nil
		s.who.Store(nil)
		s.srv.connections.remove(s.counted)
		s.counted = ""
		s.awaitAuth()
		s.endBroadcasts(nil)
		s.endSubs(s.subs, Subscription.Stop)
	}
	s.srv.refusedToken(s.ctx, s.remote, "websocket", fail)
	s.failWith(replyTo{corr: f.corr}, fail)
	if fail.ends {
		s.giveUp(closeAuthRefused)
		return
	}
	if fail.rule().retry {
		return // the token itself is not at fault
	}
	if s.refusals++; s.refusals > s.srv.cfg.Limits.AuthTries {
		s.limit("auth_tries")
		s.giveUp(closeAuthRefused)
	}
}

// publish sends an event. The reply comes when the stream has stored the event; the reader goes on
// to the next frame meanwhile. The first publish to a topic may wait until the topic exists, and a
// publish with a delay until the events that wait are counted, so these become operations.
func (s *session) publish(f *frame) {
	topic, fail := s.publishTopic(f.topic)
	if fail != nil {
		s.failWith(replyTo{corr: f.corr}, fail)
		return
	}
	if len(s.pending) > 0 || !topic.known || f.publish.Delayed() {
		s.enqueue(topic)
		return
	}
	if fail = s.srv.throttle(s.principal, topic.name); fail != nil {
		s.failWith(replyTo{corr: f.corr}, fail)
		return
	}
	ctx := s.publishContext()
	if ctx.Err() != nil && s.ctx.Err() == nil {
		s.failLate(replyTo{corr: f.corr}, opPublish)
		return
	}
	to := s.out.replyTo(f.corr)
	f.publish.Brief = true // a long comparison would hold up the acks of this connection
	if s.send(ctx, topic.name, f, to) == sendLong {
		s.enqueueAs(topic, to)
	}
}

// publishSlowly is publish as an operation.
func (s *session) publishSlowly(o *operation) (ended bool) {
	if o.late() {
		s.failLate(o.to, opPublish)
		return true
	}
	if s.principal == nil { // an AUTH gave up waiting for this operation
		s.fail(o.to, codeUnauthorized, unauthorized)
		return true
	}
	if !o.throttled {
		if fail := s.srv.throttle(s.principal, o.topic.name); fail != nil {
			s.failWith(o.to, fail)
			return true
		}
	}
	o.frame.publish.Brief = false
	s.carryOut(o, func(ctx context.Context) {
		if s.send(ctx, o.topic.name, &o.frame, o.to) == sendAccepted {
			s.mu.Lock()
			defer s.mu.Unlock()
			o.topic.known = true
		}
	})
	return false
}

// sendOutcome is what became of an event that was handed to the bus.
type sendOutcome int

const (
	sendRefused sendOutcome = iota
	sendAccepted
	sendLong // the publish takes long, and has to become an operation
)

// send hands an event to the bus. Exactly one reply is sent, unless the publish takes long.
func (s *session) send(ctx context.Context, topic string, f *frame, to replyTo) sendOutcome {
	payload := f.payload
	if payload == nil {
		payload = nullPayload
	}
	r := s.newReceipt(topic, to)
	if err := s.pub.PublishAsync(ctx, topic, payload, f.publish, r.done); err != nil {
		r.free()
		if errors.Is(err, schemas.ErrLong) {
			return sendLong
		}
		s.failBus(to, topic, err, codePublishFailed, "The event could not be published.")
		return sendRefused
	}
	return sendAccepted
}

// sessionTopic is a topic that the client may publish to.
type sessionTopic struct {
	name  string
	known bool // the session has published there, so the topic exists
}

// publishTopic returns the topic if the client may publish to it. It caches the answers of the
// current policy, which saves the check and the conversion to a string.
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
	for other := range s.topics { // evicts an arbitrary topic
		if len(s.topics) < maxTopicsKnown {
			break
		}
		delete(s.topics, other)
	}
	s.topics[topic] = &sessionTopic{name: topic}
	return s.topics[topic], nil
}

// receipt waits for the outcome of one publish. Receipts are pooled, along with the bound method
// that the bus calls.
type receipt struct {
	session *session
	topic   string
	to      replyTo // corr is a copy that the receipt owns
	hasCorr bool
	done    func(jetstream.Receipt, error)
}

var receipts sync.Pool

func (s *session) newReceipt(topic string, to replyTo) *receipt {
	r, ok := receipts.Get().(*receipt)
	if !ok {
		r = new(receipt)
		r.done = r.answer
	}
	r.session, r.topic = s, topic
	r.to.turn = to.turn
	r.to.corr = append(r.to.corr[:0], to.corr...)
	r.hasCorr = to.corr != nil
	return r
}

// answer sends the reply. The bus calls answer, so it must not block.
func (r *receipt) answer(got jetstream.Receipt, err error) {
	to := r.to
	if !r.hasCorr {
		to.corr = nil
	}
	if err != nil {
		r.session.failBus(to, r.topic, err, codePublishFailed, "The event could not be published.")
	} else {
		r.session.out.ok(to, got.ID)
	}
	r.free()
}

func (r *receipt) free() {
	r.session, r.topic = nil, ""
	receipts.Put(r)
}

// failBus replies with an error of the bus. The client sees only errors that the bus meant for
// clients; the causes of all other errors go to the log.
func (s *session) failBus(to replyTo, topic string, err error, otherwise code, msg string) {
	fail := busFault(err, otherwise, msg)
	s.srv.logCause(s.ctx, topic, s.client(), err)
	s.failWith(to, fail)
}

// busFault returns what a client is told about an error of the bus. otherwise and msg are for
// errors that are not meant for clients.
func busFault(err error, otherwise code, msg string) *fault {
	if known, ok := errors.AsType[*jetstream.Error](err); ok {
		return &fault{code: code(known.Code), msg: known.Msg, tooLarge: errors.Is(err, jetstream.ErrTooLarge), permanent: known.Permanent, wait: known.Wait}
	}
	return &fault{code: otherwise, msg: msg}
}
