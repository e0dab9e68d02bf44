package jetstream

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/native"
)

// Delivery is an event that a subscriber works on, for as long as its lease lasts: until Ack or
// Nack, the end of the lease (SubscribeOptions.AckTimeout, which Extend moves), or the loss of the
// hub's right to the event. Held.Begin returns it; Consume begins deliveries by itself. The methods
// may be called concurrently. Do not change the fields.
type Delivery struct {
	// Event is the event. The holder of the Delivery owns it.
	Event event.Event
	// Attempt counts how often the event was handed to a subscriber of the group, including this
	// time, from 1. Attempt may skip numbers when a hub dies with events that it had not handed
	// out.
	Attempt int
	// Redelivered says that the event was delivered before, or was on its way to another member of
	// this hub, even if that time nobody was handed the event: Attempt may be 1. Only events that
	// come for the first time come in the order of the stream.
	Redelivered bool
	// Order is the server's count of deliveries to the group, from 1. Consecutive numbers within
	// one Stretch mean that no other member got an event in between. An event that was put back
	// after it was dead-lettered has Order 0 and Stretch 0: it is in no order with others. So has
	// an event that was on its way to a member that paused or ended, and an event of an ordered
	// group, whose members share one order per key.
	Order uint64
	// Stretch counts, from 1, how often the subscription has begun to listen: at its start, and
	// again after a lost connection, a pause or a seek. Do not compare Order across stretches: the
	// server's count may have gone back, or belong to a new consumer.
	Stretch uint64

	m     *member
	group *group // as it was when the event came: a seek changes the member's
	reply string // the server's name for this delivery
	seq   uint64 // of the message in the stream of the group's consumer
	size  int    // of the message, headers included
	cuts  uint64 // of the link, when it came

	delivered int       // how often the server has given the event to a hub
	knows     knowledge // what this hub knew of the deliveries before, when it came
	recast    bool      // the event is in another version than it was stored in
	bounced   bool      // it came to an inbox that lingers
	letter    letterRef // of an event that was put back
	before    int       // the attempts before a repair of the group

	// Guarded by the subscription's mu.
	spared    int          // how many of the server's deliveries before this one reached no client
	failed    *lastFailure // of an event whose last attempt is over: it is not handed out
	until     int64        // when it may be lent, in epoch milliseconds; of ordered groups only
	resolved  bool         // spared is known
	looking   bool         // spared is asked for
	unseen    bool         // it ended before that was known, and no client had it
	unseenNak bool         // then it is to be given back

	index    int // in Subscription.out; -1 once it ended
	active   bool
	begun    bool // the subscriber has it
	writing  bool // it is on its way to the subscriber's client: the lease does not run yet
	released bool
	arrived  int64
	touched  int64 // the server keeps it for us until AckWait after that
	asked    int64 // when the server was last asked to wait longer
	started  int64 // of the lease
	deadline int64
	sameID   *Delivery          // the next younger lease of the same id
	handle   uint64             // its lease in the handle of a client; 0: it has none
	trace    event.DeliverySpan // of the lease; nil: not traced
	loan     *loan              // of a member of an ordered group
	lent     *loan              // of the owner of one: the event is a member's
	quiet    bool               // its owner knows that it ends
	taken    *loan              // of the owner: who has taken it last; guarded by the ordering's mu
	slim     bool               // of the owner: only its place is kept, and its size does not count
	cancel   context.CancelFunc
}

// Held is an event that the hub keeps for a subscription until the subscriber takes it with Begin.
// Until then, it costs no attempt and no lease time. Its fields are those of a Delivery, and may be
// read before Begin. If this member does not take a Held and another member waits, the hub may give
// the event to the other member. Its methods may be called concurrently.
type Held Delivery

// Begin starts the lease: from this moment, the subscriber has the event. Begin returns false, and
// no Delivery, when the event no longer belongs to the subscription (settled, given back, or lost
// with a connection), or when Begin was called before. The subscriber must then not process the
// event. So does an event that cannot be cast (Cast).
func (h *Held) Begin() (*Delivery, bool) {
	d := (*Delivery)(h)
	if ok, err := h.Cast(d.m.sub.ctx); err != nil || !ok || !d.begin(false) {
		return nil, false
	}
	return d, true
}

// BeginSend is Begin for servers that have copied the event, after Cast, and are about to send the
// copy to a client. The client settles the event by its id: see Subscription.Ack. Payload, Headers,
// Tags and CausedBy of the Held are empty after BeginSend, so that the hub keeps only the names of
// the event. The lease may be settled at once. Its time runs from Sending.Written on.
func (h *Held) BeginSend() (Sending, bool) {
	d := (*Delivery)(h)
	if !d.begin(true) {
		return Sending{}, false
	}
	return Sending{d}, true
}

