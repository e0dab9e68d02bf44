package jetstream

import (
	"cmp"
	"container/heap"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/ordered"
)

// placeOf is where the event is in the order of its key.
func placeOf(d *Delivery) uint64 {
	if d.m.main != nil {
		return d.seq
	}
	return mainPlace | d.seq
}

// loanOver is a loan that has ended.
type loanOver struct {
	loan *loan
	how  loanEnd
}

// arrive takes an event that the server has delivered.
func (w *owner) arrive(h *Held) {
	w.in.mu.Lock()
	first := len(w.in.came)+len(w.in.ends) == 0
	w.in.came = append(w.in.came, (*Delivery)(h))
	w.in.mu.Unlock()
	if first {
		w.o.kick()
	}
}

// ended takes the end of a loan of this hub, or what another hub says of one.
func (w *owner) ended(l *loan, how loanEnd) { w.endedAll(loanOver{l, how}) }

func (w *owner) endedAll(ends ...loanOver) {
	w.in.mu.Lock()
	first := len(w.in.came)+len(w.in.ends) == 0
	w.in.ends = append(w.in.ends, ends...)
	w.in.mu.Unlock()
	if first {
		w.o.kick()
	}
}

// takeIn takes what has come since the last turn: first the ends of loans, then events.
func (w *owner) takeIn() {
	w.in.mu.Lock()
	came, ends := w.in.came, w.in.ends
	w.in.came, w.in.ends = w.came[:0], w.ends[:0]
	w.in.mu.Unlock()
	w.came, w.ends = came, ends
	if len(came) == 0 && len(ends) == 0 {
		return
	}
	acked := w.takeAcked(ends)
	for i := range ends {
		if ends[i].how.What != loanAcked {
			w.takeEnd(ends[i].loan, ends[i].how)
		}
	}
	held, limit := 0, w.bus.limits.HeldBytes
	if len(came) > 0 {
		w.sub.mu.Lock()
		held = w.sub.heldBytes
		w.sub.mu.Unlock()
	}
	var doubles, shed []*Delivery
	w.o.mu.Lock()
	for _, l := range acked {
		if w.holds(l) {
			w.locks.Settle(l.item)
		}
	}
	for _, d := range came {
		double, thin := w.arriveLocked(d, held >= limit)
		if double != nil {
			doubles = append(doubles, double)
		}
		if thin {
			shed = append(shed, d)
			held -= d.size
		}
	}
	awaited := w.locks.Awaited()
	w.o.mu.Unlock()
	w.waited.Store(int64(awaited))
	for _, d := range doubles { // the server has forgotten that it delivered the event
		d.m.sub.endQuietly(d, event.Dropped)
	}
	for _, d := range shed {
		d.m.sub.shed(d)
	}
	clear(came)
	clear(ends)
}

// takeAcked tells the server what was acknowledged, and returns the loans.
func (w *owner) takeAcked(ends []loanOver) []*loan {
	now := w.bus.clock.Now()
	var acked []*loan
	var ours []*Delivery
	var s *Subscription
	for i := range ends {
		l := ends[i].loan
		if ends[i].how.What != loanAcked {
			continue
		}
		acked = append(acked, l)
		if l.up.m.sub != s { // mostly there is one
			if s != nil {
				s.mu.Unlock()
			}
			s = l.up.m.sub
			s.mu.Lock()
		}
		l.up.quiet = true
		if s.removeAt(l.up, event.Acked, now) {
			ours = append(ours, l.up)
		}
	}
	if s != nil {
		s.mu.Unlock()
	}
	acknowledge(ours, now)
	return acked
}

// arriveLocked files an event. It returns a delivery that is one too many, and whether only the
// place of d is to be kept, as it is when the owner holds more than it may, for want of an event
// that is to come. The ordering's mu is held.
func (w *owner) arriveLocked(d *Delivery, overfull bool) (double *Delivery, shed bool) {
	until := w.delayOf(d)
	if known := w.locks.Find(placeOf(d)); known != nil && known.Body != d {
		double = known.Body
	}
	item, kept, shed := w.locks.Arrive(placeOf(d), d.Event.Key, d)
	switch {
	case !kept:
		return d, false
	case d.m.main != nil: // what was put back is few, and stays whole until it is lent
		w.locks.Restored(item)
		shed = false
	case !shed && overfull:
		w.locks.Shed(item)
		shed = true
	}
	if until > 0 {
		w.locks.Block(item)
		heap.Push(&w.delays, delayedEvent{at: until, item: item, up: d})
	}
	return double, shed
}

