package jetstream

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
	"eventhub/jetstream/ordered"
)

// Times of an owner.
const (
	// ownerTick is how often an owner looks at what only time changes, and gatherTick how often it
	// asks the server while it gathers.
	ownerTick  = 250 * time.Millisecond
	gatherTick = 20 * time.Millisecond
	// cutRest is how long an owner rests before it pulls again after a cut, or tries to once more.
	cutRest = 100 * time.Millisecond
	// gatherMore is how much longer than AckWait an owner gathers when nothing arrives any more.
	gatherMore = 2 * time.Second
	// seatsWait is how long a new owner waits for members before it deals out slots.
	seatsWait = 30 * time.Millisecond
	// hostWait is how long a hub owns a group that has members on other hubs only.
	hostWait = 10 * time.Second
	// holePatience is how long a delivery that was left out may still arrive. Nothing is lent then.
	holePatience = 200 * time.Millisecond
	// ownerBatch is how many events an owner asks for at a time: as many as the members of a group
	// do that is not ordered.
	ownerBatch = 2048
	// lendBatch is how many events are lent before the owner looks at other things.
	lendBatch = 256
	// epochBits is for the assignments of an owner. A number in JSON has 53 bits: 33 are left for
	// the revisions of the bucket.
	epochBits = 20
	// refusedRest is how long a place that did not take an event is given none.
	refusedRest = 100 * time.Millisecond
)

// broken is why an owner does not go on as it is.
type broken int32

const (
	brokenNot  broken = iota
	brokenCut         // the connection was lost, or the process stood still: nothing is held
	brokenHole        // somebody else has pulled from the consumer
	brokenLost        // the hub's lease has ended, or another hub owns the group
	brokenGone        // the consumer does not exist any more
	brokenIdle        // nobody needs this owner any more
)

// mainPlace tells the places of the group's own events from those of events that were put back,
// which come first.
const mainPlace = 1 << 62

// owner gives out the events of an ordered group. It has a subscription of its own, the keeper's,
// which holds the events at the server as those of other groups do, and lends them to members.
//
// The order of a key rests on this: nothing is lent before all that the server waits for is here
// (gather), and what leaves the owner's hands unsettled keeps its key until it is here again.
type owner struct {
	o     *orderedGroup
	bus   *Bus
	group *group
	entry ownership

	why    atomic.Int32 // a broken
	count  deliveryCount
	waited atomic.Int64 // events that are to arrive again
	// missing is what a gathering owner has not got yet
	missing atomic.Int64

	// in is what has come since the owner's last turn. Both lists are bounded by what it holds.
	in struct {
		mu   sync.Mutex
		came []*Delivery
		ends []loanOver
	}

	removing sync.Mutex
	// lostOnes were removed from the subscription by others than the owner; bounded by what it held
	lostOnes []*Delivery

	// used by the goroutine of the ordering only
	sub     *Subscription
	main    *member
	came    []*Delivery // those of the turn before, for their memory
	ends    []loanOver
	seats   []*spot // that want events, of all hubs
	first   int     // which of them is served first
	here    int     // how many events were there when an owner that gathers last looked
	quiet   int64   // until when older events may be on their way to those who had them before
	written int64
	alone   int64            // since when there are no members on this hub; 0: there are
	reads   sync.WaitGroup   // only the goroutine of the ordering adds to it
	overdue map[uint64]int64 // since when events that are to arrive again are missed, by place
	missAt  int64

	// Guarded by the ordering's mu.
	locks     *ordered.Locks[*Delivery]
	guests    map[string]*guest
	places    map[string]*spot // of all hubs, as of when members was false
	members   bool             // places have come, gone, opened or closed
	gathering bool
	delays    delays
	leaving   []leaver // bounded by the places of all hubs, and by what they had
	// epoch is of the last assignment. It begins with the revision of the entry, which rises over
	// all owners and generations of a group.
	epoch uint64
}

