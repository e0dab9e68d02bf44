package jetstream

import (
	"context"
	"log/slog"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Pulls: a pull ends at the server after pullExpires, and is taken for lost after pullLost.
const (
	pullExpires = 30 * time.Second
	pullLost    = 35 * time.Second
	pullRetry   = 250 * time.Millisecond
	// heldRetry is how long a subscription waits when the hub holds too much.
	heldRetry = 100 * time.Millisecond
	// leastPull is the fewest bytes that a pull asks for, however many subscriptions share Limits.HeldTotal.
	leastPull = 16 << 10
)

// member is a subscription on one topic: it pulls from the group's consumer. Guarded by its subscription's mu.
type member struct {
	sub   *Subscription
	group *group
	obs   GroupObserver

	inbox     *inbox // nil while closed
	opened    uint64 // how many inboxes there were
	requested int    // asked and not arrived
	pulled    int64  // when the last pull was sent
	first     bool   // nothing has arrived since
	large     bool   // the next event does not fit into a pull of the usual size
	retryAt   int64  // pull again then; 0: when there is credit
	lastSeq   uint64 // newest stream sequence that arrived
	// loose are the events that arrived and ended otherwise than by an ack: they come again, to whichever member. It is
	// bounded; loosest is the oldest of those that found no room.
	loose     map[uint64]struct{}
	loosest   uint64
	acks      string // what its ack subjects begin with; "" before the first
	attaching bool
	movedAt   uint64 // the newest revision of the group's pointer that came up meanwhile
}

// inbox is where pulls are answered to. Each is used until the subscription pauses, ends, or forgets what it had.
type inbox struct {
	m         *member
	group     *group
	subject   string
	number    uint64 // among the member's, from 1
	sub       *nats.Subscription
	forgotten bool // what still comes is not ours to touch; otherwise it is given back
}

// open makes the inbox.
func (m *member) open() {
	if m.inbox != nil || m.attaching {
		return
	}
	m.opened++
	in := &inbox{m: m, group: m.group, subject: m.sub.link.nc.NewInbox(), number: m.opened}
	sub, err := m.sub.link.nc.Subscribe(in.subject, in.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // bounded by what was asked for
	}
	if err != nil {
		m.sub.bus.log.Warn("no inbox for a group", slog.String("topic", m.group.topic.name), slog.Any("error", err))
		return
	}
	in.sub, m.inbox, m.requested, m.retryAt = sub, in, 0, 0
	if m.group.ttl > 0 {
		m.sub.schedule(m.sub.bus.clock.now() + int64(m.group.ttl/3))
	}
}

// close ends the inbox. Gracefully, what is under way is given back when it arrives; otherwise it is forgotten.
func (m *member) close(gracefully bool) {
	if m.inbox == nil {
		return
	}
	m.sub.requested -= m.requested
	m.requested = 0
	in := m.inbox
	m.inbox = nil
	if gracefully {
		_ = in.sub.Drain() // fails only when the connection is closed
		return
	}
	in.forgotten = true
	_ = in.sub.Unsubscribe() // the same
}

func (s *Subscription) closeInboxes() {
	for _, m := range s.members {
		m.close(true)
	}
}

// refill asks the server for as much as there is credit for. s.mu is held.
func (s *Subscription) refill() {
	if !s.running() {
		return
	}
	if s.heldBytes >= s.bus.limits.HeldBytes {
		s.bus.obs.LimitReached("held_bytes")
		return
	}
	now := s.bus.clock.now()
	// Who holds nothing may always ask for its share, so that those who do not take what is theirs stop nobody else.
	if s.heldBytes > 0 && s.bus.held.Load() >= int64(s.bus.limits.HeldTotal) {
		s.bus.obs.LimitReached("held_total")
		s.schedule(now + int64(heldRetry))
		return
	}
	for _, m := range s.members {
		m.refill(now)
	}
}

func (m *member) refill(now int64) {
	s := m.sub
	if m.inbox == nil || m.retryAt > now {
		return
	}
	free := s.opts.MaxInFlight - s.active - len(s.parked) - s.requested
	want := free
	if n := len(s.members); n > 1 {
		// Each topic gets its share, and one that has nothing asked for gets at least one: what then arrives beyond
		// MaxInFlight is parked.
		want = free / n
		if want < 1 && m.requested == 0 && s.active < s.opts.MaxInFlight {
			want = 1
		}
	}
	batch := min(want, s.opts.BatchSize)
	if batch < 1 || m.requested > 0 && (m.requested > s.opts.BatchSize/2 || batch < s.opts.BatchSize/2) {
		return
	}
	m.pull(batch, now)
}

func (m *member) pull(batch int, now int64) {
	s := m.sub
	bytes := s.bus.pullBytes()
	if m.large {
		batch, bytes = 1, int(s.link.nc.MaxPayload())+payloadMargin
	}
	var buf [128]byte
	req := strconv.AppendInt(append(buf[:0], `{"expires":`...), int64(pullExpires), 10)
	req = strconv.AppendInt(append(req, `,"batch":`...), int64(batch), 10)
	req = strconv.AppendInt(append(req, `,"max_bytes":`...), int64(bytes), 10)
	req = append(req, '}')
	if err := s.link.nc.PublishRequest(m.group.next, m.inbox.subject, req); err != nil {
		return // the connection is down: back() starts anew
	}
	m.requested += batch
	s.requested += batch
	m.pulled, m.first, m.retryAt = now, true, 0
	s.schedule(now + int64(pullLost))
}

// pullBytes is the most that one pull may bring: a subscription's share of what the hub may hold.
func (b *Bus) pullBytes() int {
	share := b.limits.HeldTotal / int(max(b.subCount.Load(), 1))
	return min(max(share, leastPull), b.limits.HeldBytes)
}

// receive takes what the server sends to the inbox: events, and the ends of pulls.
func (in *inbox) receive(msg *nats.Msg) {
	if msg.Reply == "" {
		in.status(msg)
		return
	}
	m := in.m
	s := m.sub
	now := s.bus.clock.now()
	place, ok := parseAckSubject(msg.Reply)
	if !ok || s.bus.clock.stalled(now) {
		return // it may have waited in a buffer for too long to be ours still
	}
	d := newDelivery(in, msg, place, now)
	wanted := s.opts.Filter == nil || s.opts.Filter(&d.Event)

	s.mu.Lock()
	if m.inbox != in {
		forgotten := in.forgotten
		s.mu.Unlock()
		if !forgotten {
			d.send(nakNow)
		}
		return
	}
	m.requested = max(m.requested-1, 0)
	s.requested = max(s.requested-1, 0)
	m.lastSeq = max(m.lastSeq, place.streamSeq)
	delete(m.loose, place.streamSeq)
	m.acks = msg.Reply[:place.prefix]
	m.large = false
	if m.first {
		m.first = false
		m.obs.Polled(time.Duration(now - m.pulled))
	}
	if !wanted {
		s.refill()
		s.mu.Unlock()
		d.send(ackNow)
		return
	}
	s.hold(d)
	park := s.active >= s.opts.MaxInFlight || len(s.parked) > 0
	if park {
		s.parked = append(s.parked, d)
	} else {
		s.active++
		d.active = true
	}
	s.refill()
	s.mu.Unlock()
	if !park {
		s.hand(d)
	}
}

// hand gives a delivery to the handler.
func (s *Subscription) hand(d *Delivery) {
	s.deliver.Lock()
	defer s.deliver.Unlock()
	if !s.ended.Load() {
		s.handler(d)
	}
}

// status takes the end of a pull.
func (in *inbox) status(msg *nats.Msg) {
	m := in.m
	s := m.sub
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.inbox != in {
		return
	}
	left, _ := strconv.Atoi(msg.Header.Get("Nats-Pending-Messages"))
	switch code, what := msg.Header.Get("Status"), msg.Header.Get("Description"); {
	case code == "408", code == "404", what == "Batch Completed", what == "Message Size Exceeds MaxBytes":
		m.large = m.first && what == "Message Size Exceeds MaxBytes" // not even the first one fits
		m.requested = max(m.requested-left, 0)
		s.requested = max(s.requested-left, 0)
		s.refill()
	case what == "Consumer Deleted":
		m.reattach(true)
	case code == "503": // it is gone, or has no leader now
		m.again(s.bus.clock.now() + int64(pullRetry))
		m.verify(in.group)
	case code == "100":
	default:
		// Leadership change, server shutdown, too many waiting pulls: ask again soon, from a clean slate.
		s.bus.log.Debug("a pull ended early", slog.String("topic", m.group.topic.name), slog.String("status", what))
		m.again(s.bus.clock.now() + int64(pullRetry))
	}
}

// again gives up the pulls under way and asks anew at the given time.
func (m *member) again(at int64) {
	m.close(true)
	m.open()
	m.retryAt = at
	m.sub.schedule(at)
}

// verify looks whether the consumer still exists, after an answer that nobody listens, and joins the group anew if not.
// s.mu is held.
func (m *member) verify(g *group) {
	s := m.sub
	if s.stopped || m.attaching || m.group != g {
		return
	}
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, publishWait)
		defer cancel()
		if _, err := s.bus.consumer(ctx, g.topic, g.consumer); !gone(err) {
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if m.group == g {
			m.reattach(true)
		}
	})
}

