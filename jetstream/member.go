package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Pulls: a pull ends at the server after pullExpires, and is taken for lost pullSlack later. In a
// cluster, where the inbox of a subscription that pauses or ends must outlive its pulls, they are
// shorter.
const (
	pullExpires        = 30 * time.Second
	pullExpiresCluster = 10 * time.Second
	pullSlack          = 5 * time.Second
	pullRetry          = 250 * time.Millisecond
	// heldRetry is how long a subscription waits when the hub holds too much.
	heldRetry = 100 * time.Millisecond
	// arrivalWait is how long resumeAt waits for a moment in which no event arrives.
	arrivalWait = 200 * time.Millisecond
	// minPull is the fewest bytes that a pull asks for, however many subscriptions share
	// Limits.HeldTotal.
	minPull = 16 << 10
)

// member is a subscription on one topic: it pulls from the group's consumer. Guarded by its
// subscription's mu.
type member struct {
	sub   *Subscription
	group *group
	obs   event.GroupObserver
	seat  *seat   // of an ordered group; nil: it pulls
	main  *member // of a member of a queue of what was put back: the one that it belongs to
	queue string  // of what was put back to the group, if anything was

	lively bool // of a queue: something has come since the last pull that ended in vain

	inbox     *inbox // nil while closed
	opened    uint64 // how many inboxes there were
	requested int    // asked and not arrived
	pulls     int    // that have not ended, those of inboxes that linger included
	pulled    int64  // when the last pull was sent
	lost      int64  // when it has surely ended
	first     bool   // nothing has arrived since
	waits     int64  // since when pulls wait and nothing arrives; 0: not
	large     bool   // the next event does not fit into a pull of the usual size
	retryAt   int64  // pull again then; 0: when there is credit
	attaching bool
	verifying bool
	movedAt   uint64 // the newest revision of the group's generation that came up meanwhile

	// arrived in a cluster long after they were stored: the server is to be told of them
	fresh []*Delivery
}

// inbox is where pulls are answered to. Each is used until the subscription pauses, ends, or
// forgets what it had.
//
// In a cluster, what the consumer's leader sends to an inbox that was just unsubscribed is dropped
// at the route, and waits out AckWait. There a closed inbox lingers until its pulls have ended;
// what still comes goes to another member, or is given back.
type inbox struct {
	m         *member
	group     *group
	subject   string
	number    uint64 // among the member's, from 1
	sub       *nats.Subscription
	forgotten bool  // what still comes is not ours to touch; otherwise it is given back
	pulls     int   // that have not ended
	left      int   // while it lingers: asked and not arrived
	until     int64 // when its pulls have ended at the latest
}

// open makes the inbox.
func (m *member) open() {
	if m.ordered() {
		m.openSeat()
		return
	}
	if m.inbox != nil || m.attaching {
		return
	}
	m.opened++
	in := &inbox{m: m, group: m.group, subject: m.sub.link.NC.NewInbox(), number: m.opened}
	sub, err := m.sub.link.NC.Subscribe(in.subject, in.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // bounded by what was asked for
	}
	if err != nil {
		m.sub.bus.often.Log(m.sub.bus.conn.Ctx, slog.LevelWarn, "failed to subscribe to an inbox for a group; it is tried again when the connection is back", m.group.source(),
			slog.String("topic", m.group.topic.Name), slog.Any("error", err))
		return
	}
	in.sub, m.inbox, m.requested, m.retryAt = sub, in, 0, 0
	if m.group.timeToLive() > 0 {
		m.sub.schedule(m.sub.bus.clock.Now() + int64(m.group.timeToLive()/3))
	}
}

// close ends the inbox. Gracefully, what is under way is given back when it arrives; otherwise it
// is forgotten.
func (m *member) close(gracefully bool) {
	if m.seat != nil {
		m.closeSeat()
		return
	}
	if m.inbox == nil {
		return
	}
	in := m.inbox
	m.waits = 0
	in.left = m.requested
	m.sub.requested -= m.requested
	m.requested = 0
	m.sub.opts.Holder.reserve(m.sub)
	m.inbox = nil
	switch {
	case !gracefully:
		in.forgotten = true
		in.ended(in.pulls)
		_ = in.sub.Unsubscribe() // fails only when the connection is closed
	case in.left > 0 && m.sub.link.Clustered() && m.sub.bus.lingering.linger(in, m.lost):
	default:
		in.ended(in.pulls)
		_ = in.sub.Drain() // the same
	}
}

