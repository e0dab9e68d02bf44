package jetstream

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"eventhub/jetstream/ordered"
)

// loan is an event of an ordered group that its owner has lent to a member. The delivery of the
// member refers to it: what the member says about the event goes to the lender, and not to the
// server.
type loan struct {
	from  lender
	over  atomic.Bool // its end was said
	until atomic.Int64
	right *atomic.Int64 // until when the member may settle the event, in the clock of the bus

	// of the owner
	item  *ordered.Item[*Delivery]
	up    *Delivery // the owner's own
	place *spot

	number uint64 // between hubs
}

// lender takes the ends of loans. It must not be called with a subscription's mu held.
type lender interface {
	ended(l *loan, how loanEnd)
}

// How a loan ends.
const (
	loanAcked  = 'A'
	loanNaked  = 'N' // refused, expired or returned: the event comes again
	loanBack   = 'B' // nobody has had the event
	loanBuried = 'D' // the last attempt has failed
)

// loanEnd is what the member's hub says at the end of a loan.
type loanEnd struct {
	What   byte          `json:"w"`
	Delay  time.Duration `json:"d,omitempty"`
	Reason string        `json:"r,omitempty"`
	// Client is for whom a dead letter counts.
	Client  string `json:"c,omitempty"`
	Attempt int    `json:"a,omitempty"`
}

// end says how the loan has ended, once.
func (l *loan) end(how loanEnd) {
	if l.over.CompareAndSwap(false, true) {
		l.from.ended(l, how)
	}
}

// usable reports whether the member may settle the event.
func (l *loan) usable(now int64) bool { return now < l.right.Load() }

// seat is the place of a member of an ordered group, in the subscription.
type seat struct {
	m     *member
	place *spot
	open  bool // guarded by the subscription's mu
}

// takeSeat gives the member of an ordered group its place. s.mu is held, here and below.
func (m *member) takeSeat() {
	if m.group.ordering == nil || m.sub.keeper != nil {
		return
	}
	m.seat = &seat{m: m}
	m.seat.place = &spot{id: uuid.NewString(), borrower: m.seat}
	m.group.ordering.enter(m.seat.place)
}

// leaveSeat gives the place up. What the member held has ended.
func (m *member) leaveSeat() {
	if m.seat == nil {
		return
	}
	m.group.ordering.leave(m.seat.place)
	m.seat = nil
}

// ordered reports whether the member gets its events from the owner of its group.
func (m *member) ordered() bool { return m.group.ordering != nil && m.sub.keeper == nil }

// listening reports whether the member may ask for events.
func (m *member) listening() bool {
	if m.seat != nil {
		return m.seat.open
	}
	return m.inbox != nil
}

// openSeat has the owner give the member slots.
func (m *member) openSeat() {
	if m.seat == nil || m.seat.open {
		return
	}
	m.seat.open = true
	m.requested = 0
	m.group.ordering.change(m.seat.place, true, 0)
	if ttl := m.group.timeToLive(); ttl > 0 {
		m.sub.schedule(m.sub.bus.clock.Now() + int64(ttl/3))
	}
}

// closeSeat has the owner give the member no more events. Leases stay valid.
func (m *member) closeSeat() {
	if m.seat == nil || !m.seat.open {
		return
	}
	m.seat.open = false
	m.sub.requested -= m.requested
	m.requested = 0
	m.group.ordering.change(m.seat.place, false, 0)
}

// more asks the owner for events.
func (m *member) more(n int) {
	m.requested += n
	m.sub.requested += n
	m.lost = math.MaxInt64
	m.group.ordering.change(m.seat.place, true, n)
}

// accept makes deliveries of events that the owner lends. It takes all of them, or none.
func (t *seat) accept(lent []lending) bool {
	m := t.m
	s := m.sub
	now := s.bus.clock.Now()
	ds := make([]*Delivery, len(lent))
	var unwanted []*loan
	for i := range lent {
		l := &lent[i]
		d := &Delivery{
			Event: l.event, Attempt: l.attempt, m: m, group: l.group, seq: l.seq, size: l.size, delivered: l.delivered, index: -1, resolved: true,
			arrived: now, touched: now, loan: l.loan, Redelivered: l.delivered > 1,
		}
		if s.opts.Filter != nil && !s.opts.Filter(&d.Event) {
			unwanted = append(unwanted, l.loan)
			continue
		}
		ds[i] = d
	}
	s.mu.Lock()
	if m.seat != t || !t.open || !s.running() {
		s.mu.Unlock()
		return false
	}
	taken := min(len(lent), m.requested)
	m.requested -= taken
	s.requested -= taken
	direct := ds[:0]
	for _, d := range ds {
		if d == nil {
			continue
		}
		d.group = m.group
		s.hold(d)
		if len(s.parked) == 0 && s.active < s.opts.MaxInFlight && s.opts.Holder.take(s) {
			s.active++
			d.active = true
			direct = append(direct, d)
		} else {
			s.parked = append(s.parked, d)
		}
	}
	s.refillAt(now)
	s.mu.Unlock()
	for _, l := range unwanted {
		l.end(loanEnd{What: loanAcked})
	}
	s.hand(direct...)
	return true
}

// assigned tells the subscriber its slots.
func (t *seat) assigned(slots []int, epoch uint64) {
	s := t.m.sub
	s.mu.Lock()
	mine, topic := t.m.seat == t, t.m.group.topic.Name
	s.mu.Unlock()
	if !mine || s.opts.OnAssign == nil {
		return
	}
	s.deliver.Lock()
	defer s.deliver.Unlock()
	if !s.ended.Load() {
		s.opts.OnAssign(Assignment{Topic: topic, Slots: slots, Epoch: epoch})
	}
}

// revoke ends what the member has of a lender without a word: the lender has lost its right. It
// returns how many events that were, and which of them nobody has had.
func (t *seat) revoke(from lender) (n int, unseen []*loan) {
	s := t.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(func(d *Delivery) bool {
		mine := d.loan != nil && d.loan.from == from && d.m == t.m && d.loan.over.CompareAndSwap(false, true)
		if mine {
			n++
			if !d.begun {
				unseen = append(unseen, d.loan)
			}
		}
		return mine
	})
	if t.m.seat == t && t.open {
		s.refillSoon(s.bus.clock.Now())
	}
	return n, unseen
}

// revokeOne is revoke for one loan.
func (t *seat) revokeOne(l *loan) {
	s := t.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(func(d *Delivery) bool { return d.loan == l && l.over.CompareAndSwap(false, true) })
}

// bury has a dead letter made of a delivery whose last attempt has failed. It does not block.
func (s *Subscription) bury(d *Delivery, reason string) {
	if d.loan != nil {
		d.loan.end(loanEnd{What: loanBuried, Reason: reason, Client: s.opts.CountFor, Attempt: d.Attempt})
		return
	}
	s.bus.dead.add(d, reason)
}

// revokeLoan is revokeOne for a loan of another hub.
func (t *seat) revokeLoan(from lender, number uint64) (n int) {
	s := t.m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(func(d *Delivery) bool {
		mine := d.loan != nil && d.loan.from == from && d.loan.number == number && d.loan.over.CompareAndSwap(false, true)
		if mine {
			n++
		}
		return mine
	})
	return n
}
