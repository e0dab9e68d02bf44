package facade

import (
	"context"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
)

// defaultAckTimeout is the length of a lease when SUBSCRIBE gives none. It is the bus's default.
const defaultAckTimeout = 30 * time.Second

// subscription is a subscription of a client. The key of a subscription of a session is its topic
// and group.
type subscription struct {
	bus           Subscription
	topic, group  string
	more          []string // further topics
	topicJSON     []byte   // topic and group as JSON strings
	groupJSON     []byte
	ackDeadlineMS int64
	casts         bool   // its events may have to be cast
	client        string // the principal that is charged for the topics and groups that it creates
	free          bool   // it is not charged for groups
	leave         func() // ends its use of what the principal may hold
	deleted       bool   // its group was deleted; guarded by the session's mu
}

// appendEvent encodes a delivery. The lease starts when the frame is handed to the socket, so the
// frame says that the whole lease remains.
func (sub *subscription) appendEvent(dst []byte, h *jetstream.Held) []byte {
	return appendEvent(dst, sub.topicJSON, sub.groupJSON, &h.Event, h.Attempt, sub.ackDeadlineMS)
}

// appendKey appends the key of a subscription. Neither name can hold a NUL.
func appendKey(dst, topic, group []byte) []byte {
	dst = append(dst, topic...)
	dst = append(dst, 0)
	return append(dst, group...)
}

// subscribe begins to join a group, unless the SUBSCRIBE is refused at once. The OK is queued
// before the first event.
func (s *session) subscribe(o *operation) (ended bool) {
	f := &o.frame
	if s.subscriptionOf(f) != nil {
		s.fail(o.to, codeAlreadySubscribed, string(f.topic)+"::"+string(f.group))
		return true
	}
	sub := newSubscription(f, s.srv.cfg.Limits.Lease)
	fail := sub.validate()
	if fail == nil {
		fail = s.mayJoin(sub)
	}
	switch {
	case fail != nil:
		s.failWith(o.to, fail)
		return true
	case o.late():
		s.failLate(o.to, opSubscribe)
		return true
	case len(s.subs)+s.joining >= s.srv.cfg.Limits.Subscriptions:
		s.limit("subscriptions")
		s.fail(o.to, codeOverloaded, "This connection has reached its limit of "+
			strconv.Itoa(len(s.subs)+s.joining)+" subscriptions.")
		return true
	}
	sub.countFor(s.srv, s.principal)
	s.joining++
	s.carryOut(o, func(ctx context.Context) { s.join(ctx, o, sub) })
	return false
}

// mayJoin returns why a subscription cannot be made, or cannot continue, or nil. mu is held.
func (s *session) mayJoin(sub *subscription) *fault {
	if s.principal == nil { // an AUTH gave up waiting for this operation
		return &fault{code: codeUnauthorized, msg: unauthorized}
	}
	denied := s.srv.deniedTopic(s.principal, sub)
	switch {
	case denied != "":
		return deniedGroup(denied, sub.group)
	case s.draining || s.ended:
		return &fault{code: codeOverloaded, msg: "The hub is shutting down; connect again."}
	}
	return nil
}

// join is the part of a SUBSCRIBE that waits for the bus.
func (s *session) join(ctx context.Context, o *operation, sub *subscription) {
	// A group that starts at the end must not receive what the client published before the
	// SUBSCRIBE.
	err := s.pub.Flush(ctx)
	s.mu.Lock()
	o.flushed = true
	if err == nil {
		s.advance() // begins publishes to other topics that wait behind the SUBSCRIBE
	}
	s.mu.Unlock()
	why := "The connection's publishes in flight were not confirmed in time."
	var joined Subscription
	if err == nil {
		why = "The subscription could not be made."
		joined, err = s.srv.joinInTurn(ctx, sub, s.busOptions(&o.frame, sub), func(h *jetstream.Held) { s.out.deliver(h, sub) })
	}
	fail := s.adopt(sub, joined, err)
	switch {
	case err != nil:
		sub.end()
		s.failBus(o.to, sub.topic, err, codeSubscribeFailed, why)
	case fail != nil:
		s.failWith(o.to, fail)
		s.stop(ctx, sub)
	default:
		s.out.ok(o.to, "")
		if sent := s.out.sent(o.to); sent != nil {
			select {
			case <-sent:
			case <-s.ctx.Done(): // the end of the connection ends the subscription
			}
		}
		joined.Resume()
	}
}