// ended counts pulls that have ended. s.mu is held.
func (in *inbox) ended(n int) {
	n = min(n, in.pulls)
	in.pulls -= n
	in.m.pulls -= n
}

// arrived counts what came to an inbox that lingers, and ends it with its last pull. s.mu is held.
func (in *inbox) arrived(n int) {
	if in.left -= n; in.left <= 0 && in.until > 0 {
		in.ended(in.pulls)
		in.m.sub.bus.lingering.endLingering(in)
	}
}

func (s *Subscription) closeInboxes() {
	for _, m := range s.members {
		m.close(true)
	}
}

// refill asks the server for as much as there is credit for. s.mu is held.
func (s *Subscription) refill() { s.refillAt(s.bus.clock.Now()) }

// refillAt is refill for callers that have just read the clock.
func (s *Subscription) refillAt(now int64) {
	defer s.opts.Holder.reserve(s)
	if !s.running() {
		return
	}
	if s.heldBytes >= s.bus.limits.HeldBytes && s.keeper.waits() == 0 {
		s.bus.obs.LimitReached("held_bytes")
		return
	}
	// Who holds nothing may always ask for its share, so that those who do not take what is theirs
	// stop nobody else.
	if s.heldBytes > 0 && s.keeper.waits() == 0 && s.bus.subscriptions.held.Load() >= int64(s.bus.limits.HeldTotal) {
		s.bus.obs.LimitReached("held_total")
		s.schedule(now + int64(heldRetry))
		return
	}
	if s.heldBytes > 0 && s.opts.Holder.full() {
		s.schedule(now + int64(heldRetry))
		return
	}
	for _, m := range s.members {
		m.refill(now)
	}
}

func (m *member) refill(now int64) {
	s := m.sub
	if !m.listening() || m.retryAt > now {
		return
	}
	if s.keeper != nil && !s.bus.owners.mayPull(now) {
		s.schedule(now + int64(pullRetry))
		return
	}
	if s.bus.dead.crowded(m.group) {
		s.bus.obs.LimitReached("group_dead_letters")
		s.schedule(now + int64(heldRetry))
		return
	}
	if s.opts.Holder.room(s, 1) < 1 {
		return
	}
	free := s.opts.Holder.room(s, s.opts.MaxInFlight-s.active-len(s.parked)-s.requested)
	want := free
	if len(s.members) > 1 {
		// Each topic gets its share, and one that has nothing asked for gets at least one: what
		// then arrives beyond MaxInFlight is parked.
		if want = free / s.sharers(); m.idleQueue() {
			want = min(free, 1)
		}
		if want < 1 && m.requested == 0 && s.active < s.opts.MaxInFlight && !slices.ContainsFunc(s.parked, func(d *Delivery) bool { return d.m == m }) {
			want = 1
		}
	}
	batch := s.opts.Holder.fetchable(min(want, s.opts.BatchSize), s.requested)
	if batch < 1 || m.requested > 0 && (m.requested > s.opts.BatchSize/2 || batch < s.opts.BatchSize/2) {
		return
	}
	if m.seat != nil {
		m.more(batch)
		return
	}
	m.pull(batch, now)
}

func (m *member) pull(batch int, now int64) {
	s := m.sub
	bytes := s.bus.subscriptions.pullBytes()
	if m.large {
		batch, bytes = 1, int(s.link.NC.MaxPayload())+event.PayloadMargin
	}
	var buf [128]byte
	expires := pullWait(s.link)
	if s.keeper != nil {
		expires = s.bus.owners.pullTime()
	}
	req := strconv.AppendInt(append(buf[:0], `{"expires":`...), int64(expires), 10)
	req = strconv.AppendInt(append(req, `,"batch":`...), int64(batch), 10)
	req = strconv.AppendInt(append(req, `,"max_bytes":`...), int64(bytes), 10)
	req = append(req, '}')
	if err := s.link.NC.PublishRequest(m.group.next, m.inbox.subject, req); err != nil {
		return // the connection is down: back() starts anew
	}
	m.pulls++
	m.inbox.pulls++
	m.requested += batch
	s.requested += batch
	m.pulled, m.lost, m.first, m.retryAt = now, now+int64(expires+pullSlack), true, 0
	if m.waits == 0 {
		m.waits = now
	}
	s.schedule(m.lost)
}