// expect keeps the key of an event that the server has delivered, and that cannot be lent yet: it
// came too late and comes again, or it is not known yet how often it was handed out. The
// subscription's mu is not held.
func (w *owner) expect(d *Delivery) {
	w.o.mu.Lock()
	if w.locks.Find(placeOf(d)) == nil {
		item, _, _ := w.locks.Arrive(placeOf(d), d.Event.Key, d)
		w.locks.Await(item)
	}
	awaited := w.locks.Awaited()
	w.o.mu.Unlock()
	w.waited.Store(int64(awaited))
	w.o.kick()
}

// endQuietly ends a delivery whose keeper knows that. It reports whether the server may be told.
func (s *Subscription) endQuietly(d *Delivery, how event.Outcome) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.quiet = true
	return s.remove(d, how)
}

// shed forgets all of an event but its place.
func (s *Subscription) shed(d *Delivery) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.index < 0 || d.begun || d.slim {
		return
	}
	s.holdBytes(-d.size)
	d.thin()
	s.refillSoon(s.bus.clock.Now())
}

// thin forgets all of an event but its place. The subscription's mu is held.
func (d *Delivery) thin() {
	d.slim, d.released = true, true
	d.Event.Payload, d.Event.Headers, d.Event.Tags, d.Event.CausedBy = nil, nil, nil, nil
}

// takeLost takes note of what the subscription has lost or given back by itself.
func (w *owner) takeLost() {
	w.removing.Lock()
	lost := w.lostOnes
	w.lostOnes = nil
	w.removing.Unlock()
	if len(lost) == 0 {
		return
	}
	revoked := make(map[*loan]borrower)
	w.o.mu.Lock()
	for _, d := range lost {
		item := w.locks.Find(placeOf(d))
		if item == nil || item.Body != d {
			continue
		}
		if l := d.taken; l != nil && item.Member() != "" {
			revoked[l] = l.place.borrower
		}
		w.locks.Await(item)
	}
	w.waited.Store(int64(w.locks.Awaited()))
	w.o.mu.Unlock()
	for l, t := range revoked {
		switch t := t.(type) {
		case *seat:
			t.revokeOne(l)
		case *guestPlace:
			t.guest.revoke(l)
		}
	}
}

// widen leaves room for events that come again.
func (w *owner) widen() {
	s := w.sub
	limit := w.bus.limits.OrderedWindow + w.waits()
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.gathering || s.opts.MaxInFlight == limit {
		return
	}
	s.opts.MaxInFlight = limit
	s.refillSoon(s.bus.clock.Now())
}

// handing is an event on its way to a member.
type handing struct {
	place *spot
	loan  *loan
	shed  bool
}

// telling is what a member is to be told.
type telling struct {
	to    borrower
	slots []int
}

// lend tells members their slots, and gives them events. It reports whether there is more to lend.
func (w *owner) lend(now int64) (more bool) {
	if perhaps, _ := w.pulledElsewhere(now); perhaps {
		return false
	}
	w.o.mu.Lock()
	if w.gathering {
		w.o.mu.Unlock()
		return false
	}
	if w.members {
		w.members = false
		w.takePlaces()
	}
	var told []telling
	for i, c := range w.locks.Changes() {
		if i == 0 {
			w.epoch++
		}
		if p := w.places[c.Member]; p != nil {
			told = append(told, telling{p.borrower, c.Slots})
		}
	}
	epoch := w.epoch
	out := w.takeLocked(now)
	w.o.mu.Unlock()
	for _, t := range told {
		t.to.assigned(t.slots, epoch)
	}
	w.lendAll(out)
	return len(out) >= lendBatch
}

// takePlaces looks which places there are, and which want events. The ordering's mu is held.
func (w *owner) takePlaces() {
	w.places = w.placesLocked()
	w.seats = w.seats[:0]
	var open []string
	for id, p := range w.places {
		if p.had != nil {
			w.locks.Prefer(id, p.had)
			p.had = nil
		}
		if p.open {
			open = append(open, id)
			w.seats = append(w.seats, p)
		}
	}
	w.locks.SetMembers(open)
}