// reattach joins the group anew after its consumer was moved by a seek, or deleted. What was leased from the old one is
// dropped silently: its acks would find no consumer. s.mu is held.
func (m *member) reattach(deleted bool) {
	s := m.sub
	if m.attaching || s.stopped {
		return
	}
	m.attaching, m.movedAt = true, 0
	was, start := m.group.topic.stream, m.resumeAt()
	var dead *group
	if deleted {
		dead = m.group
	}
	m.close(false)
	s.drop(func(d *Delivery) bool { return d.m == m })
	s.wg.Go(func() {
		for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
			g, err := m.rejoin(was, start, dead)
			s.mu.Lock()
			if err == nil || s.stopped {
				if err == nil {
					if g.consumer != m.group.consumer || !g.topic.stream.created.Equal(was.created) {
						// It was moved, or all is new: what this member saw says nothing of it.
						m.lastSeq, m.loosest, m.acks = 0, 0, ""
						clear(m.loose)
					}
					m.group = g
				}
				m.attaching = false
				if m.movedAt > m.group.revision {
					m.reattach(false) // it was moved once more meanwhile
				} else if s.running() {
					m.open()
					s.refill()
				}
				s.mu.Unlock()
				return
			}
			s.mu.Unlock()
			s.bus.log.Warn("a group cannot be joined again yet", slog.String("topic", m.group.topic.name), slog.Any("error", err))
			select {
			case <-time.After(wait):
			case <-s.ctx.Done():
				return
			}
		}
	})
}

