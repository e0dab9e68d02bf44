package facade

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// defaultAckTimeout is the length of a lease when SUBSCRIBE names none: the bus's default.
const defaultAckTimeout = 30 * time.Second

// nullPayload is what a PUBLISH without a payload publishes.
var nullPayload = []byte("null")

// opNames are for the Observer.
var opNames = [...]string{
	opUnknown: "unknown", opAuth: "AUTH", opPublish: "PUBLISH", opSubscribe: "SUBSCRIBE", opUnsubscribe: "UNSUBSCRIBE",
	opAck: "ACK", opNack: "NACK", opModack: "MODACK", opPause: "PAUSE", opResume: "RESUME",
}

// subscription is one of a session, under the key of its topic and group.
type subscription struct {
	bus           *jetstream.Subscription
	topic, group  string
	more          []string // further topics
	topicJSON     []byte   // topic and group as JSON strings
	groupJSON     []byte
	ackDeadlineMS int64
}

// appendEvent encodes a delivery. The lease starts when the frame is handed to the socket, so all of it remains.
func (sub *subscription) appendEvent(dst []byte, d *jetstream.Delivery) []byte {
	return appendEvent(dst, sub.topicJSON, sub.groupJSON, &d.Event, d.Attempt, sub.ackDeadlineMS)
}

// appendKey appends the key of a subscription. Neither name can hold a NUL.
func appendKey(dst, topic, group []byte) []byte {
	dst = append(dst, topic...)
	dst = append(dst, 0)
	return append(dst, group...)
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
		s.fail(f.corr, codeUnauthorized, "Call AUTH first.")
		if !s.frames.take(s.srv.frames, now.Sub(s.srv.started)) {
			s.limit("frame_rate")
			s.misread(codeBadFrame) // who goes on like this gets no answers any more
		}
		return 0
	case !settles(f.op) && !s.frames.take(s.srv.frames, now.Sub(s.srv.started)):
		s.limit("frame_rate")
		s.fail(f.corr, codeRateLimited, "This connection sends more than "+strconv.Itoa(s.srv.cfg.Limits.FrameRate)+" frames a second: slow down.")
		return 0
	case fail != nil:
	case f.op == opUnknown:
		fail = &fault{code: codeUnknownOp, msg: "This op is not known."}
	default:
		fail = f.decode()
	}
	if fail != nil {
		s.fail(f.corr, fail.code, fail.msg)
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

func (s *session) command(f *frame) {
	switch f.op {
	case opAuth:
		s.auth(f)
	case opPublish:
		s.publish(f)
	case opSubscribe:
		s.subscribe(f)
	default:
		s.key = appendKey(s.key[:0], f.topic, f.group)
		sub, ok := s.subs[string(s.key)]
		if !ok {
			s.fail(f.corr, codeNotSubscribed, string(f.topic)+"::"+string(f.group))
			return
		}
		s.settle(f, sub)
	}
}

// settle carries out a frame on a subscription.
func (s *session) settle(f *frame, sub *subscription) {
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
			s.fail(f.corr, codeUnknownID, "This subscription holds no event of this id.")
			return
		}
	case opPause:
		ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
		defer cancel()
		if err := sub.bus.Pause(ctx); err != nil {
			s.failBus(f.corr, err, codeInternal, "The subscription could not be paused.")
			return
		}
	case opResume:
		sub.bus.Resume()
	case opUnsubscribe:
		delete(s.subs, string(s.key))
		s.stop(sub)
	default:
		s.fail(f.corr, codeUnknownOp, "This op is not known.")
		return
	}
	s.out.ok(f.corr, "")
}

// stop gives a subscription's leases back. No event of it is sent afterwards.
func (s *session) stop(sub *subscription) {
	ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
	defer cancel()
	if err := sub.bus.Stop(ctx); err != nil {
		s.srv.log.Warn("subscription did not stop in order", slog.String("topic", sub.topic),
			slog.String("group", sub.group), slog.Any("error", err))
	}
}

// auth replaces the connection's policy.
func (s *session) auth(f *frame) {
	p, fail := s.srv.authenticate(s.ctx, string(f.token))
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
	s.srv.strangers.remove(s)
	s.due.Store(nil)
	if at := p.Expires(); !at.IsZero() {
		s.due.Store(&due{at: at, code: closeTokenExpired})
	}
	lost := maps.Clone(s.subs)
	maps.DeleteFunc(lost, func(_ string, sub *subscription) bool { return s.srv.maySubscribe(p, sub) })
	s.endSubs(lost, (*jetstream.Subscription).Stop)
	for _, sub := range lost {
		s.fail(nil, codeForbidden, "The new policy does not allow "+sub.topic+"::"+sub.group+"; the subscription has ended.")
	}
	s.out.ok(f.corr, "")
}

// refuse answers an AUTH that failed. The connection is unauthenticated again, whatever it was.
func (s *session) refuse(f *frame, fail *fault) {
	if s.principal != nil {
		s.principal = nil
		s.srv.connections.leave(s.counted)
		s.counted = ""
		s.awaitAuth()
		s.endSubs(s.subs, (*jetstream.Subscription).Stop)
	}
	s.fail(f.corr, fail.code, fail.msg)
	if fail.rule().retry {
		return // nothing is wrong with the token
	}
	if s.refusals++; s.refusals > s.srv.cfg.Limits.AuthTries {
		s.limit("auth_tries")
		s.giveUp(closeAuthRefused)
	}
}