// pullWait is how long a pull over the link waits at the server.
func pullWait(l *conn.Link) time.Duration {
	if l.Clustered() {
		return pullExpiresCluster
	}
	return pullExpires
}

// receive takes what the server sends to the inbox: events, and the ends of pulls.
func (in *inbox) receive(msg *nats.Msg) {
	if msg.Reply == "" {
		in.status(msg)
		return
	}
	m := in.m
	s := m.sub
	now := s.bus.clock.Now()
	meta, ok := conn.ParseAckSubject(msg.Reply)
	if !ok {
		return
	}
	d := newDelivery(in, msg, meta, now)
	// It may have waited in a buffer. What came before the answer to an echo was sent after the
	// echo was asked.
	d.touched = s.link.SentSince(now)
	var behind bool
	if s.keeper != nil && m.main == nil {
		s.keeper.saw(meta.Order)
	}
	var sent int64
	d.spared, d.knows, behind, sent = in.group.arrived(msg.Reply, &meta, now)
	d.touched = min(d.touched, sent)
	defer in.group.arriving.Add(-1)
	d.resolved = d.knows == known && d.letter.stream == ""
	d.before = in.group.past.attempts(meta.StreamSeq)
	d.Attempt = d.attempt(d.spared)
	if s.bus.clock.Stalled(now) {
		s.spare(d, false)
		return // it may have waited for too long to be ours still
	}
	if t := in.group.topic; t.Schemas && meta.Delivered == 1 {
		if !versioned(d.Event.Headers) {
			t.Obs.SchemaUnversioned()
		}
	}
	wanted, came := s.wants(d), incoming{now: now, sent: sent, storedAt: meta.StoredAt, behind: behind}

	s.mu.Lock()
	current := m.inbox == in
	if current {
		m.requested = max(m.requested-1, 0)
		s.requested = max(s.requested-1, 0)
	} else {
		in.arrived(1)
	}
	if in.forgotten {
		s.mu.Unlock()
		s.spare(d, false)
		return
	}
	if !current && (m.group != in.group || !s.running()) {
		if s.custody != nil {
			s.custody = append(s.custody, d)
			s.lastCame = now
			s.mu.Unlock()
			in.group.addUnsettled(meta.StreamSeq)
			return
		}
		s.mu.Unlock()
		if !in.bequeath(d, came) {
			d.bounced = true
			s.spare(d, true)
		}
		return
	}
	m.large, m.lively, m.waits = false, true, 0
	if m.requested > 0 {
		m.waits = now
	}
	if m.first {
		m.first = false
		m.obs.Polled(time.Duration(now - m.pulled))
	}
	m.take(d, wanted, came)
}

// wants reports whether the subscriber is to get the event: it is neither settled nor filtered.
func (s *Subscription) wants(d *Delivery) bool {
	return !native.Covered(d.group.past.settled, d.seq) && (s.opts.Filter == nil || s.opts.Filter(&d.Event))
}

// incoming is how a delivery came.
type incoming struct {
	now      int64
	sent     int64 // at the latest
	storedAt int64 // in the consumer's stream, in epoch nanoseconds
	behind   bool  // events may have been lost before it, and it waits until that is known
}

// take has the member hold a delivery. s.mu is held, and take releases it.
func (m *member) take(d *Delivery, wanted bool, came incoming) {
	s, now := m.sub, came.now
	if d.knows == settled {
		s.refillAt(now)
		s.mu.Unlock()
		d.tell(conn.AckNow) // no other member needs it either
		return
	}
	if now-came.sent >= int64(d.group.fence.usable) { // the server may have given it to another
		s.refillAt(now)
		s.mu.Unlock()
		d.group.tooLate(d)
		if s.keeper != nil {
			s.keeper.expect(d)
		}
		return
	}
	if !wanted {
		s.refillAt(now)
		s.mu.Unlock()
		d.tell(conn.AckNow)
		return
	}
	if came.behind {
		d.resolved, d.looking = false, true
	}
	s.hold(d)
	if s.link.Clustered() && s.bus.clock.At(now).UnixNano()-came.storedAt > int64(d.group.fence.usable-d.group.fence.touch)/2 {
		m.freshen(d)
	}
	direct := d.resolved && len(s.parked) == 0 && s.active < s.opts.MaxInFlight && s.opts.Holder.take(s)
	if direct {
		s.active++
		d.active = true
	} else {
		s.parked = append(s.parked, d)
	}
	s.refillAt(now)
	s.mu.Unlock()
	if s.keeper != nil && m.main != nil && !d.resolved {
		s.keeper.expect(d) // before what waits behind it is lent
	}
	switch {
	case direct:
		s.hand(d)
	case came.behind:
		d.group.await(d)
	case !d.resolved:
		d.resolve()
	}
}

