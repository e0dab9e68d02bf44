package jetstream

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// What a subscriber says to the server about a delivery.
var (
	ackNow   = []byte("+ACK")
	nakNow   = []byte("-NAK")
	progress = []byte("+WPI")
	term     = []byte("+TERM")
)

// Back-off of refused events, from the protocol.
const (
	backoffFirst = 50 * time.Millisecond
	backoffMax   = 10 * time.Second
)

// Delivery is an event that a subscriber works on, for as long as its lease lasts: until Ack or
// Nack, the end of the lease (SubscribeOptions.AckTimeout, which Extend moves), or the loss of the
// hub's right to the event. Begin of a Held makes it; Consume begins deliveries by itself. Its
// methods may be called concurrently; its fields are not to be changed.
type Delivery struct {
	// Event is the event. Whoever holds the Delivery owns it.
	Event Event
	// Attempt counts how often the event was handed to a subscriber of the group, this time
	// included, from 1. It may skip numbers when a hub dies with events that it had not handed out.
	Attempt int
	// Order is the server's count of deliveries to the group, from 1. Within one Stretch, numbers
	// that follow each other without a hole mean that no other member was given anything in
	// between.
	Order uint64
	// Stretch counts, from 1, how often the subscription has begun to listen: at its start, and
	// again after a lost connection, a pause, a seek. The server's count says nothing across them:
	// it may have gone back, or be another one.
	Stretch uint64

	m     *member
	group *group // as it was when the event came: a seek changes the member's
	reply string // the server's name for this delivery
	size  int    // of the message, headers included
	cuts  uint64 // of the link, when it came

	delivered int       // how often the server has given the event to a hub
	knows     knowledge // what this hub knew of the deliveries before, when it came
	bounced   bool      // it came to an inbox that lingers

	// Guarded by the subscription's mu.
	spared    int  // how many of the server's deliveries before this one reached no client
	resolved  bool // spared is known
	looking   bool // spared is asked for
	unseen    bool // it ended before that was known, and no client had it
	unseenNak bool // then it is to be given back

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
	sameID   *Delivery // the next younger lease of the same id
	cancel   context.CancelFunc
}

// Held is an event that the hub keeps for a subscription, at no cost in attempts or time, until the
// subscriber takes it with Begin. Its fields are those of a Delivery, and may be looked at before.
// The hub may give a Held to another member, if one waits and this one does not take it. Its
// methods may be called concurrently.
type Held Delivery

// Begin starts the lease: this is the moment that the subscriber has the event. It reports false,
// and no Delivery, when the event is not the subscription's any more (settled, given back, or lost
// with a connection), or has begun before: the event must then not be worked on.
func (h *Held) Begin() (*Delivery, bool) {
	d := (*Delivery)(h)
	if !d.begin(false) {
		return nil, false
	}
	return d, true
}

// BeginSend is Begin for servers that have copied the event and are about to send the copy to a
// client. The client settles it, by its id: see Subscription.Ack. The hub then keeps no more of the
// event than its names: Payload, Headers, Tags and CausedBy of the Held are empty from now on. The
// lease may be settled at once, and its time runs from Sending.Written on.
func (h *Held) BeginSend() (Sending, bool) {
	d := (*Delivery)(h)
	if !d.begin(true) {
		return Sending{}, false
	}
	return Sending{d}, true
}

// Valid reports whether the event is still the subscription's: not settled, given back or lost.
// Begin tells the same; Valid is for those who keep many and want to drop some.
func (h *Held) Valid() bool {
	h.m.sub.mu.Lock()
	defer h.m.sub.mu.Unlock()
	return h.index >= 0
}

// Sending is an event on its way to a client: see Held.BeginSend. It is for servers that copy the
// event to a client's socket. The zero Sending is none: Written and TakeBack are not for it. Its
// methods may be called concurrently.
type Sending struct{ d *Delivery }

// Begun reports that it is not the zero Sending.
func (s Sending) Begun() bool { return s.d != nil }

// Written says that the client's connection has taken the event: the time of its lease runs from
// now on. It does nothing when the lease has ended meanwhile.
func (s Sending) Written() { s.d.written() }

// TakeBack says that the event did not reach the client after all, so that losing it is no failed
// attempt. The subscription keeps the event until that ends, and then gives it to another member.
func (s Sending) TakeBack() { s.d.takeBack() }