// publish sends an event. The answer comes when the stream has stored it; frames behind it go on.
func (s *session) publish(f *frame) {
	topic, fail := s.publishTopic(f.topic)
	if fail == nil {
		fail = s.srv.throttle(s.principal, topic)
	}
	if fail != nil {
		s.fail(f.corr, fail.code, fail.msg)
		return
	}
	payload := f.payload
	if payload == nil {
		payload = nullPayload
	}
	r := s.newReceipt(f.corr)
	if err := s.pub.Publish(s.publishContext(), topic, payload, &f.publish, r.done); err != nil {
		r.free()
		s.failBus(f.corr, err, codePublishFailed, "The event could not be published.")
	}
}

// publishTopic returns the topic that the client may publish to. It remembers the answers of one policy, which saves the
// check and the string.
func (s *session) publishTopic(name []byte) (string, *fault) {
	if topic, ok := s.topics[string(name)]; ok {
		return topic, nil
	}
	topic := string(name)
	if fail := s.srv.mayPublish(s.principal, topic); fail != nil {
		return "", fail
	}
	if s.topics == nil {
		s.topics = make(map[string]string)
	}
	for other := range s.topics { // any other will do
		if len(s.topics) < maxTopicsKnown {
			break
		}
		delete(s.topics, other)
	}
	s.topics[topic] = topic
	return topic, nil
}

// receipt waits for the outcome of one publish. Receipts are pooled, with the bound method that the bus calls.
type receipt struct {
	session *session
	corr    []byte
	hasCorr bool
	done    func(jetstream.Receipt, error)
}

var receipts sync.Pool

func (s *session) newReceipt(corr []byte) *receipt {
	r, ok := receipts.Get().(*receipt)
	if !ok {
		r = new(receipt)
		r.done = r.answer
	}
	r.session = s
	r.corr = append(r.corr[:0], corr...)
	r.hasCorr = corr != nil
	return r
}

// answer is called by the bus, and must not block.
func (r *receipt) answer(got jetstream.Receipt, err error) {
	corr := r.corr
	if !r.hasCorr {
		corr = nil
	}
	if err != nil {
		r.session.failBus(corr, err, codePublishFailed, "The event could not be published.")
	} else {
		r.session.out.ok(corr, got.ID)
	}
	r.free()
}

func (r *receipt) free() {
	r.session = nil
	receipts.Put(r)
}

// subscribe joins a group. The OK is queued before the first event can be.
func (s *session) subscribe(f *frame) {
	s.key = appendKey(s.key[:0], f.topic, f.group)
	if _, ok := s.subs[string(s.key)]; ok {
		s.fail(f.corr, codeAlreadySubscribed, string(f.topic)+"::"+string(f.group))
		return
	}
	sub := newSubscription(f)
	fail := sub.check()
	if fail == nil && !s.srv.maySubscribe(s.principal, sub) {
		fail = &fault{code: codeForbidden, msg: "The policy does not allow to subscribe to " + sub.topic + "::" + sub.group + "."}
	}
	if fail != nil {
		s.fail(f.corr, fail.code, fail.msg)
		return
	}
	switch {
	case s.draining:
		s.fail(f.corr, codeOverloaded, "The hub is shutting down; connect again.")
		return
	case len(s.subs) >= s.srv.cfg.Limits.Subscriptions:
		s.limit("subscriptions")
		s.fail(f.corr, codeOverloaded, "This connection has "+strconv.Itoa(len(s.subs))+" subscriptions, which is the most it may have.")
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, callTimeout)
	defer cancel()
	// What the client published before must not look new to a group that starts at the end.
	if err := s.pub.Flush(ctx); err != nil {
		s.failBus(f.corr, err, codeSubscribeFailed, "The connection's publishes in flight were not confirmed in time.")
		return
	}
	opts := f.subscribe
	opts.Topics = sub.more
	opts.Via = s.pub
	joined, err := s.srv.cfg.Bus.Subscribe(ctx, sub.topic, sub.group, opts, func(d *jetstream.Delivery) { s.out.deliver(d, sub) })
	if err != nil {
		s.failBus(f.corr, err, codeSubscribeFailed, "The subscription could not be made.")
		return
	}
	sub.bus = joined
	if s.subs == nil {
		s.subs = make(map[string]*subscription)
	}
	s.subs[string(s.key)] = sub
	s.out.ok(f.corr, "")
	joined.Start()
}

func newSubscription(f *frame) *subscription {
	sub := &subscription{topic: string(f.topic), group: string(f.group), more: slices.Clone(f.subscribe.Topics)}
	sub.topicJSON = jsonscan.AppendString(nil, sub.topic)
	sub.groupJSON = jsonscan.AppendString(nil, sub.group)
	lease := f.subscribe.AckTimeout
	if lease == 0 {
		lease = defaultAckTimeout
	}
	sub.ackDeadlineMS = lease.Milliseconds()
	return sub
}

// check looks at the form of the names.
func (sub *subscription) check() *fault {
	for _, t := range append([]string{sub.topic}, sub.more...) {
		if err := jetstream.ValidTopic(t); err != nil {
			return busFault(err, codeBadTopic, "The topic is not well formed.")
		}
	}
	if err := jetstream.ValidGroup(sub.group); err != nil {
		return busFault(err, codeBadGroup, "The group is not well formed.")
	}
	return nil
}

// failBus answers with an error of the bus. Only what the bus meant for clients is shown; the rest goes to the log.
func (s *session) failBus(corr []byte, err error, otherwise code, msg string) {
	fail := busFault(err, otherwise, msg)
	s.srv.logCause(err)
	s.fail(corr, fail.code, fail.msg)
}

// busFault is what a client is told about an error of the bus; otherwise and msg are for errors not meant for clients.
func busFault(err error, otherwise code, msg string) *fault {
	if known, ok := errors.AsType[*jetstream.Error](err); ok {
		return &fault{code: code(known.Code), msg: known.Msg, tooLarge: errors.Is(err, jetstream.ErrTooLarge)}
	}
	return &fault{code: otherwise, msg: msg}
}