func newOwner(o *orderedGroup, e ownership) *owner {
	w := &owner{o: o, bus: o.bus, group: o.group, entry: e, guests: make(map[string]*guest), overdue: make(map[uint64]int64), members: true, written: o.bus.clock.Now(), epoch: e.revision << epochBits}
	w.locks = ordered.New[*Delivery](o.group.slots)
	return w
}

// serve is the time as owner. It begins to pull after wait.
func (w *owner) serve(wait time.Duration) {
	w.o.mu.Lock()
	w.o.own = w
	w.gathering = true
	w.o.mu.Unlock()
	w.quiet = w.bus.clock.Now() + int64(wait)
	for on := w.pause(wait); on; {
		switch w.listen() {
		case brokenIdle:
			w.handOver()
			on = false
		case brokenLost, brokenGone:
			on = false
		case brokenHole:
			w.bus.often.Log(w.bus.conn.Ctx, slog.LevelWarn, "somebody else pulls from the consumer of an ordered group; deliveries stop until what they have has ended", w.group.source(),
				slog.String("topic", w.group.topic.Name), slog.String("group", w.group.name))
			w.bus.obs.LimitReached("ordered_foreign_pull")
			on = w.pause(w.group.fence.ackWait)
		case brokenCut, brokenNot:
			on = w.pause(cutRest)
		}
	}
	w.o.mu.Lock()
	w.o.own = nil
	guests := w.guests
	w.guests = nil
	w.o.mu.Unlock()
	for _, g := range guests {
		g.close()
	}
	w.reads.Wait()
	w.bus.owners.ended()
	w.o.kick()
}

// pause waits while nothing is held, and reports whether the owner goes on. An owner that nobody
// needs any more gives up the group, and leaves to the next one what it would have waited itself.
func (w *owner) pause(wait time.Duration) bool {
	why := w.rest(wait)
	if why == brokenIdle {
		w.giveUp(time.Duration(w.quiet - w.bus.clock.Now()))
	}
	return why == brokenNot
}

// giveUp says that another hub may begin after wait, or at once.
func (w *owner) giveUp(wait time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.bus.conn.Ctx), settleWait)
	defer cancel()
	w.entry.Clean, w.entry.Wait = wait <= 0, max(wait, 0)
	if _, err := w.bus.owners.write(ctx, w.o.key, w.entry); err != nil {
		w.bus.log.Debug("failed to note that a group was given up in order; its next owner waits", slog.Any("error", err))
	}
}

// rest waits, and returns why the owner is to end meanwhile.
func (w *owner) rest(wait time.Duration) broken {
	for end := w.bus.clock.Now() + int64(wait); ; {
		now := w.bus.clock.Now()
		if why := w.state(now); why != brokenNot && why != brokenCut && why != brokenHole {
			return why
		}
		if now >= end {
			return brokenNot
		}
		w.o.rest(min(time.Duration(end-now), ownerTick))
	}
}

// state looks whether the owner may go on.
func (w *owner) state(now int64) broken {
	switch {
	case w.bus.conn.Ctx.Err() != nil || !w.bus.owners.valid(now):
		return brokenLost
	case w.needless(now):
		return brokenIdle
	}
	return broken(w.why.Load())
}

// needless reports whether the owner has no members, or only such of other hubs, one of which is to
// own the group.
func (w *owner) needless(now int64) bool {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	if len(w.o.seats) > 0 {
		w.alone = 0
		return false
	}
	if w.alone == 0 {
		w.alone = now
	}
	return len(w.guests) == 0 || w.bus.orderingsEnd.Load() || now-w.alone > int64(hostWait)
}

// broke notes why the owner cannot go on as it is. It may be called with any lock held but
// removing.
func (w *owner) broke(why broken) {
	w.why.CompareAndSwap(int32(brokenNot), int32(why))
	if why == brokenGone {
		w.why.Store(int32(why))
	}
	w.o.kick()
}

// deliveryCount is the server's count of deliveries, as the owner sees it.
type deliveryCount struct {
	mu    sync.Mutex
	last  uint64
	holes uint64 // numbers that were left out
	since int64  // when the first of them was
}

