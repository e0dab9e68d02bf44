package jetstream

import (
	"context"
	"encoding/json"
	"log/slog"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// host is the session of this hub with the hub that owns a group: see guest.go.
type host struct {
	o    *orderedGroup
	link *conn.Link
	data string // the subject for what the owner sends
	to   string // the subject for what is said to it
	sub  *nats.Subscription

	until atomic.Int64 // until when what was lent may be settled
	over  atomic.Bool  // the session is to end
	mute  atomic.Bool  // the owner was told that it has ended

	receiving sync.Mutex   // while a message of the owner is taken
	open      atomic.Int64 // events that were lent and about which nothing was said

	sending sync.Mutex // keeps the numbers in order
	said    uint64
	acks    []byte // loans whose acknowledgement is to be said; at most ackBytes and one more
	acking  chan struct{}

	got atomic.Uint64 // how much the owner has sent that arrived

	parts []byte // of what is too large for one message; used by receive only

	numbers map[string]uint64 // of places, by id; guarded by the ordering's mu
	places  map[uint64]*spot  // by number; so guarded, too
	next    uint64
}

// ackBytes is how many bytes of acknowledgements are said at a time.
const ackBytes = 4 << 10

// lendMost bounds an event, and the events before it, that an owner sends in parts.
const lendMost = 128 << 20

// visit has the members of this hub served by the owner of the group, for as long as that goes.
// ended says that there was a session.
func (o *orderedGroup) visit(e *ownership) (ended bool, err error) {
	b := o.bus
	ctx, cancel := context.WithTimeout(b.conn.Ctx, forwardWait)
	defer cancel()
	if err := b.handles.keys.ensure(ctx); err != nil {
		return false, err
	}
	h := &host{o: o, link: b.conn.Link(), data: privateInbox(), numbers: make(map[string]uint64), places: make(map[uint64]*spot), acking: make(chan struct{}, 1)}
	for range b.conn.Links {
		if h.link.Up.Load() {
			break
		}
		h.link = b.conn.Link()
	}
	if h.sub, err = h.link.NC.Subscribe(h.data+".>", h.receive); err != nil {
		return false, nil // the connection is down
	}
	defer func() { _ = h.sub.Unsubscribe() }() // fails only when the connection is closed
	if err := h.sub.SetPendingLimits(-1, -1); err != nil {
		return false, nil // the same
	}
	hello, err := json.Marshal(guestHello{Group: o.key, Hub: b.handles.hub, Data: h.data, Made: time.Now().UnixNano()})
	if err != nil {
		return false, err
	}
	cuts, sent := h.link.Cuts.Load(), b.clock.Now()
	reply, err := o.askFor(ctx, h.link, e, b.handles.signed(hello))
	var answer guestWelcome
	if err != nil || conn.NoResponders(reply) || json.Unmarshal(reply.Data, &answer) != nil || answer.Subject == "" {
		return false, nil // it is gone, or not the owner yet or any more
	}
	h.to = answer.Subject
	h.until.Store(sent + int64(answer.Left))
	o.mu.Lock()
	o.host = h
	for _, p := range o.seats {
		h.tellSeat(p)
	}
	o.mu.Unlock()
	var acking sync.WaitGroup
	acking.Go(h.sayAcks)
	h.serve(cuts)
	h.end()
	close(h.acking) // nothing is said any more
	acking.Wait()
	return true, nil
}

// askFor asks the hub of an entry for a session. It stops waiting once the entry has changed: a hub
// that shuts down may take the question and not answer.
func (o *orderedGroup) askFor(ctx context.Context, l *conn.Link, e *ownership, hello []byte) (*nats.Msg, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	o.mu.Lock()
	o.asked, o.unask = e.revision, cancel
	if e.revision < o.changed {
		cancel()
	}
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.asked, o.unask = 0, nil
		o.mu.Unlock()
	}()
	return l.Request(ctx, hubInbox+e.Hub+hostSubject, hello)
}

// serve asks the owner to keep the session, until it ends.
func (h *host) serve(cuts uint64) {
	o, b := h.o, h.o.bus
	// Most of the right is left when an answer is late, for hubs and servers may stand still for
	// half of the stall limit.
	every := max(guestRight(&o.group.fence)/5, 10*time.Millisecond)
	var asking, answered atomic.Bool
	var expected atomic.Uint64 // how much the owner had sent at its last answer
	var next int64
	for {
		now := b.clock.Now()
		switch {
		case h.over.Load() || b.conn.Ctx.Err() != nil || h.link.Cuts.Load() != cuts || now >= h.until.Load() || b.clock.Stalled(now):
			return
		case !h.needed():
			return
		case now >= next && !asking.Load():
			if answered.Load() && h.got.Load() < expected.Load() {
				return // something was lost on the way
			}
			next = now + int64(every)
			asking.Store(true)
			h.ask(guestPing, now, func(pong *guestPong) {
				defer asking.Store(false)
				if pong == nil {
					return
				}
				if pong.Over {
					h.over.Store(true)
					o.kick()
					return
				}
				expected.Store(pong.Sent)
				answered.Store(true)
				h.until.Store(max(h.until.Load(), now+int64(pong.Left)))
			})
		}
		o.rest(min(every, max(time.Duration(next-now), time.Millisecond)))
	}
}