// arrived notes a delivery to this hub, and returns how many before it reached no client, and how
// well that is known. behind says that events may have been lost before it, and that it waits until
// that is known. sent is when the server sent the delivery at the latest. The caller takes one off
// arriving when a member holds the event, or it is noted as unsettled.
func (g *group) arrived(reply string, p *conn.DeliveryMeta, now int64) (spared int, how knowledge, behind bool, sent int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.arriving.Add(1)
	g.track.arrived(p)
	if g.stuck.since != 0 {
		g.flowing("it gets events")
	}
	if w, lost := g.sight.arrived(p, now); lost {
		g.check(found{gap: w})
	}
	if len(g.acks) != p.Prefix || g.acks != reply[:p.Prefix] {
		g.acks = reply[:p.Prefix]
	}
	spared, how = g.known.arrived(p.StreamSeq, p.Delivered)
	return spared, how, g.checking, g.sent.arrived(p.Order, now, int64(g.fence.ackWait))
}

// tooLate takes note of a delivery that came when the event was not the hub's any more.
func (g *group) tooLate(d *Delivery) {
	g.bus.log.Debug("a delivery came too late", slog.String("topic", g.topic.Name), slog.String("group", g.name), slog.String("event", d.Event.ID))
	g.addUnsettled(d.seq)
	g.mu.Lock()
	defer g.mu.Unlock()
	g.watched = 0 // the server may count its deliveries from an older number
}

// resolve asks how often the event reached no client, or tells other hubs. Events that arrive
// meanwhile wait behind it. An event whose last attempt is over goes to the dead letters instead of
// the subscriber.
func (d *Delivery) resolve() {
	s := d.m.sub
	s.mu.Lock()
	asked := d.looking
	d.looking = true
	s.mu.Unlock()
	if asked {
		return
	}
	s.returning.TryAcquire(maxReturning)
	ask := d.lookUp
	switch d.knows {
	case forgotten:
		ask = d.tellForgotten
	case known:
		ask = d.tellKnown
	case unknown, settled:
	}
	resolved := func(n records.Note, sure bool) {
		defer s.returning.Release()
		s.mu.Lock()
		spared := n.Spared
		d.spared, d.resolved, d.failed, d.until = spared, true, n.Failed, n.Until
		d.Attempt = d.attempt(spared)
		ended, nak := d.unseen, d.unseenNak
		over := d.failed != nil && !ended && s.remove(d, event.DeadLettered)
		s.mu.Unlock()
		switch {
		case over:
			s.bus.dead.addFailed(d)
		case ended && sure:
			s.spare(d, nak)
		case ended && d.knows != forgotten:
			d.group.bus.records.KeepNote(records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: spared + 1, Until: n.Until}})
			if nak {
				d.sendInTime(conn.NakNow)
			}
		}
		s.advance()
	}
	began := s.bus.clock.Now()
	d.removeLetter(began, func() { ask(began, resolved) })
}

// tellKnown is lookUp where this hub had the delivery before.
func (d *Delivery) tellKnown(_ int64, then func(n records.Note, sure bool)) {
	d.m.sub.mu.Lock()
	n := records.Note{Spared: d.spared, Failed: d.failed, Until: d.until}
	d.m.sub.mu.Unlock()
	then(n, true)
}

// advance hands out what is parked, in the order of arrival, as far as there is credit.
func (s *Subscription) advance() {
	s.deliver.Lock()
	defer s.deliver.Unlock()
	for d := s.unpark(); d != nil; d = s.unpark() {
		if !s.ended.Load() {
			s.handler((*Held)(d))
		}
	}
}

