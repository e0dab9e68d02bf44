package jetstream

import (
	"cmp"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// minTick is the shortest time between two looks at the leases of a subscription. Expiry is noticed
// within it.
const minTick = 50 * time.Millisecond

// hold takes a delivery in: it is the subscription's until it is settled, given back or dropped.
// s.mu is held, here and below.
func (s *Subscription) hold(d *Delivery) {
	d.index = len(s.out)
	s.out = append(s.out, d)
	s.holdUnread(d, 1)
	d.path().held.Add(1)
	s.schedule(min(d.touched+int64(d.group.fence.touch), d.arrived+int64(heldPatience)))
}

// path is the way on which the delivery came.
func (d *Delivery) path() *path { return &d.group.paths[d.m.sub.link.Index] }

// holdUnread counts a delivery that is not begun, or takes it off with -1.
func (s *Subscription) holdUnread(d *Delivery, n int) {
	s.opts.Holder.count(n)
	s.holdBytes(n * d.size)
}

// holdBytes counts bytes that are held, here and over all subscriptions.
func (s *Subscription) holdBytes(n int) {
	s.heldBytes += n
	s.bus.subscriptions.held.Add(int64(n))
}

// lease files a delivery that has begun under its id, behind older ones.
func (s *Subscription) lease(d *Delivery) {
	s.leased++
	if s.keeper != nil {
		return // nobody asks an owner for an id
	}
	older := s.byID[d.Event.ID]
	if older == nil {
		s.byID[d.Event.ID] = d
		return
	}
	for older.sameID != nil {
		older = older.sameID
	}
	older.sameID = d
}

func (s *Subscription) unlease(d *Delivery) {
	s.leased--
	first := s.byID[d.Event.ID]
	switch {
	case s.keeper != nil:
	case first == d && d.sameID == nil:
		delete(s.byID, d.Event.ID)
	case first == d:
		s.byID[d.Event.ID] = d.sameID
	default:
		for first.sameID != d {
			first = first.sameID
		}
		first.sameID = d.sameID
	}
	d.sameID = nil
	if s.leased == 0 && s.settled != nil {
		close(s.settled)
		s.settled = nil
	}
}

// remove ends a delivery. It reports whether the caller may tell the server: not when it had ended
// before, and not when the server may have given the event to another member.
func (s *Subscription) remove(d *Delivery, how event.Outcome) bool {
	return s.removeAt(d, how, s.bus.clock.Now())
}

// removeAt is remove for callers that have just read the clock.
func (s *Subscription) removeAt(d *Delivery, how event.Outcome, now int64) bool {
	if d.index < 0 {
		return false
	}
	ours := d.usable(now)
	if !ours {
		how = event.Dropped
	}
	last := s.out[len(s.out)-1]
	s.out[d.index], last.index = last, d.index
	s.out[len(s.out)-1] = nil
	s.out = s.out[:len(s.out)-1]
	d.index = -1
	d.path().held.Add(-1)
	if d.loan == nil {
		d.ended(how)
	}
	if d.lent != nil {
		d.lent.until.Store(0)
	}
	if s.keeper != nil && !d.quiet {
		s.keeper.removed(d)
	}
	if d.handle != 0 {
		s.bus.handles.leases.drop(d.handle)
	}
	if d.begun {
		s.unlease(d)
		d.m.obs.InFlight(-1)
		d.traceEnd(how)
		d.m.obs.Settled(how, time.Duration(now-d.started), time.Duration(s.bus.clock.At(now).UnixNano()-d.Event.StoredAt))
	} else if !d.slim {
		s.holdUnread(d, -1)
	}
	switch {
	case d.active:
		d.active = false
		s.active--
		s.opts.Holder.release(s.bus)
		s.refillSoon(now)
	case len(s.parked) > 0: // others may have waited behind it
		s.refillSoon(now)
	}
	if d.cancel != nil {
		d.cancel()
	}
	return ours
}

// ended notes in the group how a delivery ended.
func (d *Delivery) ended(how event.Outcome) {
	g := d.group
	if how == event.Acked && d.delivered <= 1 && d.Attempt <= 1 {
		return // nothing was noted of it
	}
	full := false
	g.mu.Lock()
	switch {
	case how == event.Acked:
		full = g.known.settled(d.seq, d.delivered, g.bus.clock.Now(), g.bus.limits.AttemptsKnown)
	case d.begun && d.resolved:
		full = g.known.failed(d.seq, d.delivered, d.spared, g.bus.limits.AttemptsKnown)
		if how == event.DeadLettered {
			g.known.over(d.seq)
		}
	case d.failed != nil && how == event.DeadLettered:
		full = g.known.spare(d.seq, d.delivered, d.spared, g.bus.limits.AttemptsKnown)
		g.known.over(d.seq)
	}
	if how != event.Acked { // a dead letter may fail to be stored
		g.track.addUnsettled(d.seq)
	}
	g.mu.Unlock()
	if full {
		g.bus.obs.LimitReached("attempts_known")
	}
}

// takeHeld ends all that has not begun, and returns what may be given back.
func (s *Subscription) takeHeld() []*Delivery {
	var back []*Delivery
	for i := len(s.out) - 1; i >= 0; i-- {
		if d := s.out[i]; !d.begun {
			// what is not ours any more is not given back, but counts for no attempt either
			s.remove(d, event.Returned)
			back = append(back, d)
		}
	}
	s.parked = nil
	return back
}

// giveBack tells the server to deliver again at once, in the order of the stream, which the server
// then mostly keeps. What no client had counts for no attempt. s.mu is not held.
func (s *Subscription) giveBack(back []*Delivery) { s.giveBackAll(back, false) }

// giveBackAll is giveBack; lost says that the subscriber was lost, and that what it had can wait.
func (s *Subscription) giveBackAll(back []*Delivery, lost bool) {
	slices.SortFunc(back, func(a, b *Delivery) int { return cmp.Compare(a.seq, b.seq) })
	var singly []*Delivery
	many, had := make(map[*group][]*Delivery), make(map[*group][]*Delivery)
	s.mu.Lock()
	for _, d := range back {
		switch {
		case d.plain():
			many[d.group] = append(many[d.group], d)
		case lost && d.begun && d.loan == nil:
			had[d.group] = append(had[d.group], d)
		default:
			singly = append(singly, d)
		}
	}
	s.mu.Unlock()
	for _, d := range singly {
		if d.begun {
			d.tell(conn.NakNow)
		} else {
			s.spare(d, true)
		}
	}
	for g, ds := range many {
		if len(ds) >= fewReturned {
			s.giveBackMany(g, ds)
			continue
		}
		for _, d := range ds {
			s.spare(d, true)
		}
	}
	for g, ds := range had {
		s.giveBackLost(g, ds)
	}
}

// drop ends deliveries without a word to the server.
func (s *Subscription) drop(which func(*Delivery) bool) {
	for i := len(s.out) - 1; i >= 0; i-- {
		if i < len(s.out) && which(s.out[i]) {
			s.remove(s.out[i], event.Dropped)
		}
	}
	s.dropParked()
}

// forget gives up everything that the subscription holds, because the server may have given it to
// others: nothing is settled or asked for until restart.
func (s *Subscription) forget() {
	s.mu.Lock()
	var unseen []*Delivery
	for _, d := range s.out {
		if !d.begun && d.loan == nil {
			unseen = append(unseen, d)
		}
	}
	s.drop(func(d *Delivery) bool { return d.loan == nil }) // lenders look after what they lend
	for _, m := range s.members {
		if m.seat == nil {
			m.close(false)
		}
	}
	if s.keeper != nil {
		s.keeper.broke(brokenCut)
	}
	s.mu.Unlock()
	for _, d := range unseen {
		s.spare(d, false)
	}
}

// refillSoon asks for events when there is credit worth asking for, or else, together with what
// else is settled at this moment, a little later: a pull for one event costs as much as one for a
// hundred.
func (s *Subscription) refillSoon(now int64) {
	if !s.running() || s.refilling {
		return
	}
	if len(s.parked) == 0 && s.requested > 0 {
		s.refillAt(now)
		return
	}
	s.refilling = true
	s.wg.Go(func() {
		runtime.Gosched()
		s.mu.Lock()
		s.refilling = false
		s.refill()
		s.mu.Unlock()
		s.advance()
	})
}

// schedule makes tick run at the given time, or earlier.
func (s *Subscription) schedule(at int64) {
	if s.stopped || s.wake != 0 && s.wake <= at {
		return
	}
	s.wake = at
	s.timer.Reset(max(time.Duration(at-s.bus.clock.Now()), time.Millisecond))
}

// tick looks at all that the subscription holds: it ends leases that ran out, and asks the server
// to wait longer for the others.
func (s *Subscription) tick() {
	s.mu.Lock()
	s.wake = 0
	if s.stopped {
		s.mu.Unlock()
		return
	}
	s.wg.Add(1) // stop waits
	defer s.wg.Done()
	now := s.bus.clock.Now()
	var expired, failed, unseen []*Delivery
	touch := make(map[*member][]*Delivery, len(s.members))
	next := now + int64(time.Hour)
	for i := len(s.out) - 1; i >= 0; i-- {
		if i >= len(s.out) {
			continue
		}
		d := s.out[i]
		f := &d.group.fence
		switch {
		case !d.usable(now):
			s.remove(d, event.Dropped)
			if !d.begun {
				unseen = append(unseen, d)
			}
		case d.begun && !d.writing && d.deadline <= now:
			if s.lastAttempt(d) && s.remove(d, event.DeadLettered) {
				failed = append(failed, d)
			} else if s.remove(d, event.Expired) {
				expired = append(expired, d)
			}
		default:
			due := d.touchDue()
			if due <= now {
				touch[d.m] = append(touch[d.m], d)
				d.asked = now
				due = now + int64(f.retry)
			}
			next = min(next, due)
			if d.loan == nil {
				next = min(next, d.touched+int64(f.usable))
			}
			switch {
			case d.begun && !d.writing:
				next = min(next, d.deadline)
			case !d.begun && d.resolved && d.loan == nil && s.keeper == nil:
				if due := d.arrived + int64(heldPatience); due > now {
					next = min(next, due)
				} else {
					next = min(next, d.m.askIdle(now))
				}
			}
		}
	}
	for _, m := range s.members {
		if ttl := m.group.timeToLive(); ttl > 0 {
			// The server takes a group whose members do not pull, paused or at their maxInFlight,
			// for one without members.
			next = min(next, now+int64(ttl/3))
			if m.requested == 0 || m.seat != nil {
				// an error means that the connection is down
				_ = s.link.NC.Publish(m.group.keepAliveSubject(), conn.InProgress)
			}
		}
		if m.retryAt > 0 && m.retryAt <= now {
			m.retryAt = 0
		}
		if m.retryAt > 0 {
			next = min(next, m.retryAt)
		}
		if m.requested > 0 {
			if m.lost <= now {
				m.repeat(now)
			}
			next = min(next, max(m.lost, now))
		}
	}
	if s.slowUntil != 0 {
		if s.slowUntil <= now {
			s.quicken()
		}
		next = min(next, max(s.slowUntil, now))
	}
	s.refillAt(now)
	s.schedule(max(next, now+int64(minTick)))
	s.mu.Unlock()

	for _, d := range unseen {
		s.spare(d, false)
	}
	if len(unseen) > 0 {
		s.advance() // others may have waited behind them
	}
	s.giveBack(expired)
	for _, d := range failed {
		s.bury(d, "lease expired")
	}
	for _, ds := range touch {
		s.touch(ds, now)
	}
}

// touchDue is when the server is to be asked again to keep d. s.mu is held.
func (d *Delivery) touchDue() int64 {
	if d.loan != nil {
		return math.MaxInt64 // its owner does that
	}
	f := &d.group.fence
	if d.asked > d.touched {
		return max(d.touched+int64(f.touch), d.asked+int64(f.retry))
	}
	return d.touched + int64(f.touch)
}

// touch asks the server to wait longer for deliveries of one consumer. It works them off in order,
// so the answer to the last one stands for all; only then do they count as touched, at the time
// that they were sent.
func (s *Subscription) touch(ds []*Delivery, sent int64) {
	for _, d := range ds[:len(ds)-1] {
		d.send(conn.InProgress)
	}
	// An error means that the connection is down; then all is forgotten anyway.
	_ = s.link.Ask(&nats.Msg{Subject: ds[len(ds)-1].reply, Data: conn.InProgress}, sent, conn.AskerFunc(func(reply *nats.Msg, err error) {
		if err != nil {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		// the consumer may be gone, and no pull wait that would say so
		if conn.NoResponders(reply) {
			ds[0].m.verify(ds[0].group)
			return
		}
		now := s.bus.clock.Now()
		for _, d := range ds {
			d.keptSince(sent, now)
		}
	}))
}

// keptSince takes the answer to an in-progress that was sent at the given time. An answer that
// comes when the delivery is not usable any more says nothing: the server may have given the event
// to another before it heard the question. s.mu is held.
func (d *Delivery) keptSince(sent, now int64) {
	if d.usable(now) {
		d.touched = max(d.touched, sent)
		if d.lent != nil {
			d.lent.until.Store(d.touched + int64(d.group.fence.usable))
		}
	}
}