// Valid reports whether the event is still the subscription's: not settled, given back or lost.
// Begin checks the same; Valid is for subscribers that keep many events and want to drop some.
func (h *Held) Valid() bool {
	h.m.sub.mu.Lock()
	defer h.m.sub.mu.Unlock()
	return h.index >= 0
}

// Sending is an event on its way to a client: see Held.BeginSend. It is for servers that copy the
// event to a client's socket. Do not call Written or TakeBack on the zero Sending. Its methods may
// be called concurrently.
type Sending struct{ d *Delivery }

// Begun reports whether s is not the zero Sending.
func (s Sending) Begun() bool { return s.d != nil }

// Written reports that the client's connection has taken the event. The time of the lease runs from
// then on. Written does nothing if the lease has ended.
func (s Sending) Written() { s.d.written() }

// TakeBack reports that the event did not reach the client, so its loss is no failed attempt. The
// subscription keeps the event until the subscription ends, and then gives the event to another
// member.
func (s Sending) TakeBack() { s.d.takeBack() }

func newDelivery(in *inbox, msg *nats.Msg, p conn.DeliveryMeta, now int64) *Delivery {
	d := &Delivery{
		Event: event.Event{
			Topic: in.group.topic.Name, Key: subjectKey(msg.Subject), Payload: msg.Data,
			Stream: in.group.topic.Stream.Name, Sequence: p.StreamSeq, StoredAt: p.StoredAt,
		},
		Order: p.Order, Stretch: in.number, m: in.m, group: in.group, reply: msg.Reply, seq: p.StreamSeq, size: msg.Size(), cuts: in.m.sub.link.Cuts.Load(),
		Redelivered: p.Delivered > 1 || in.group.topic.PutBack, delivered: p.Delivered, index: -1, arrived: now, touched: now,
	}
	d.Event.ReadHeader(msg.Header)
	if in.group.topic.PutBack {
		d.Order, d.Stretch = 0, 0 // the counts of another consumer
		d.letter = readPutBack(&d.Event, msg.Header)
	}
	return d
}

// GroupStart returns the sequence of the first event that the group receives. Earlier events are
// not delivered to the group.
func (d *Delivery) GroupStart() uint64 {
	if d.m.main == nil {
		return d.group.first
	}
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.m.main.group.first
}

// send tells the server about the delivery. A failure means that the connection is down, and then
// the event comes again.
func (d *Delivery) send(what []byte) {
	_ = d.m.sub.link.NC.Publish(d.reply, what)
}

// usable reports whether the server surely still keeps d for us. s.mu is held.
func (d *Delivery) usable(now int64) bool {
	if d.loan != nil {
		return d.loan.usable(now) && !d.m.sub.bus.clock.Stalled(now)
	}
	return now-d.touched < int64(d.group.fence.usable) && !d.m.sub.bus.clock.Stalled(now)
}

// written starts the time of a lease whose event was sent.
func (d *Delivery) written() {
	s := d.m.sub
	now := s.bus.clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.writing && d.index >= 0 {
		d.writing = false
		d.deadline = now + int64(s.opts.AckTimeout)
		s.schedule(d.deadline)
	}
}

// begin starts the lease. With release, the delivery keeps no more than its names, and the lease
// does not run before written. A delivery whose consumer has been silent is given back instead: the
// group may have been moved.
func (d *Delivery) begin(release bool) bool {
	s := d.m.sub
	now := s.bus.clock.Now()
	s.mu.Lock()
	s.quicken()
	if d.index < 0 || d.begun || !d.usable(now) {
		s.mu.Unlock()
		return false
	}
	if !d.fresh(now) {
		s.remove(d, event.Returned)
		s.mu.Unlock()
		s.spare(d, true)
		return false
	}
	defer s.mu.Unlock()
	d.begun = true
	d.started = now
	d.deadline = now + int64(s.opts.AckTimeout)
	full := s.heldBytes >= s.bus.limits.HeldBytes
	s.holdUnread(d, -1)
	d.traceBegin()
	if release {
		d.released = true
		d.writing = true
		d.Event.Payload, d.Event.Headers, d.Event.Tags, d.Event.CausedBy = nil, nil, nil, nil
	}
	s.lease(d)
	if d.handle != 0 {
		s.bus.handles.leases.add(d)
	}
	s.schedule(d.deadline)
	if full {
		s.refillSoon(now)
	}
	d.m.obs.Delivered(d.Attempt)
	d.m.obs.InFlight(1)
	return true
}

// fresh reports whether the consumer existed a short time ago: it sent the delivery then, or
// answered a question that was asked then. A seek waits for that time after it has deleted the
// consumer, so that no hub begins a lease of before, whether it has heard of the seek or not.
func (d *Delivery) fresh(now int64) bool {
	return now-max(d.touched, d.path().Heard.Load()) < int64(d.group.fence.fresh)
}