// needed reports whether the group has members on this hub.
func (h *host) needed() bool {
	h.o.mu.Lock()
	defer h.o.mu.Unlock()
	return len(h.o.seats) > 0
}

// ask says something that is answered, and calls then with the answer; nil: there was none.
func (h *host) ask(op byte, now int64, then func(*guestPong)) {
	h.sending.Lock()
	defer h.sending.Unlock()
	h.sayAcksLocked()
	h.said++
	msg := &nats.Msg{Subject: h.to, Data: append(strconv.AppendUint(nil, h.said, 10), ' ', op)}
	err := h.link.AskUntil(msg, now+int64(records.NoteWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
		var pong guestPong
		switch {
		case err != nil:
			then(nil)
		case conn.NoResponders(reply):
			then(&guestPong{Over: true}) // the owner is gone
		case json.Unmarshal(reply.Data, &pong) != nil:
			then(nil)
		default:
			then(&pong)
		}
	}))
	if err != nil {
		then(nil)
	}
}

// say says something about a loan or a place.
func (h *host) say(op byte, id uint64, tail []byte) {
	h.sending.Lock()
	defer h.sending.Unlock()
	h.sayAcksLocked()
	h.said++
	var buf [96]byte
	b := append(strconv.AppendUint(buf[:0], h.said, 10), ' ', op, ' ')
	b = strconv.AppendUint(b, id, 10)
	if len(tail) > 0 {
		b = append(append(b, ' '), tail...)
	}
	// An error means that the connection is down, and the session with it.
	_ = h.link.NC.Publish(h.to, b)
}

// acked says that an event was acknowledged, along with others that are at this moment.
func (h *host) acked(loan uint64) {
	h.sending.Lock()
	defer h.sending.Unlock()
	first := len(h.acks) == 0
	if !first {
		h.acks = append(h.acks, ',')
	}
	h.acks = strconv.AppendUint(h.acks, loan, 10)
	switch {
	case len(h.acks) >= ackBytes:
		h.sayAcksLocked()
	case first && !h.mute.Load(): // else h.acking is closed soon, or was
		select {
		case h.acking <- struct{}{}:
		default:
		}
	}
}

// sayAcks says what was acknowledged, until the session has ended.
func (h *host) sayAcks() {
	for range h.acking {
		runtime.Gosched() // others may follow
		h.sending.Lock()
		h.sayAcksLocked()
		h.sending.Unlock()
	}
}

func (h *host) sayAcksLocked() {
	if len(h.acks) == 0 {
		return
	}
	h.said++
	b := append(strconv.AppendUint(make([]byte, 0, 24+len(h.acks)), h.said, 10), ' ', loanAcked, ' ')
	_ = h.link.NC.Publish(h.to, append(b, h.acks...)) // as in say
	h.acks = h.acks[:0]
}

// tellSeat describes a place. The ordering's mu is held, here and below.
func (h *host) tellSeat(p *spot) {
	if h.numbers[p.id] == 0 {
		h.next++
		h.numbers[p.id], h.places[h.next] = h.next, p
	}
	state, err := json.Marshal(guestPlaceState{ID: p.id, Open: p.open, Credit: p.credit, Had: p.had})
	if err == nil {
		h.say(guestSeat, h.numbers[p.id], state)
	}
}

func (h *host) tellMore(p *spot, more int) {
	h.say(guestMore, h.numbers[p.id], strconv.AppendInt(nil, int64(more), 10))
}

func (h *host) tellLeft(p *spot) {
	h.say(guestLeft, h.numbers[p.id], nil)
	delete(h.places, h.numbers[p.id])
	delete(h.numbers, p.id)
}

// ended takes the end of a loan of the owner.
func (h *host) ended(l *loan, how loanEnd) {
	defer h.open.Add(-1)
	if h.mute.Load() || !l.usable(h.o.bus.clock.Now()) {
		return
	}
	if how.What == loanAcked {
		h.acked(l.number)
		return
	}
	var tail []byte
	if how.Delay != 0 || how.Reason != "" || how.Client != "" {
		how.Reason = native.ShortReason(how.Reason)
		tail, _ = json.Marshal(how) // strings and numbers
	}
	h.say(how.What, l.number, tail)
}