// deliveryMeta is what the server's reply subject says of a delivery.
type deliveryMeta struct {
	prefix    int // length of what all ack subjects of the consumer begin with
	delivered int
	streamSeq uint64
	order     uint64
	storedAt  int64
}

// parseAckSubject reads $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer
// seq>.<time>.<pending>, or the newer form with domain and account in front and perhaps a random
// token behind.
func parseAckSubject(s string) (deliveryMeta, bool) {
	var dots [12]int
	n := 0
	for i := range len(s) {
		if s[i] == '.' {
			if n == len(dots) {
				return deliveryMeta{}, false
			}
			dots[n] = i
			n++
		}
	}
	if !strings.HasPrefix(s, "$JS.ACK.") {
		return deliveryMeta{}, false
	}
	first := 3 // the dot before <delivered>
	switch {
	case n == 8:
	case n >= 10:
		first = 5
	default:
		return deliveryMeta{}, false
	}
	field := func(i int) (uint64, bool) {
		v, err := strconv.ParseUint(s[dots[first+i]+1:dots[first+i+1]], 10, 63)
		return v, err == nil
	}
	delivered, ok1 := field(0)
	seq, ok2 := field(1)
	order, ok3 := field(2)
	stored, ok4 := field(3)
	return deliveryMeta{
		prefix: dots[first] + 1, delivered: int(delivered), streamSeq: seq, order: order, storedAt: int64(stored), //nolint:gosec // 63 bits
	}, ok1 && ok2 && ok3 && ok4
}

func newDelivery(in *inbox, msg *nats.Msg, p deliveryMeta, now int64) *Delivery {
	d := &Delivery{
		Event: Event{
			Topic: in.group.topic.name, Key: subjectKey(msg.Subject), Payload: msg.Data,
			Stream: in.group.topic.stream.name, Sequence: p.streamSeq, StoredAt: p.storedAt,
		},
		Order: p.order, Stretch: in.number, m: in.m, group: in.group, reply: msg.Reply, size: msg.Size(), cuts: in.m.sub.link.cuts.Load(),
		delivered: p.delivered, index: -1, arrived: now, touched: now,
	}
	d.Event.readHeader(msg.Header)
	return d
}

// GroupStart is the sequence of the first event that the group is given at all: what lies before is
// not its business.
func (d *Delivery) GroupStart() uint64 { return d.group.first }

// send tells the server about the delivery. A failure means that the connection is down, and then
// the event comes again.
func (d *Delivery) send(what []byte) {
	_ = d.m.sub.link.nc.Publish(d.reply, what)
}

// usable reports whether the server surely still keeps d for us. s.mu is held.
func (d *Delivery) usable(now int64) bool {
	return now-d.touched < int64(d.group.fence.usable) && !d.m.sub.bus.clock.stalled(now)
}

// written starts the time of a lease whose event was sent.
func (d *Delivery) written() {
	s := d.m.sub
	now := s.bus.clock.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.writing && d.index >= 0 {
		d.writing = false
		d.deadline = now + int64(s.opts.AckTimeout)
		s.schedule(d.deadline)
	}
}

// begin starts the lease. With release, the delivery keeps no more than its names, and the lease
// does not run before written.
func (d *Delivery) begin(release bool) bool {
	s := d.m.sub
	now := s.bus.clock.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quicken()
	if d.index < 0 || d.begun || !d.usable(now) {
		return false
	}
	d.begun = true
	d.started = now
	d.deadline = now + int64(s.opts.AckTimeout)
	full := s.heldBytes >= s.bus.limits.HeldBytes
	s.holdBytes(-d.size)
	if release {
		d.released = true
		d.writing = true
		d.Event.Payload, d.Event.Headers, d.Event.Tags, d.Event.CausedBy = nil, nil, nil, nil
	}
	s.lease(d)
	s.schedule(d.deadline)
	if full {
		s.refillSoon()
	}
	d.m.obs.Delivered()
	d.m.obs.InFlight(1)
	return true
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
	s.holdBytes(d.size)
	d.m.obs.InFlight(-1)
}

// Deadline is when the lease ends, or ended.
func (d *Delivery) Deadline() time.Time {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bus.clock.at(d.deadline)
}