// saw takes the server's count of a delivery. One that is left out went to somebody else, or comes
// in a moment to an inbox that was just closed. A server that counts from an older number was
// restarted, or its leader has changed.
func (w *owner) saw(order uint64) {
	c := &w.count
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case order > c.last+1:
		if c.holes == 0 {
			c.since = w.bus.clock.Now()
		}
		c.holes += order - c.last - 1
	case order <= c.last && c.holes > 0:
		c.holes--
		return
	}
	c.last = order
}

// pulledElsewhere reports whether a number was left out, and whether that is sure.
func (w *owner) pulledElsewhere(now int64) (perhaps, sure bool) {
	c := &w.count
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.holes > 0, c.holes > 0 && now-c.since > int64(holePatience)
}

// waits is how many events are to arrive again, for which there is always room.
func (w *owner) waits() int {
	if w == nil {
		return 0
	}
	return int(w.waited.Load() + w.missing.Load())
}

// removed takes a delivery that the subscription has lost or given back by itself. The
// subscription's mu is held.
func (w *owner) removed(d *Delivery) {
	w.removing.Lock()
	w.lostOnes = append(w.lostOnes, d)
	w.removing.Unlock()
	w.o.kick()
}

// listen pulls, gathers and lends, and returns why it has ended. Nothing is held then.
func (w *owner) listen() broken {
	w.why.Store(int32(brokenNot))
	ctx, cancel := context.WithTimeout(w.bus.conn.Ctx, conn.PublishWait)
	entry, err := w.bus.owners.read(ctx, w.o.key)
	if err == nil && (entry.Hub != w.entry.Hub || entry.Term != w.entry.Term) {
		cancel()
		return brokenLost // this hub stood still, and another one took the group
	}
	var info *natsjs.ConsumerInfo
	if err == nil {
		info, err = w.bus.records.Consumer(ctx, w.group.topic, w.group.consumer)
	}
	if gone(err) {
		cancel()
		w.verify()
		return brokenGone
	}
	if err == nil && info.NumAckPending > 0 && w.bus.clock.Now() < w.quiet {
		cancel()
		return w.calm()
	}
	if err == nil {
		err = w.subscribe(info.Delivered.Consumer, w.bus.limits.OrderedWindow+info.NumAckPending)
	}
	if err == nil {
		w.missing.Store(int64(info.NumAckPending))
		w.here = 0
		w.joinQueue(ctx)
	}
	cancel()
	if err != nil {
		w.bus.often.Log(w.bus.conn.Ctx, slog.LevelWarn, "cannot pull for an ordered group; retrying", w.group.source(), slog.String("topic", w.group.topic.Name), slog.String("group", w.group.name), slog.Any("error", err))
		return brokenCut
	}
	w.o.mu.Lock()
	w.gathering = info.NumAckPending > 0
	w.members = true
	w.o.mu.Unlock()
	if !w.gathering {
		w.o.rest(seatsWait)
	}
	why := w.loop()
	if why == brokenGone {
		w.verify()
	}
	if why != brokenIdle {
		w.reset()
	}
	return why
}

// calm waits until the server delivers again what this owner had when it lost the right to it. The
// server gives such events out first. Pulls before that would bring newer events, and perhaps more
// than there is room for.
func (w *owner) calm() broken {
	if !w.pause(time.Duration(w.quiet - w.bus.clock.Now())) {
		return brokenLost
	}
	return brokenCut
}