// takeBack ends a lease whose event was not sent; the subscription keeps holding it.
func (d *Delivery) takeBack() {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.index < 0 || !d.begun {
		return
	}
	d.begun, d.writing = false, false
	s.unlease(d)
	if !d.slim {
		s.holdUnread(d, 1)
	}
	d.m.obs.InFlight(-1)
	d.traceEnd(event.Returned)
}

// Deadline returns when the lease ends or ended.
func (d *Delivery) Deadline() time.Time {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bus.clock.At(d.deadline)
}

// Ack settles the event for the group. It returns ErrNotLeased when the lease has ended. Ack does
// not wait for the server, so a server that is killed right afterwards may deliver the event again.
func (d *Delivery) Ack() error { return leased(d.m.sub.ack(d, "")) }

// Nack refuses the event. The bus delivers the event again, to any member, after delay (0 to
// SubscribeOptions.MaxLease, clamped; with DefaultBackoff the bus chooses). After the last attempt
// (SubscribeOptions.MaxAttempts), the event goes to dlq.<topic> instead, with the first 1 KiB of
// reason. Nack returns ErrNotLeased when the lease has ended.
func (d *Delivery) Nack(reason string, delay time.Duration) error {
	return leased(d.m.sub.nack(d, "", reason, delay))
}

// Extend sets the lease to end after dur from now: 1 s to SubscribeOptions.MaxLease, clamped; 0 is
// the subscription's AckTimeout. It returns ErrNotLeased when the lease has ended.
func (d *Delivery) Extend(dur time.Duration) error { return leased(d.m.sub.extend(d, "", dur)) }

// DefaultBackoff is the delay of a Nack that leaves the delay to the bus: 50 ms, doubled per
// attempt up to 10 s.
const DefaultBackoff time.Duration = -1

func leased(ok bool) error {
	if !ok {
		return event.ErrNotLeased
	}
	return nil
}

// Ack settles the oldest lease that the subscription holds on the event with the id, like
// Delivery.Ack. It reports whether there was such a lease; an id that is not in flight is no error.
// Ack, Nack and Extend are for servers whose clients name events by their ids.
func (s *Subscription) Ack(id string) bool { return s.ack(nil, id) }

// Nack refuses the oldest lease that the subscription holds on the event with the id, like
// Delivery.Nack. It reports whether there was such a lease.
func (s *Subscription) Nack(id, reason string, delay time.Duration) bool {
	return s.nack(nil, id, reason, delay)
}

// Extend moves the end of the oldest lease that the subscription holds on the event with the id,
// like Delivery.Extend. It reports whether there was such a lease.
func (s *Subscription) Extend(id string, dur time.Duration) bool { return s.extend(nil, id, dur) }

// ack settles d; nil: the oldest lease of id.
func (s *Subscription) ack(d *Delivery, id string) bool {
	d, _, ok := s.settle(d, id, event.Acked)
	if ok {
		d.tell(conn.AckNow)
	}
	return ok
}

// nack refuses d; nil: the oldest lease of id.
func (s *Subscription) nack(d *Delivery, id, reason string, delay time.Duration) bool {
	d, how, ok := s.settle(d, id, event.Nacked)
	switch {
	case !ok:
	case how == event.DeadLettered:
		if reason == "" {
			reason = "refused"
		}
		s.bury(d, reason)
	default:
		if delay < 0 {
			delay = native.Backoff(d.Attempt)
		}
		d.sendNak(min(delay, s.opts.MaxLease))
	}
	return ok
}

// settle ends the lease d; nil: the oldest one of id. Nacked becomes DeadLettered at the last
// attempt. ok says that the caller may tell the server.
func (s *Subscription) settle(d *Delivery, id string, how event.Outcome) (_ *Delivery, _ event.Outcome, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d == nil {
		d = s.byID[id]
	}
	if d == nil || !d.begun {
		return nil, how, false
	}
	if how == event.Nacked && s.lastAttempt(d) {
		how = event.DeadLettered
	}
	return d, how, s.remove(d, how)
}

func (d *Delivery) sendNak(delay time.Duration) {
	if d.loan != nil {
		d.loan.end(loanEnd{What: loanNaked, Delay: delay})
		return
	}
	if delay > 0 {
		d.group.bus.noteDelay(d, delay)
	}
	d.tell(conn.NakAfter(delay))
}

// extend moves the end of the lease d; nil: of the oldest one of id.
func (s *Subscription) extend(d *Delivery, id string, dur time.Duration) bool {
	now := s.bus.clock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d == nil {
		d = s.byID[id]
	}
	if d == nil || !d.begun || d.index < 0 || !d.usable(now) {
		return false
	}
	if dur == 0 {
		dur = s.opts.AckTimeout
	}
	d.writing = false // who prolongs the lease has the event
	d.deadline = now + int64(min(max(dur, minAckTimeout), s.opts.MaxLease))
	s.schedule(d.deadline)
	return true
}
