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
	backoffMost  = 10 * time.Second
)

// Delivery is an event handed to a subscriber. Its methods may be called concurrently.
type Delivery struct {
	// Event is the event, owned by the receiver. BeginRelease clears it but for what names it.
	Event Event
	// Attempt counts how often the event was handed to a subscriber of the group, this time included, from 1. It may skip
	// numbers when a hub dies with events that it had not handed out.
	Attempt int
	// Order is the server's count of deliveries to the group, from 1. Within one Stretch, numbers that follow each other
	// without a hole mean that no other member was given anything in between.
	Order uint64
	// Stretch counts, from 1, how often the subscription has begun to listen: at its start, and again after a lost
	// connection, a pause, a seek. The server's count says nothing across them: it may have gone back, or be another one.
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
	writing  bool // it is on its way to the subscriber: the lease does not run yet
	released bool
	arrived  int64
	touched  int64 // the server keeps it for us until AckWait after that
	asked    int64 // when the server was last asked to wait longer
	started  int64 // of the lease
	deadline int64
	sameID   *Delivery // the next younger lease of the same id
	cancel   context.CancelFunc
}

// place is what the server's reply subject says of a delivery.
type place struct {
	prefix    int // length of what all ack subjects of the consumer begin with
	delivered int
	streamSeq uint64
	order     uint64
	storedAt  int64
}

// parseAckSubject reads $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>, or the
// newer form with domain and account in front and perhaps a random token behind.
func parseAckSubject(s string) (place, bool) {
	var dots [12]int
	n := 0
	for i := range len(s) {
		if s[i] == '.' {
			if n == len(dots) {
				return place{}, false
			}
			dots[n] = i
			n++
		}
	}
	if !strings.HasPrefix(s, "$JS.ACK.") {
		return place{}, false
	}
	first := 3 // the dot before <delivered>
	switch {
	case n == 8:
	case n >= 10:
		first = 5
	default:
		return place{}, false
	}
	field := func(i int) (uint64, bool) {
		v, err := strconv.ParseUint(s[dots[first+i]+1:dots[first+i+1]], 10, 63)
		return v, err == nil
	}
	delivered, ok1 := field(0)
	seq, ok2 := field(1)
	order, ok3 := field(2)
	stored, ok4 := field(3)
	return place{
		prefix: dots[first] + 1, delivered: int(delivered), streamSeq: seq, order: order, storedAt: int64(stored), //nolint:gosec // 63 bits
	}, ok1 && ok2 && ok3 && ok4
}

func newDelivery(in *inbox, msg *nats.Msg, p place, now int64) *Delivery {
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

// GroupStart is the sequence of the first event that the group is given at all: what lies before is not its business.
func (d *Delivery) GroupStart() uint64 { return d.group.first }

// send tells the server about the delivery. A failure means that the connection is down, and then the event comes again.
func (d *Delivery) send(what []byte) {
	_ = d.m.sub.link.nc.Publish(d.reply, what)
}

// usable reports whether the server surely still keeps d for us. s.mu is held.
func (d *Delivery) usable(now int64) bool {
	return now-d.touched < int64(d.group.fence.usable) && !d.m.sub.bus.clock.stalled(now)
}

// Begin starts the lease: this is the moment that the subscriber has the event. Until then the hub keeps the event for
// the subscription at no cost in attempts or time. It reports false when the delivery is not valid any more (the hub
// was cut off, the subscription paused or ended): the event must then not be handed out.
func (d *Delivery) Begin() bool { return d.begin(false) }

// BeginRelease is Begin for a subscriber that has copied the event and is about to send it: the delivery keeps no more
// than its name, and the lease, which may be settled from now on, does not run before Written.
func (d *Delivery) BeginRelease() bool { return d.begin(true) }

// Written starts the time of a lease that BeginRelease made. It does nothing when the lease has ended meanwhile.
func (d *Delivery) Written() {
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

// Held reports whether the event is still the subscription's: not settled, given back or lost.
func (d *Delivery) Held() bool {
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.index >= 0
}

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

// Unbegin takes Begin back for an event that did not reach the subscriber after all, so that losing it is no failed
// attempt. The event stays with the subscription until that ends.
func (d *Delivery) Unbegin() {
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

// Deadline is when the lease ends; the zero time before Begin.
func (d *Delivery) Deadline() time.Time {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if !d.begun {
		return time.Time{}
	}
	return s.bus.clock.at(d.deadline)
}

// Ack settles the event for the group. It returns ErrNotLeased when the lease has ended, or has not begun.
func (d *Delivery) Ack() error {
	d.m.sub.mu.Lock()
	return settled(d.m.sub.ack(d))
}

// Nack refuses the event, as Subscription.Nack.
func (d *Delivery) Nack(reason string, delay time.Duration) error {
	d.m.sub.mu.Lock()
	return settled(d.m.sub.nack(d, reason, delay))
}

// Extend moves the end of the lease, as Subscription.Extend.
func (d *Delivery) Extend(dur time.Duration) error {
	s := d.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	return settled(s.extend(d, dur))
}

func settled(ok bool) error {
	if !ok {
		return ErrNotLeased
	}
	return nil
}

// Ack settles the oldest lease of the event id. It reports whether one was held; an id that is not in flight is no
// error.
func (s *Subscription) Ack(id string) bool {
	s.mu.Lock()
	return s.ack(s.byID[id])
}

// Nack refuses the oldest lease of the event id. The event comes again after delay; delay < 0 is the default back-off
// (50 ms, doubled per attempt up to 10 s). It reports whether a lease was held.
func (s *Subscription) Nack(id, reason string, delay time.Duration) bool {
	s.mu.Lock()
	return s.nack(s.byID[id], reason, delay)
}

// Extend sets the oldest lease of the event id to end d from now (1 s..12 h, clamped; 0: the subscription's
// AckTimeout). It reports whether a lease was held.
func (s *Subscription) Extend(id string, d time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.extend(s.byID[id], d)
}

// ack unlocks s.mu.
func (s *Subscription) ack(d *Delivery) bool {
	ok := d != nil && d.begun && s.remove(d, Acked)
	s.mu.Unlock()
	if ok {
		d.tell(ackNow)
	}
	return ok
}

// nack unlocks s.mu.
func (s *Subscription) nack(d *Delivery, reason string, delay time.Duration) bool {
	how := Nacked
	if d != nil && s.lastAttempt(d) {
		how = DeadLettered
	}
	ok := d != nil && d.begun && s.remove(d, how)
	s.mu.Unlock()
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
		d.sendNak(delay)
	}
	return ok
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
		return backoffMost
	}
	return min(backoffFirst<<max(attempt-1, 0), backoffMost)
}

func (s *Subscription) extend(d *Delivery, dur time.Duration) bool {
	now := s.bus.clock.now()
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