// receive takes what the owner sends.
func (h *host) receive(m *nats.Msg) {
	h.receiving.Lock()
	defer h.receiving.Unlock()
	what := m.Subject[len(h.data)+1:]
	if what == "q" {
		h.recall(m)
		return
	}
	n, err := strconv.ParseUint(m.Reply, 10, 64)
	if err != nil || h.over.Load() {
		return
	}
	if n != h.got.Load()+1 {
		h.over.Store(true) // something was lost on the way
		h.o.kick()
		return
	}
	h.got.Store(n)
	switch what {
	case "c":
		h.heard(m.Data)
	case "p":
		if len(h.parts)+len(m.Data) > lendMost {
			h.over.Store(true)
			h.o.kick()
			return
		}
		h.parts = append(h.parts, m.Data...)
	case "b":
		data := m.Data
		if len(h.parts) > 0 {
			data = append(h.parts, data...)
			h.parts = nil
		}
		h.lent(data)
	}
}

// heard takes news of the owner.
func (h *host) heard(data []byte) {
	var n hostNews
	if json.Unmarshal(data, &n) != nil {
		return
	}
	t, p := h.seat(n.Place)
	switch {
	case t == nil:
	case n.Epoch > 0:
		if n.Slots == nil {
			n.Slots = []int{}
		}
		h.o.mu.Lock()
		p.had = n.Slots
		h.o.mu.Unlock()
		t.assigned(n.Slots, n.Epoch)
	case n.Revoke > 0:
		h.open.Add(-int64(t.revokeLoan(h, n.Revoke)))
	}
}

// seat returns the place of a number.
func (h *host) seat(number uint64) (*seat, *spot) {
	h.o.mu.Lock()
	defer h.o.mu.Unlock()
	p := h.places[number]
	if p == nil {
		return nil, nil
	}
	t, _ := p.borrower.(*seat)
	return t, p
}

// lent takes events that the owner lends. Those of one place follow each other.
func (h *host) lent(data []byte) {
	r := lendings{left: data}
	var lent []lending
	to := uint64(0)
	for len(r.left) > 0 {
		l, number, place, err := r.next(h.o.group)
		if err != nil {
			h.over.Store(true) // a hub of another version
			h.o.kick()
			break
		}
		l.loan = &loan{from: h, number: number, right: &h.until}
		h.open.Add(1)
		if place != to {
			h.give(to, lent)
			to, lent = place, nil
		}
		lent = append(lent, l)
	}
	h.give(to, lent)
}

// give gives events to the place that they are for.
func (h *host) give(place uint64, lent []lending) {
	if len(lent) == 0 {
		return
	}
	t, p := h.seat(place)
	if t != nil {
		h.o.mu.Lock()
		p.credit = max(p.credit-len(lent), 0)
		h.o.mu.Unlock()
		if t.accept(lent) {
			return
		}
	}
	for i := range lent {
		lent[i].loan.end(loanEnd{What: loanBack})
	}
}

// recall has the session ended: the owner gives the group up.
func (h *host) recall(m *nats.Msg) {
	h.over.Store(true)
	_ = m.Respond([]byte("{}")) // fails only when the connection is down
	h.o.kick()
}

// revoke ends all that the owner has lent. What nobody has had is given back.
func (h *host) revoke() {
	h.o.mu.Lock()
	seats := make([]*seat, 0, len(h.o.seats))
	for _, p := range h.o.seats {
		if t, ok := p.borrower.(*seat); ok {
			seats = append(seats, t)
		}
	}
	h.o.mu.Unlock()
	for _, t := range seats {
		n, unseen := t.revoke(h)
		h.open.Add(-int64(n))
		if now := h.o.bus.clock.Now(); now < h.until.Load() {
			for _, l := range unseen {
				h.say(loanBack, l.number, nil)
			}
		}
	}
}

// saying is how long the end of a session waits for members that have just settled an event.
const saying = 100 * time.Millisecond

// end ends the session: nothing of it is settled any more, and the owner is told so.
func (h *host) end() {
	o, b := h.o, h.o.bus
	h.receiving.Lock() // what is lent from now on is not taken
	h.over.Store(true)
	h.receiving.Unlock()
	h.revoke()
	for end := b.clock.Now() + int64(saying); h.open.Load() > 0 && b.clock.Now() < end; {
		<-time.After(time.Millisecond) // what was settled is on its way to ended
	}
	h.sending.Lock()
	h.mute.Store(true)
	h.sending.Unlock()
	o.mu.Lock()
	o.host = nil
	o.mu.Unlock()
	done := make(chan struct{})
	h.ask(guestLeave, b.clock.Now(), func(*guestPong) { close(done) })
	select {
	case <-done:
	case <-time.After(records.NoteWait):
	}
	b.log.Debug("the session with the owner of an ordered group has ended", slog.String("topic", o.group.topic.Name), slog.String("group", o.group.name))
	// it may have ended because the consumer is gone
	for _, s := range b.groups.membersOf(o.group) {
		s.mu.Lock()
		for _, m := range s.members {
			if m.group == o.group && m.seat != nil {
				m.verify(o.group)
			}
		}
		s.mu.Unlock()
	}
}