// unpark returns the next delivery to hand out, or nil.
func (s *Subscription) unpark() *Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.parked) > 0 {
		d := s.parked[0]
		if d.index >= 0 && (!d.resolved || s.active >= s.opts.MaxInFlight || s.stopped || !s.opts.Holder.take(s)) {
			return nil
		}
		s.parked = s.parked[1:]
		if d.index >= 0 {
			d.active = true
			s.active++
			return d
		}
	}
	return nil
}

// freshen has the server told, along with others that arrive now, that a delivery is held. A
// consumer's new leader counts AckWait from the moment that the event was stored, and would give an
// old one to another member at once (nats-server 2.15.2; docs/upstream). s.mu is held.
func (m *member) freshen(d *Delivery) {
	s := m.sub
	m.fresh = append(m.fresh, d)
	if len(m.fresh) > 1 {
		return
	}
	s.wg.Go(func() {
		runtime.Gosched()
		now := s.bus.clock.Now()
		s.mu.Lock()
		fresh := m.fresh
		m.fresh = nil
		held := fresh[:0]
		for _, d := range fresh {
			if d.index >= 0 && !s.stopped {
				d.asked = now
				held = append(held, d)
			}
		}
		s.mu.Unlock()
		if len(held) > 0 {
			s.touch(held, now)
		}
	})
}

// hand gives deliveries to the handler.
func (s *Subscription) hand(ds ...*Delivery) {
	s.deliver.Lock()
	defer s.deliver.Unlock()
	for _, d := range ds {
		if !s.ended.Load() {
			s.handler((*Held)(d))
		}
	}
}

// status takes the end of a pull.
func (in *inbox) status(msg *nats.Msg) {
	m := in.m
	s := m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	left, _ := strconv.Atoi(msg.Header.Get("Nats-Pending-Messages"))
	if msg.Header.Get("Status") != "100" {
		in.ended(1)
	}
	if m.inbox != in {
		in.arrived(left)
		return
	}
	switch code, what := msg.Header.Get("Status"), msg.Header.Get("Description"); {
	case code == "408", code == "404", what == "Batch Completed", what == "Message Size Exceeds MaxBytes":
		m.large = m.first && what == "Message Size Exceeds MaxBytes" // not even the first one fits
		m.lively = m.lively && (!m.first || m.large)
		m.requested = max(m.requested-left, 0)
		s.requested = max(s.requested-left, 0)
		if s.refill(); m.requested == 0 {
			m.waits = 0
		}
	case what == "Consumer Deleted":
		m.reattach(true)
	case code == "503": // it is gone, or has no leader now
		in.group.doubtAcks()
		m.again(s.bus.clock.Now() + int64(pullRetry))
		m.verify(in.group)
	case code == "100":
	default:
		// Leadership change, server shutdown, too many waiting pulls: ask again soon, from a clean
		// slate.
		in.group.doubtAcks()
		s.bus.log.Debug("a pull ended early", slog.String("topic", m.group.topic.Name), slog.String("status", what))
		m.again(s.bus.clock.Now() + int64(pullRetry))
	}
}

// again gives up the pulls under way and asks again at the given time.
func (m *member) again(at int64) {
	m.close(true)
	m.open()
	m.retryAt = at
	m.sub.schedule(at)
}

// verify looks whether the consumer still exists, after an answer that nobody listens, and joins
// the group anew if not. s.mu is held.
func (m *member) verify(g *group) {
	s := m.sub
	if s.stopped || m.attaching || m.verifying || m.group != g {
		return
	}
	m.verifying = true
	s.wg.Go(func() {
		defer func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			m.verifying = false
		}()
		ctx, cancel := context.WithTimeout(s.ctx, conn.PublishWait)
		defer cancel()
		info, err := s.bus.records.Consumer(ctx, g.topic, g.consumer)
		if err == nil && native.ConsumerMade(info).Equal(g.created) || err != nil && !gone(err) {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if m.group == g {
			m.reattach(true)
		}
	})
}