// Ack settles the event for the group. It returns ErrNotLeased when the lease has ended. It does
// not wait for the server: a server that is killed right after may deliver the event again.
func (d *Delivery) Ack() error { return leased(d.m.sub.ack(d, "")) }

// Nack refuses the event: it comes again, to any member, after delay (0..12 h, clamped;
// DefaultBackoff for the bus to choose), or goes to dlq.<topic> if this was the last attempt
// (SubscribeOptions.MaxAttempts), with the reason, of which 1 KiB is kept. It returns ErrNotLeased
// when the lease has ended.
func (d *Delivery) Nack(reason string, delay time.Duration) error {
	return leased(d.m.sub.nack(d, "", reason, delay))
}

// Extend sets the lease to end after dur from now: 1 s..12 h, clamped; 0 is the subscription's
// AckTimeout. It returns ErrNotLeased when the lease has ended.
func (d *Delivery) Extend(dur time.Duration) error { return leased(d.m.sub.extend(d, "", dur)) }

// DefaultBackoff is the delay of a Nack that leaves it to the bus: 50 ms, doubled per attempt up to
// 10 s.
const DefaultBackoff time.Duration = -1

func leased(ok bool) error {
	if !ok {
		return ErrNotLeased
	}
	return nil
}

// Ack settles the oldest lease that the subscription has of the event id, as Delivery.Ack. It
// reports whether there was one; an id that is not in flight is no error. Ack, Nack and Extend by
// id are for servers whose clients name events by their ids.
func (s *Subscription) Ack(id string) bool { return s.ack(nil, id) }

// Nack refuses the oldest lease that the subscription has of the event id, as Delivery.Nack. It
// reports whether there was one.
func (s *Subscription) Nack(id, reason string, delay time.Duration) bool {
	return s.nack(nil, id, reason, delay)
}

// Extend moves the end of the oldest lease that the subscription has of the event id, as
// Delivery.Extend. It reports whether there was one.
func (s *Subscription) Extend(id string, dur time.Duration) bool { return s.extend(nil, id, dur) }

// ack settles d; nil: the oldest lease of id.
func (s *Subscription) ack(d *Delivery, id string) bool {
	d, _, ok := s.settle(d, id, Acked)
	if ok {
		d.tell(ackNow)
	}
	return ok
}

// nack refuses d; nil: the oldest lease of id.
func (s *Subscription) nack(d *Delivery, id, reason string, delay time.Duration) bool {
	d, how, ok := s.settle(d, id, Nacked)
	switch {
	case !ok:
	case how == DeadLettered:
		if reason == "" {
			reason = "refused"
		}
		s.bus.dead.add(d, reason)
	default:
		if delay < 0 {
			delay = backoff(d.Attempt)
		}
		d.sendNak(min(delay, maxAckTimeout))
	}
	return ok
}

// settle ends the lease d; nil: the oldest one of id. Nacked becomes DeadLettered at the last
// attempt. ok says that the caller may tell the server.
func (s *Subscription) settle(d *Delivery, id string, how Outcome) (_ *Delivery, _ Outcome, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d == nil {
		d = s.byID[id]
	}
	if d == nil || !d.begun {
		return nil, how, false
	}
	if how == Nacked && s.lastAttempt(d) {
		how = DeadLettered
	}
	return d, how, s.remove(d, how)
}

func (d *Delivery) sendNak(delay time.Duration) {
	if delay > 0 {
		d.group.bus.noteDelay(d, delay)
	}
	d.tell(nakAfter(delay))
}

// nakAfter refuses an event until the delay is over.
func nakAfter(delay time.Duration) []byte {
	if delay == 0 {
		return nakNow
	}
	return append(strconv.AppendInt([]byte(`-NAK {"delay":`), int64(delay), 10), '}')
}

func backoff(attempt int) time.Duration {
	if attempt > 8 {
		return backoffMax
	}
	return min(backoffFirst<<max(attempt-1, 0), backoffMax)
}

// extend moves the end of the lease d; nil: of the oldest one of id.
func (s *Subscription) extend(d *Delivery, id string, dur time.Duration) bool {
	now := s.bus.clock.now()
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
	d.deadline = now + int64(min(max(dur, minAckTimeout), maxAckTimeout))
	s.schedule(d.deadline)
	return true
}