// subscribe makes the keeper's subscription. order is the server's count of deliveries until now.
func (w *owner) subscribe(order uint64, window int) error {
	b := w.bus
	s := &Subscription{
		bus: b, link: b.conn.Link(), group: w.group.name, handler: w.arrive, byID: make(map[string]*Delivery), paused: true, keeper: w,
		opts: SubscribeOptions{BatchSize: ownerBatch, MaxInFlight: window, AckTimeout: maxAckTimeout, MaxLease: maxAckTimeout, MaxAttempts: NeverGiveUp},
	}
	for range b.conn.Links {
		if s.link.Up.Load() {
			break
		}
		s.link = b.conn.Link()
	}
	s.ctx, s.cancel = context.WithCancel(b.conn.Ctx)
	s.timer = time.AfterFunc(time.Hour, s.tick)
	s.timer.Stop()
	w.sub, w.main = s, &member{sub: s, group: b.groups.share(w.group), obs: event.NopObserver{}}
	s.members = []*member{w.main}
	b.groups.addMember(w.main.group, s)
	w.count.mu.Lock()
	w.count.last, w.count.holes = order, 0
	w.count.mu.Unlock()
	w.removing.Lock()
	w.lostOnes = nil
	w.removing.Unlock()
	b.subscriptions.mu.Lock()
	closed := b.subscriptions.all == nil
	if !closed {
		b.subscriptions.all[s] = struct{}{}
		b.subscriptions.count.Add(1)
	}
	b.subscriptions.mu.Unlock()
	if closed {
		b.groups.unshare(w.main.group, s)
		s.cancel()
		return event.ErrClosed
	}
	s.Resume()
	return nil
}

// joinQueue has the owner pull what was put back to the group, too.
func (w *owner) joinQueue(ctx context.Context) {
	ptr, err := w.bus.records.Generation(ctx, w.group.topic, w.group.name)
	if err != nil || ptr.Deleted {
		return // a change of it is heard of
	}
	w.sub.mu.Lock()
	defer w.sub.mu.Unlock()
	w.main.takeQueue(ptr.PutBack) //nolint:contextcheck // it joins for as long as the subscription lives
}

// verify has the members of this hub and others look whether the consumer exists.
func (w *owner) verify() {
	for _, s := range w.bus.groups.membersOf(w.group) {
		s.mu.Lock()
		for _, m := range s.members {
			if m.group == w.group && m.seat != nil {
				m.verify(w.group)
			}
		}
		s.mu.Unlock()
	}
}

// reset ends the subscription and forgets all that was lent: the right to it is lost.
func (w *owner) reset() {
	w.takeIn()
	w.o.mu.Lock()
	before := w.locks
	w.locks = ordered.New[*Delivery](w.group.slots)
	w.delays = nil
	w.gathering, w.members = true, true
	had := before.Owners()
	for id, slots := range had {
		w.locks.Prefer(id, slots)
	}
	guests := w.guests
	w.guests = make(map[string]*guest)
	seats := w.seatsLocked()
	w.o.mu.Unlock()
	w.quiet = w.bus.clock.Now() + int64(w.group.fence.ackWait)
	for _, g := range guests {
		g.close() // they come again
	}
	for _, t := range seats {
		t.revoke(w)
	}
	w.sub.forget()
	w.end(false)
}

func (w *owner) seatsLocked() []*seat {
	var seats []*seat
	for _, p := range w.o.seats {
		if t, ok := p.borrower.(*seat); ok {
			seats = append(seats, t)
		}
	}
	return seats
}

// end ends the subscription, and reports whether the server has taken all that was given back.
func (w *owner) end(giveBack bool) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.bus.conn.Ctx), settleWait)
	defer cancel()
	s := w.sub
	if !giveBack {
		s.mu.Lock()
		s.stopped = true
		s.mu.Unlock()
	}
	err := s.Stop(ctx)
	w.in.mu.Lock() // what came meanwhile has ended, too
	w.in.came, w.in.ends = nil, nil
	w.in.mu.Unlock()
	w.waited.Store(0)
	w.missing.Store(0)
	clear(w.overdue)
	return err == nil
}

// handOver gives back all that is held, and says that another hub may begin at once.
func (w *owner) handOver() {
	w.o.mu.Lock()
	w.gathering = true // nothing is lent any more
	guests := w.guests
	w.guests = make(map[string]*guest)
	w.o.mu.Unlock()
	clean := recallAll(w.bus, guests)
	w.takeIn()
	w.takeLeft()
	w.reads.Wait()
	w.takeIn()
	w.noteDelays()
	clean = w.end(true) && clean && w.bus.owners.valid(w.bus.clock.Now())
	w.o.mu.Lock()
	w.locks = ordered.New[*Delivery](w.group.slots)
	w.o.mu.Unlock()
	if clean { // otherwise the next owner waits for the end of the lease
		w.giveUp(0)
	}
}