// reattach joins the group again after its consumer was moved by a seek, or deleted. What was
// leased from the old one is dropped silently: its acks would find no consumer. s.mu is held.
func (m *member) reattach(deleted bool) {
	s := m.sub
	if m.attaching || s.stopped {
		return
	}
	if m.main != nil {
		m.requeue()
		return
	}
	if s.keeper != nil {
		s.keeper.broke(brokenGone)
		return
	}
	m.attaching, m.movedAt = true, 0
	old, was := m.group, m.group.topic.Stream
	m.close(false)
	s.drop(func(d *Delivery) bool { return d.m == m })
	m.leaveSeat()
	s.wg.Go(func() {
		start := s.bus.groups.resumeAt(old)
		for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
			g, queue, err := m.rejoin(was, start, deleted)
			if errors.Is(err, errGroupDeleted) {
				old.deleted.Store(true)
				s.opts.OnDeleted(old.topic.Name) // the member stays as it is until Stop
				return
			}
			if err == nil && !g.topic.Stream.Created.Equal(was.Created) {
				s.reset(m, old.topic.Name, "its stream was deleted and created again")
			}
			s.mu.Lock()
			if err == nil || s.stopped {
				if err == nil {
					s.bus.groups.addMember(g, s)
					m.group = g
				}
				m.attaching = false
				if err == nil {
					if !m.ordered() {
						m.takeQueue(queue)
					}
					m.takeSeat()
				}
				if m.movedAt > m.group.revision.Load() {
					m.reattach(false) // it was moved once more meanwhile
				} else if s.running() {
					m.open()
					s.refill()
				}
				s.mu.Unlock()
				if err == nil {
					s.bus.groups.unshare(old, s)
				}
				return
			}
			s.mu.Unlock()
			s.bus.often.Log(s.bus.conn.Ctx, slog.LevelWarn, "failed to join a group again; retrying", old.source(), slog.String("topic", old.topic.Name), slog.Any("error", err))
			select {
			case <-time.After(wait):
			case <-s.ctx.Done():
				return
			}
		}
	})
}

// reset tells the subscriber that the group had to start anew, and may have missed events.
func (s *Subscription) reset(m *member, topic, why string) {
	s.bus.often.Log(s.bus.conn.Ctx, slog.LevelWarn, "group starts anew and may have missed events", topic+"::"+s.group, slog.String("topic", topic), slog.String("group", s.group), slog.String("reason", why))
	m.obs.Reset()
	if s.opts.OnReset == nil {
		return
	}
	s.deliver.Lock()
	defer s.deliver.Unlock()
	if !s.ended.Load() {
		s.opts.OnReset(topic)
	}
}

// resumeAt is where a group goes on whose consumer was lost. An event that arrives meanwhile is in
// no member's hands at one moment, and not unsettled at the next, so resumeAt looks again until
// nothing arrives: for at most arrivalWait. After that it names the ack floor, behind which what
// was settled comes again.
func (r *groupRegistry) resumeAt(g *group) uint64 {
	for end := r.clock.Now() + int64(arrivalWait); ; {
		g.mu.Lock()
		before, arriving := g.track.arrivals, g.arriving.Load()
		g.mu.Unlock()
		oldest := r.oldestHeld(g)
		g.mu.Lock()
		at, safe := g.track.resumeAt(oldest), g.track.safe()
		quiet := arriving == 0 && g.track.arrivals == before
		g.mu.Unlock()
		switch {
		case quiet:
			return at
		case r.clock.Now() > end:
			return safe
		}
		<-time.After(time.Millisecond)
	}
}

// oldestHeld is the sequence of the oldest event that a member on this hub holds, or 0.
func (r *groupRegistry) oldestHeld(g *group) uint64 {
	oldest := uint64(0)
	for _, s := range r.membersOf(g) {
		s.mu.Lock()
		for _, d := range s.out {
			if d.group == g && (oldest == 0 || d.seq < oldest) {
				oldest = d.seq
			}
		}
		s.mu.Unlock()
	}
	return oldest
}

// rejoin also returns the group's queue.
func (m *member) rejoin(was *streams.Stream, start uint64, deleted bool) (*group, string, error) {
	ctx, cancel := context.WithTimeout(m.sub.ctx, conn.PublishWait)
	defer cancel()
	from := func(_ context.Context, t *streams.Topic, state natsjs.StreamState) (uint64, error) {
		if !t.Stream.Created.Equal(was.Created) {
			return 1, nil // the stream was created again, too: all that is in it is new
		}
		return min(start, state.LastSeq+1), nil
	}
	j := &joining{
		topic: m.group.topic.Name, group: m.sub.group, ttl: m.group.timeToLive(), start: from,
		was: m.group, gone: deleted, ends: m.sub.opts.OnDeleted != nil,
	}
	g, err := m.sub.bus.join(ctx, j)
	return g, j.queue, err
}