func (m *member) rejoin(was *stream, start uint64, dead *group) (*group, error) {
	ctx, cancel := context.WithTimeout(m.sub.ctx, publishWait)
	defer cancel()
	return m.sub.bus.join(ctx, m.group.topic.name, m.sub.group, m.group.ttl, "", func(_ context.Context, t *topicInfo, state natsjs.StreamState) (uint64, error) {
		if !t.stream.created.Equal(was.created) {
			return 1, nil // the stream was made anew, too: all that is in it is new
		}
		return min(start, state.LastSeq+1), nil
	}, dead)
}

// noEvent is the subject of an ack about no event: the consumer answers it, and takes it for a sign of life. s.mu is held.
func (m *member) noEvent() string {
	prefix := m.acks
	if prefix == "" {
		prefix = "$JS.ACK." + m.group.topic.stream.name + "." + m.group.consumer + "."
	}
	return prefix + "1.9223372036854775807.1.0.0"
}

// maxLoose bounds member.loose.
const maxLoose = 10_000

// loosen notes that an event will come again.
func (m *member) loosen(seq uint64) {
	if m.loose == nil {
		m.loose = make(map[uint64]struct{})
	}
	switch {
	case len(m.loose) < maxLoose:
		m.loose[seq] = struct{}{}
	case m.loosest == 0 || seq < m.loosest:
		m.loosest = seq
	}
}

// resumeAt is the sequence at which the group goes on if its consumer was deleted: that of the oldest event that this
// member knows to be unsettled, or behind the newest that it saw. What other members had unsettled they bring back
// only if they are the first to join again.
func (m *member) resumeAt() uint64 {
	if m.lastSeq == 0 {
		return m.group.start
	}
	next := m.lastSeq + 1
	if m.loosest > 0 {
		next = min(next, m.loosest)
	}
	for seq := range m.loose {
		next = min(next, seq)
	}
	for _, d := range m.sub.out {
		if d.m == m {
			next = min(next, d.Event.Sequence)
		}
	}
	return next
}