// joinInTurn makes the subscription when the hub carries out few enough others, of this principal
// and in all: each asks NATS several times, and the questions of others wait behind these.
func (s *Server) joinInTurn(ctx context.Context, sub *subscription, opts jetstream.SubscribeOptions, handler func(*jetstream.Held)) (Subscription, error) {
	if !s.joins.Enter(ctx, sub.client, math.MaxInt, func() { s.cfg.Observer.LimitReached("joins") }) {
		return nil, &jetstream.Error{Code: string(codeOverloaded), Msg: "Too many subscriptions are being made: try again later."}
	}
	defer s.joins.Leave(sub.client)
	return s.cfg.Bus.Subscribe(ctx, sub.topic, sub.group, opts, handler)
}

// busOptions returns the options of a subscription of a connection.
func (s *session) busOptions(f *frame, sub *subscription) jetstream.SubscribeOptions {
	opts := s.srv.busOptions(f, sub)
	opts.OnDeleted = func(string) { s.srv.wg.Go(func() { s.groupDeleted(sub) }) }
	opts.OnReset = func(string) { s.reset(sub) }
	opts.OnLost = func(l jetstream.Loss) { s.eventsLost(sub, l) }
	if opts.OrderByKey {
		opts.OnAssign = func(a jetstream.Assignment) { s.out.assign(sub, &a) }
	}
	return opts
}

// busOptions returns the options of a subscription for the bus. The subscription starts paused,
// until the client knows of it.
func (s *Server) busOptions(f *frame, sub *subscription) jetstream.SubscribeOptions {
	opts := f.subscribe
	opts.Topics = sub.more
	opts.CountFor, opts.FreeGroups = sub.client, sub.free
	opts.Holder, sub.leave = s.holders.enter(sub.client)
	opts.MaxLease = s.cfg.Limits.Lease
	opts.Paused = true
	return opts
}

// adopt adds a joined subscription to the session, unless the session has ended or its policy has
// changed.
func (s *session) adopt(sub *subscription, joined Subscription, err error) *fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.joining--
	if err != nil {
		return nil
	}
	sub.bus = joined
	if fail := s.mayJoin(sub); fail != nil {
		return fail
	}
	if sub.deleted {
		return &fault{code: codeSubscribeFailed, msg: "The group was deleted at this moment."}
	}
	if s.subs == nil {
		s.subs = make(map[string]*subscription)
	}
	s.subs[string(appendKey(nil, []byte(sub.topic), []byte(sub.group)))] = sub
	return nil
}

// reset tells a client with the capability group_reset that a group had to start anew and may have
// missed events. The bus calls reset before the next event. The message has the names of the
// SUBSCRIBE, also for a further topic.
func (s *session) reset(sub *subscription) {
	if s.wantsResets.Load() {
		s.tell(codeGroupReset, sub.topic+"::"+sub.group)
	}
}

// eventsLost tells a client with the capability events_lost that events were removed before the
// group was given them. The bus calls it before the next event of the topic.
func (s *session) eventsLost(sub *subscription, l jetstream.Loss) {
	if s.wantsLosses.Load() {
		s.tell(codeEventsLost, sub.lossText(l))
	}
}

// lossText is the message of events_lost.
func (sub *subscription) lossText(l jetstream.Loss) string {
	msg := l.Topic + "::" + sub.group + " lost " + strconv.FormatUint(l.Events, 10) + " events"
	if !l.Since.IsZero() {
		msg += " stored since " + l.Since.UTC().Format("2006-01-02T15:04:05.000Z")
	}
	return msg
}