// takeLocked takes events for the places that want some, in turn. The ordering's mu is held.
func (w *owner) takeLocked(now int64) (out []handing) {
	for taken := true; taken && len(out) < lendBatch; {
		taken = false
		w.first++
		for i := range w.seats {
			p := w.seats[(w.first+i)%len(w.seats)]
			if !p.open || p.credit <= 0 || p.rest > now || p.guest != nil && p.guest.closed.Load() {
				continue
			}
			item := w.locks.Take(p.id)
			if item == nil {
				continue
			}
			p.credit--
			l := &loan{from: w, item: item, up: item.Body, place: p}
			l.right = &l.until
			item.Body.taken = l
			out = append(out, handing{p, l, item.Shed})
			w.locks.Shed(item) // once it is lent, only its place is kept
			taken = true
		}
	}
	return out
}

// lendAll lends events to the places that have taken their keys.
func (w *owner) lendAll(out []handing) {
	if len(out) == 0 {
		return
	}
	s, now := w.sub, w.bus.clock.Now()
	var to []*spot
	var late []*loan
	s.mu.Lock()
	full := s.heldBytes >= s.bus.limits.HeldBytes
	for i := range out {
		h := &out[i]
		if h.shed {
			continue
		}
		var l lending
		ok := h.loan.up.m.sub == s // else it is of before the connection was lost
		if ok {
			l, ok = s.lendOut(h.loan, now)
		}
		if !ok {
			late = append(late, h.loan)
			continue
		}
		if len(h.place.out) == 0 {
			to = append(to, h.place)
		}
		h.place.out = append(h.place.out, l)
	}
	if full {
		s.refillSoon(now)
	}
	s.mu.Unlock()
	for i := range out {
		if l := out[i].loan; out[i].shed {
			w.reads.Go(func() { w.giveAgain(l) })
		}
	}
	for _, l := range late {
		w.drop(l)
	}
	for _, p := range to {
		if !p.borrower.accept(p.out) {
			w.declined(p, p.out)
		}
		clear(p.out)
		p.out = p.out[:0]
	}
	for _, p := range to {
		if p.guest != nil {
			p.guest.flush()
		}
	}
}

// declined takes back events that their place did not take.
func (w *owner) declined(p *spot, lent []lending) {
	w.o.mu.Lock()
	if p.open {
		p.credit += len(lent)
		p.rest = w.bus.clock.Now() + int64(refusedRest)
	}
	w.o.mu.Unlock()
	for i := range lent {
		lent[i].loan.end(loanEnd{What: loanBack})
	}
}

// placesLocked returns the places of all hubs.
func (w *owner) placesLocked() map[string]*spot {
	places := make(map[string]*spot, len(w.o.seats))
	maps.Copy(places, w.o.seats)
	for _, g := range w.guests {
		for _, p := range g.places {
			places[p.id] = p
		}
	}
	return places
}

// giveAgain lends an event of which only the place was kept.
func (w *owner) giveAgain(l *loan) {
	up := l.up
	ctx, cancel := context.WithTimeout(w.bus.conn.Ctx, conn.PublishWait)
	m, err := w.bus.conn.GetMsg(ctx, up.group.topic.Stream.Name, map[string]any{"seq": up.seq})
	cancel()
	switch {
	case errors.Is(err, event.ErrNotFound): // it was removed from the stream
		w.credit(l.place)
		l.end(loanEnd{What: loanAcked})
		return
	case err != nil: // it comes again
		w.drop(l)
		return
	}
	s := up.m.sub
	s.mu.Lock()
	lent, ok := s.lendOut(l, w.bus.clock.Now())
	s.mu.Unlock()
	if !ok {
		w.drop(l)
		return
	}
	stored, e := up.group.topic.Event(m), &lent.event
	e.Payload, e.Headers, e.Tags, e.CausedBy = stored.Payload, stored.Headers, stored.Tags, stored.CausedBy
	one := []lending{lent}
	if !l.place.borrower.accept(one) {
		w.declined(l.place, one)
	}
	if g := l.place.guest; g != nil {
		g.flush()
	}
}

// credit gives a place back what an event that it did not get has cost.
func (w *owner) credit(p *spot) {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	if p.open {
		p.credit++
	}
}