// loop lends events until something breaks.
func (w *owner) loop() broken {
	tick := time.NewTicker(ownerTick)
	defer tick.Stop()
	var asked int64
	patience := int64(w.group.fence.ackWait + gatherMore)
	gatherEnd := w.bus.clock.Now() + patience
	for {
		now := w.bus.clock.Now()
		if _, sure := w.pulledElsewhere(now); sure {
			w.broke(brokenHole)
		}
		if why := w.state(now); why != brokenNot {
			return why
		}
		w.takeIn()
		w.takeLost()
		w.takeLeft()
		next := w.takeDue(now)
		if w.gathering && now-asked > int64(gatherTick) {
			asked = now
			if w.gather(now > gatherEnd) {
				gatherEnd = w.bus.clock.Now() + patience
			}
		}
		more := w.lend(now)
		w.widen()
		if more {
			continue
		}
		wait := ownerTick
		if w.gathering {
			wait = gatherTick
		}
		if next > 0 {
			wait = min(wait, max(time.Duration(next-now), time.Millisecond))
		}
		if !w.await(wait, tick) {
			continue
		}
		if why := w.look(); why != brokenNot {
			return why
		}
	}
}

// await waits until something has changed, and reports whether it is time to look at the rest.
func (w *owner) await(wait time.Duration, tick *time.Ticker) bool {
	var timer <-chan time.Time
	if wait < ownerTick {
		t := time.NewTimer(wait)
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-w.o.wake:
	case <-timer:
	case <-tick.C:
		return true
	case <-w.bus.conn.Ctx.Done():
	}
	return false
}

// arrived counts the events of the stream that are here, up to the newest one that the server has
// given out when it counted: those that it sends after that stand for none of the others.
func (w *owner) arrived(newest uint64) (n int) {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	w.locks.Each(func(i *ordered.Item[*Delivery]) {
		if i.Body != nil && i.Pos()&mainPlace != 0 && i.Pos()&^mainPlace <= newest {
			n++
		}
	})
	return n
}

// room leaves room for events that are missing, whatever came before them.
func (w *owner) room(missing int) {
	s := w.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if most := min(len(s.out)+missing, native.MaxAckPending); most > s.opts.MaxInFlight {
		s.opts.MaxInFlight = most
		s.refillSoon(s.bus.clock.Now())
	}
}

// gather ends the time in which nothing is lent, once all that the server waits for is here. Until
// then an older event of a key may still be at the server. It reports whether something arrived.
func (w *owner) gather(late bool) (more bool) {
	ctx, cancel := context.WithTimeout(w.bus.conn.Ctx, records.NoteWait)
	defer cancel()
	info, err := w.bus.records.Consumer(ctx, w.group.topic, w.group.consumer)
	if err != nil {
		if gone(err) {
			w.broke(brokenGone)
		}
		return false
	}
	w.takeIn() // what the server sent before it answered is mostly here
	here := int(w.group.letters.Load()) + w.arrived(info.Delivered.Stream)
	missing := max(info.NumAckPending-here, 0)
	w.missing.Store(int64(missing))
	w.room(missing)
	more, w.here = here > w.here, here
	if missing > 0 && (more || !late) {
		return more
	}
	if late && here < info.NumAckPending {
		w.bus.often.Log(w.bus.conn.Ctx, slog.LevelWarn, "an ordered group goes on before all was delivered again that was not settled", w.group.source(), slog.String("topic", w.group.topic.Name),
			slog.String("group", w.group.name), slog.Int("missing", info.NumAckPending-here))
	}
	w.missing.Store(0)
	w.o.mu.Lock()
	w.gathering = false
	w.o.mu.Unlock()
	return more
}