// groupDeleted ends a subscription whose group somebody has deleted, on any of its topics, and
// tells the client. The error is the one that the next frame on the subscription gets.
func (s *session) groupDeleted(sub *subscription) {
	s.mu.Lock()
	key := string(appendKey(nil, []byte(sub.topic), []byte(sub.group)))
	sub.deleted = true
	mine := s.subs[key] == sub
	if mine {
		delete(s.subs, key)
	}
	s.mu.Unlock()
	if !mine {
		return // it ends otherwise, or is being made
	}
	s.stop(s.ctx, sub)
	s.tell(codeNotSubscribed, sub.topic+"::"+sub.group)
}

// unsubscribe ends a subscription. No event of the subscription is sent after the OK.
func (s *session) unsubscribe(o *operation, sub *subscription) (ended bool) {
	delete(s.subs, string(appendKey(nil, o.frame.topic, o.frame.group)))
	s.carryOut(o, func(ctx context.Context) {
		s.stop(ctx, sub)
		s.out.ok(o.to, "")
	})
	return false
}

// pause stops the delivery of a subscription.
func (s *session) pause(o *operation, sub *subscription) (ended bool) {
	if o.late() {
		s.failLate(o.to, opPause)
		return true
	}
	s.carryOut(o, func(ctx context.Context) {
		if err := sub.bus.Pause(ctx); err != nil {
			s.failBus(o.to, sub.topic, err, codeInternal, "The subscription could not be paused.")
			return
		}
		s.out.ok(o.to, "")
	})
	return false
}

// stop ends a subscription and gives its leases back. The end of the connection does not cut this
// short.
func (s *session) stop(ctx context.Context, sub *subscription) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	s.srv.endSub(ctx, s.client(), sub, Subscription.Stop)
}

// ending is a way to end a subscription: Stop or Disconnect.
type ending func(Subscription, context.Context) error

func (s *Server) endSub(ctx context.Context, client string, sub *subscription, how ending) {
	defer sub.end()
	if err := how(sub.bus, ctx); err != nil {
		s.often.Log(ctx, slog.LevelWarn, "failed to end a subscription; its events are redelivered after AckWait", client,
			slog.String("topic", sub.topic), slog.String("group", sub.group), slog.String("client", client), slog.Any("error", err))
	}
}

// endSubs ends and removes subscriptions in the given way, concurrently: there are at most
// Limits.Subscriptions. The end of the connection does not cut this short.
func (s *session) endSubs(subs map[string]*subscription, how ending) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), callTimeout)
	defer cancel()
	var wg sync.WaitGroup
	for _, sub := range subs {
		wg.Go(func() { s.srv.endSub(ctx, s.client(), sub, how) })
	}
	wg.Wait()
	maps.DeleteFunc(s.subs, func(key string, _ *subscription) bool { return subs[key] != nil })
}

// end ends the use of what the principal may hold. It may be called again.
func (sub *subscription) end() {
	if sub.leave != nil {
		sub.leave()
	}
}

// newSubscription is the subscription of a SUBSCRIBE. longest is the longest lease.
func newSubscription(f *frame, longest time.Duration) *subscription {
	sub := &subscription{topic: string(f.topic), group: string(f.group), more: slices.Clone(f.subscribe.Topics), casts: f.subscribe.SchemaVersion != 0}
	sub.topicJSON = jsonscan.AppendString(nil, sub.topic)
	sub.groupJSON = jsonscan.AppendString(nil, sub.group)
	lease := f.subscribe.AckTimeout
	if lease == 0 {
		lease = defaultAckTimeout
	}
	sub.ackDeadlineMS = min(lease, longest).Milliseconds()
	return sub
}

// countFor charges a principal for the topics and groups that the subscription creates.
func (sub *subscription) countFor(s *Server, p Principal) {
	sub.client, sub.free = p.Key(), s.freeGroups(p)
}

// validate checks the form of the names.
func (sub *subscription) validate() *fault {
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