// drop gives up an event that cannot be lent now: the server delivers it again.
func (w *owner) drop(l *loan) {
	s := l.up.m.sub
	ours := s.endQuietly(l.up, event.Returned)
	w.credit(l.place)
	w.o.mu.Lock()
	if w.holds(l) {
		w.locks.Await(l.item)
	}
	w.waited.Store(int64(w.locks.Awaited()))
	w.o.mu.Unlock()
	if ours {
		s.spare(l.up, true)
	}
	w.o.kick()
}

// lendOut marks a delivery as a member's, and keeps only its place. s.mu is held.
func (s *Subscription) lendOut(l *loan, now int64) (lent lending, ok bool) {
	d := l.up
	if d.index < 0 || d.begun || !d.usable(now) || !d.fresh(now) {
		return lending{}, false
	}
	lent = lending{loan: l, event: d.Event, attempt: d.Attempt, delivered: d.delivered, seq: d.seq, size: d.size, group: d.group}
	if slot := l.item.Slot(); slot != ordered.NoSlot {
		lent.event.Partition, lent.event.HasPartition = slot, true
	}
	d.begun, d.writing = true, true // the member's lease ends it, and not ours
	d.started, d.deadline = now, now+int64(maxAckTimeout)
	d.lent = l
	l.until.Store(d.touched + int64(d.group.fence.usable))
	if !d.slim {
		s.holdBytes(-d.size)
		d.thin()
	}
	s.lease(d)
	return lent, true
}

// takeEnd takes the end of a loan that is no acknowledgement.
func (w *owner) takeEnd(l *loan, how loanEnd) {
	d := l.up
	switch how.What {
	case loanBack:
		d.takeBack()
		w.o.mu.Lock()
		if w.holds(l) {
			w.locks.Back(l.item)
		}
		w.o.mu.Unlock()
	case loanBuried:
		ours := d.m.sub.endQuietly(d, event.DeadLettered)
		w.awaits(l)
		if ours {
			w.bus.dead.addFor(d, how.Reason, how.Client)
		}
	default:
		if how.Delay <= 0 {
			w.refuse(l)
			return
		}
		w.o.mu.Lock()
		held := w.holds(l)
		if held {
			w.locks.Block(l.item)
			heap.Push(&w.delays, delayedEvent{at: w.bus.clock.Now() + int64(how.Delay), item: l.item, up: d, loan: l})
		}
		w.o.mu.Unlock()
		if held {
			w.noteDelay(d, how.Delay)
		}
	}
}

// holds reports whether the loan is of an event as it is here now: not of one from before a reset,
// or of an earlier delivery. The ordering's mu is held.
func (w *owner) holds(l *loan) bool {
	return w.locks.Find(l.item.Pos()) == l.item && l.item.Body == l.up
}

func (w *owner) awaits(l *loan) {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	if w.holds(l) {
		w.locks.Await(l.item)
	}
	w.waited.Store(int64(w.locks.Awaited()))
}

// refuse has the server deliver an event again, which counts as an attempt.
func (w *owner) refuse(l *loan) {
	ours := l.up.m.sub.endQuietly(l.up, event.Nacked)
	w.awaits(l)
	if ours {
		l.up.tell(conn.NakNow)
	}
}

// buried says that a dead letter was stored, and its event settled.
func (w *owner) buried(d *Delivery) {
	w.o.mu.Lock()
	if item := w.locks.Find(placeOf(d)); item != nil && item.Body == nil {
		w.locks.Settle(item)
		w.waited.Store(int64(w.locks.Awaited()))
	}
	w.o.mu.Unlock()
	w.o.kick()
}

// noteDelay notes that an event is not to be lent for a time: for this owner, if it begins anew,
// and for another one.
func (w *owner) noteDelay(d *Delivery, delay time.Duration) {
	s, g := d.m.sub, d.group
	s.mu.Lock()
	spared := d.spared
	d.until = time.Now().Add(delay + time.Millisecond - 1).UnixMilli() // rounded up
	n := records.Note{Spared: spared, Until: d.until}
	s.mu.Unlock()
	g.mu.Lock()
	full := g.known.wait(d, spared, w.bus.clock.Now()+int64(delay), w.bus.limits.AttemptsKnown)
	g.mu.Unlock()
	if full {
		w.bus.obs.LimitReached("attempts_known")
	}
	if delay >= minDelay {
		w.bus.records.NoteSpared(s.link, records.SpareNote{Subject: d.attemptsSubject(), Note: n}, func(bool) {})
	}
}

// noteDelays notes the short delays, which have no note, for the next owner. It waits until the
// notes are stored.
func (w *owner) noteDelays() {
	w.o.mu.Lock()
	waits := w.delays
	w.delays = nil
	w.o.mu.Unlock()
	now := w.bus.clock.Now()
	var stored sync.WaitGroup
	for i := range waits {
		rest, d := time.Duration(waits[i].at-now), waits[i].up
		if rest <= 0 || rest >= minDelay {
			continue
		}
		s := d.m.sub
		s.mu.Lock()
		n := records.Note{Spared: d.spared, Until: time.Now().Add(rest + time.Millisecond - 1).UnixMilli()}
		s.mu.Unlock()
		stored.Add(1)
		w.bus.records.NoteSpared(s.link, records.SpareNote{Subject: d.attemptsSubject(), Note: n}, func(bool) { stored.Done() })
	}
	stored.Wait()
}

// delayOf returns when an event that has come again may be lent, or 0.
func (w *owner) delayOf(d *Delivery) int64 {
	if d.delivered <= 1 && d.m.main == nil {
		return 0
	}
	now := w.bus.clock.Now()
	until := int64(0)
	if d.until > 0 {
		until = now + int64(time.Until(time.UnixMilli(d.until)))
	}
	g := d.group
	g.mu.Lock()
	until = max(until, g.known.accounts[d.seq].until)
	g.mu.Unlock()
	if until <= now {
		return 0
	}
	return until
}

// takeDue refuses what has waited for its delay, and returns when the next is due.
//
// The owner waits and not the server: a server that counted the delay would give the events behind
// to the next owner first.
func (w *owner) takeDue(now int64) (next int64) {
	var due []*loan
	w.o.mu.Lock()
	for len(w.delays) > 0 && w.delays[0].at <= now {
		d := heap.Pop(&w.delays).(delayedEvent) //nolint:forcetypeassert,errcheck // it holds nothing else
		switch {
		case d.loan != nil:
			due = append(due, d.loan)
		case w.locks.Find(d.item.Pos()) == d.item && d.item.Body == d.up:
			w.locks.Back(d.item)
		}
	}
	if len(w.delays) > 0 {
		next = w.delays[0].at
	}
	w.o.mu.Unlock()
	for _, l := range due {
		w.refuse(l)
	}
	return next
}

// delayedEvent is an event that waits.
type delayedEvent struct {
	at   int64
	item *ordered.Item[*Delivery]
	up   *Delivery
	loan *loan // it is to be refused then; nil: it may be lent
}

// delays are those that wait, a heap; bounded by the window.
type delays []delayedEvent

func (q delays) Len() int           { return len(q) }
func (q delays) Less(i, j int) bool { return q[i].at < q[j].at }
func (q delays) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *delays) Push(x any)        { *q = append(*q, x.(delayedEvent)) } //nolint:forcetypeassert,errcheck // of this file only
func (q *delays) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

// leaver is a place that has gone, and what it still had.
type leaver struct {
	place *spot
	held  []*loan
}

// left has the owner end what a place still holds: it was given back before, as far as its hub
// could say so. The ordering's mu is held.
func (w *owner) left(p *spot) {
	w.members = true
	var held []*loan
	w.locks.Each(func(i *ordered.Item[*Delivery]) {
		if i.Member() == p.id && i.Body != nil && i.Body.taken != nil {
			held = append(held, i.Body.taken) // also what is only on its way to the place
		}
	})
	if len(held) == 0 {
		w.locks.Leave(p.id)
		return
	}
	w.leaving = append(w.leaving, leaver{p, held})
}

// takeLeft ends what places had that have gone.
func (w *owner) takeLeft() {
	w.o.mu.Lock()
	left := w.leaving
	w.leaving = nil
	w.o.mu.Unlock()
	if len(left) == 0 {
		return
	}
	for _, p := range left {
		slices.SortFunc(p.held, func(a, b *loan) int { return cmp.Compare(a.item.Pos(), b.item.Pos()) })
		for _, l := range p.held {
			l.end(loanEnd{What: loanNaked})
		}
	}
	w.takeIn()
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	places := w.placesLocked()
	for _, p := range left {
		if places[p.place.id] == nil { // else it is back in another session
			w.locks.Leave(p.place.id)
		}
	}
	w.members = true
}
