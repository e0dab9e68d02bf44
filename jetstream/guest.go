package jetstream

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
)

// How an owner and a hub with members of its group, a guest, talk over NATS, without JetStream:
//
// The guest asks for a session at the inbox of the owner's hub, signed like a settlement
// (forward.go), and names a subject for what it is sent. The answer names the subject for what it
// says. Nobody can guess either (privateInbox), and native clients with the permissions of the hub
// reach neither. Each side numbers what it sends: a hole ends the
// session.
//
// To the guest: events, as many as there are (lending.go), at <its subject>.b, and before that, at
// <its subject>.p, the parts of what is too large for one message; hostNews at <its subject>.c. To
// the owner: "<number> <op> <loan or place> [JSON]"; acknowledgements are of many loans,
// "<number> A <loan>,<loan>".
//
// What a guest holds is its own until a time that the owner grants with each answer to a ping. The
// owner takes the events of a session back that is silent for longer.

// Ops of a guest, beside the ends of loans.
const (
	guestSeat  = 'S' // a place, as guestPlaceState
	guestMore  = 'M' // how many more events a place wants
	guestLeft  = 'L' // a place that holds nothing has gone
	guestPing  = 'P'
	guestLeave = 'Q' // the session ends; the guest holds nothing any more
)

// hostSubject ends the subject at which hubs ask an owner for a session.
const hostSubject = ".order"

// guestHello asks for a session.
type guestHello struct {
	Group string `json:"group"` // the key of its entry
	Hub   string `json:"hub"`
	Data  string `json:"data"` // the subject for what the owner sends
	Made  int64  `json:"made"` // in epoch nanoseconds; rises from request to request of a hub
}

// helloAge is how old a request for a session may be: a recorded one is no use later.
const helloAge = time.Minute

// guestWelcome is the answer.
type guestWelcome struct {
	Subject string        `json:"subject"` // "": this hub does not own the group
	Left    time.Duration `json:"left"`
}

// guestPlaceState is a place as its hub describes it.
type guestPlaceState struct {
	ID   string `json:"id"`
	Open bool   `json:"open"`
	// Credit replaces what was asked for before.
	Credit int   `json:"credit"`
	Had    []int `json:"had,omitempty"`
}

// guestPong answers a ping.
type guestPong struct {
	Over bool          `json:"over,omitempty"` // the session has ended
	Left time.Duration `json:"left"`
	Sent uint64        `json:"sent"` // how much the owner has sent
}

// hostNews is what an owner says beside events.
type hostNews struct {
	Place  uint64 `json:"p,omitempty"`
	Slots  []int  `json:"s,omitempty"`
	Epoch  uint64 `json:"e,omitempty"` // not 0: the slots of the place
	Revoke uint64 `json:"r,omitempty"` // a loan that is over
	Recall bool   `json:"all,omitempty"`
}

// guest is a hub with members of a group that this hub owns.
type guest struct {
	w    *owner
	link *conn.Link
	hub  string
	made int64 // when the session was asked for
	data string
	subj string
	sub  *nats.Subscription

	closed atomic.Bool
	gone   chan struct{} // closed when the guest has said that it holds nothing
	went   sync.Once

	sending sync.Mutex // keeps the numbers in order
	out     []byte     // events that are to be sent; at most lendBytes and one more
	sent    atomic.Uint64

	got    uint64           // used by the subscription's goroutine only
	places map[uint64]*spot // guarded by the ordering's mu

	mu      sync.Mutex
	loans   map[uint64]*loan // bounded by the credit of the places
	next    uint64
	granted int64 // until when the guest may settle what it has
}

// guestPlace is a place of another hub.
type guestPlace struct {
	guest  *guest
	place  *spot
	number uint64
}

// guestRight is how long a guest may hold events without an answer of the owner. It is shorter than
// what is left of the owner's own right whenever that is not being renewed.
func (w *owner) guestRight() time.Duration { return guestRight(&w.group.fence) }

func guestRight(f *fence) time.Duration { return (f.ackWait - f.usable) / 2 }

// listenOrders takes requests for sessions, over all connections.
func (b *Bus) listenOrders() error {
	for _, l := range b.conn.Links {
		if _, err := l.NC.QueueSubscribe(hubInbox+b.handles.hub+hostSubject, "hub", b.surviving("session of an ordered group", func(m *nats.Msg) { b.welcome(l, m) })); err != nil {
			return err
		}
	}
	return nil
}

// signed has the key of the hubs sign a request.
func (h *handleTable) signed(body []byte) []byte {
	id, key := h.keys.newest()
	msg := binary.BigEndian.AppendUint32(nil, id)
	return append(append(msg, macOf(key, body)...), body...)
}

// checked returns the body of a signed request, or nil. It does not block: an unknown key is read
// soon, and the request may be repeated.
func (h *handleTable) checked(data []byte) []byte {
	if len(data) < 4+handleMAC {
		return nil
	}
	id, mac, body := binary.BigEndian.Uint32(data), data[4:4+handleMAC], data[4+handleMAC:]
	h.keys.mu.Lock()
	key := h.keys.known[id]
	if key == nil && time.Since(h.keys.tried) > handleKeysRetry {
		h.keys.readSoonLocked()
	}
	h.keys.mu.Unlock()
	if key == nil || !hmac.Equal(mac, macOf(key, body)) {
		return nil
	}
	return body
}

// privateInbox returns a subject that nobody can guess. The names of hubs and of other inboxes come
// from a counter, which handles show to clients, and a client may have the server send something to
// any subject that it knows, unless natives are isolated.
func privateInbox() string {
	var name [16]byte
	_, _ = rand.Read(name[:]) // never fails
	return hubInbox + hex.EncodeToString(name[:])
}

// welcome begins a session. It does not block.
func (b *Bus) welcome(l *conn.Link, m *nats.Msg) {
	var hello guestHello
	body := b.handles.checked(m.Data)
	if body == nil || json.Unmarshal(body, &hello) != nil || m.Reply == "" {
		b.log.Debug("ignored a request about an ordered group: it is not signed with a key of the hubs")
		return
	}
	if age := time.Since(time.Unix(0, hello.Made)); age > helloAge || age < -helloAge || !strings.HasPrefix(hello.Data, hubInbox) {
		return
	}
	b.owners.mu.Lock()
	o := b.owners.groups[hello.Group]
	b.owners.mu.Unlock()
	var answer guestWelcome
	if o != nil {
		answer = o.welcome(l, &hello)
	}
	reply, err := json.Marshal(answer)
	if err == nil {
		_ = m.Respond(reply) // fails only when the connection is down
	}
}

func (o *orderedGroup) welcome(l *conn.Link, hello *guestHello) guestWelcome {
	o.mu.Lock()
	var before *guest
	if o.own != nil {
		before = o.own.guests[hello.Hub]
	}
	o.mu.Unlock()
	if before != nil && hello.Made <= before.made {
		return guestWelcome{} // an older request was late, or somebody repeats one
	}
	if before != nil { // its hub has given up all that it had, or it would not ask
		before.finish()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	w := o.own
	if w == nil || w.guests == nil || o.bus.orderingsEnd.Load() {
		return guestWelcome{}
	}
	g := &guest{
		w: w, link: l, hub: hello.Hub, made: hello.Made, data: hello.Data, subj: privateInbox(), places: make(map[uint64]*spot), loans: make(map[uint64]*loan),
		gone: make(chan struct{}),
	}
	sub, err := l.NC.Subscribe(g.subj, g.receive)
	if err == nil {
		err = sub.SetPendingLimits(-1, -1) // bounded by what the guest has
	}
	if err != nil {
		return guestWelcome{}
	}
	g.sub = sub
	g.granted = o.bus.clock.Now() + int64(w.guestRight())
	w.guests[g.hub] = g
	o.kick()
	return guestWelcome{Subject: g.subj, Left: w.guestRight()}
}

// receive takes what the guest says. It does not block.
func (g *guest) receive(m *nats.Msg) {
	text := string(m.Data)
	number, rest, _ := strings.Cut(text, " ")
	n, err := strconv.ParseUint(number, 10, 64)
	if err == nil && len(rest) > 0 && rest[0] == guestLeave {
		g.finish()
		g.went.Do(func() { close(g.gone) })
		g.pong(m, guestPong{Over: true})
		return
	}
	if err == nil && n != g.got+1 && !g.closed.Swap(true) {
		// It is told with the next answer, and says that it holds nothing; or its right ends.
		g.w.bus.log.Debug("a message of a hub with members of an ordered group was lost; its session ends", slog.String("hub", g.hub))
	}
	if err != nil || len(rest) < 1 || g.closed.Load() {
		g.pong(m, guestPong{Over: true})
		return
	}
	g.got = n
	op := rest[0]
	arg, tail, _ := strings.Cut(strings.TrimPrefix(rest[1:], " "), " ")
	id, _ := strconv.ParseUint(arg, 10, 64)
	switch op {
	case loanAcked:
		g.acked(arg)
	case loanBack:
		g.settle(id, loanEnd{What: op})
	case loanNaked, loanBuried:
		var how loanEnd
		if tail != "" && json.Unmarshal([]byte(tail), &how) != nil {
			return
		}
		how.What = op
		g.settle(id, how)
	case guestSeat:
		var s guestPlaceState
		if json.Unmarshal([]byte(tail), &s) == nil {
			g.seat(id, s)
		}
	case guestMore:
		more, _ := strconv.Atoi(tail)
		o := g.w.o
		o.mu.Lock()
		if p := g.places[id]; p != nil {
			p.credit += max(more, 0)
		}
		o.mu.Unlock()
		o.kick()
	case guestLeft:
		g.leave(id)
	case guestPing:
		g.pong(m, g.grant())
	}
}

func (g *guest) pong(m *nats.Msg, p guestPong) {
	if m.Reply == "" {
		return
	}
	if data, err := json.Marshal(p); err == nil {
		_ = m.Respond(data) // fails only when the connection is down
	}
}

// grant prolongs the right of the guest, no longer than that of the owner lasts.
func (g *guest) grant() guestPong {
	w := g.w
	now := w.bus.clock.Now()
	if !w.bus.owners.valid(now) || w.bus.clock.Stalled(now) {
		return guestPong{Over: true}
	}
	left := int64(w.guestRight())
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.loans {
		if until := l.until.Load(); until > 0 {
			left = min(left, until-now)
		}
	}
	left = max(left, 0)
	g.granted = max(g.granted, now+left)
	return guestPong{Left: time.Duration(left), Sent: g.sent.Load()}
}

// settle ends a loan as the guest says.
func (g *guest) settle(number uint64, how loanEnd) {
	g.mu.Lock()
	l := g.loans[number]
	delete(g.loans, number)
	g.mu.Unlock()
	if l != nil {
		l.end(how)
	}
}

// acked ends loans whose events were acknowledged.
func (g *guest) acked(numbers string) {
	ends := make([]loanOver, 0, strings.Count(numbers, ",")+1)
	g.mu.Lock()
	for text := range strings.SplitSeq(numbers, ",") {
		number, _ := strconv.ParseUint(text, 10, 64)
		l := g.loans[number]
		delete(g.loans, number)
		if l != nil && l.over.CompareAndSwap(false, true) {
			ends = append(ends, loanOver{l, loanEnd{What: loanAcked}})
		}
	}
	g.mu.Unlock()
	g.w.endedAll(ends...)
}

// seat takes a place, or what has changed of it.
func (g *guest) seat(number uint64, s guestPlaceState) {
	o := g.w.o
	o.mu.Lock()
	p := g.places[number]
	if p == nil {
		p = &spot{id: s.ID, guest: g, number: number, had: s.Had}
		p.borrower = &guestPlace{g, p, number}
		g.places[number] = p
	}
	p.open, p.credit = s.Open, s.Credit
	g.w.members = true
	o.mu.Unlock()
	o.kick()
}

func (g *guest) leave(number uint64) {
	o := g.w.o
	o.mu.Lock()
	if p := g.places[number]; p != nil {
		delete(g.places, number)
		g.w.left(p)
	}
	o.mu.Unlock()
	o.kick()
}

// look ends the session of a guest that is silent.
func (g *guest) look(now int64) {
	g.mu.Lock()
	granted := g.granted
	g.mu.Unlock()
	if now > granted+int64(g.w.guestRight())/2 {
		g.w.bus.log.Debug("a hub with members of an ordered group is silent; its session ends", slog.String("hub", g.hub))
		g.finish()
	}
}

// finish takes back all that the guest had: it holds nothing any more, or its right has ended.
func (g *guest) finish() {
	w, o := g.w, g.w.o
	g.closed.Store(true) // first: what is lent from now on goes back to the owner at once
	o.mu.Lock()
	if w.guests[g.hub] == g {
		delete(w.guests, g.hub)
	}
	for _, p := range g.places {
		w.left(p)
	}
	g.places = make(map[uint64]*spot)
	o.mu.Unlock()
	g.close()
	o.kick()
}

// close ends the session without a word about what the guest had.
func (g *guest) close() {
	g.closed.Store(true)
	_ = g.sub.Unsubscribe() // fails only when the connection is closed
}

// news tells the guest something.
func (g *guest) news(n hostNews) {
	data, err := json.Marshal(n)
	if err != nil || g.closed.Load() {
		return
	}
	g.sending.Lock()
	defer g.sending.Unlock()
	g.flushLocked()
	g.sendLocked(".c", data)
}

// sendLocked sends something with the next number. g.sending is held.
func (g *guest) sendLocked(kind string, data []byte) {
	// An error means that the connection is down; then the hole ends the session.
	_ = g.link.NC.PublishMsg(&nats.Msg{Subject: g.data + kind, Reply: strconv.FormatUint(g.sent.Add(1), 10), Data: data})
}

// lendBytes is how many bytes of events are sent at a time, unless a single event has more.
const lendBytes = 64 << 10

// flush sends the events that were lent.
func (g *guest) flush() {
	g.sending.Lock()
	defer g.sending.Unlock()
	g.flushLocked()
}

func (g *guest) flushLocked() {
	if len(g.out) == 0 {
		return
	}
	left := g.out
	for most := int(g.link.NC.MaxPayload()); len(left) > most; left = left[most:] {
		g.sendLocked(".p", left[:most])
	}
	g.sendLocked(".b", left)
	if g.out = g.out[:0]; cap(g.out) > 4*lendBytes {
		g.out = nil
	}
}

// revoke ends one loan: the owner has lost its right.
func (g *guest) revoke(l *loan) {
	g.mu.Lock()
	delete(g.loans, l.number)
	g.mu.Unlock()
	l.over.Store(true)
	g.news(hostNews{Place: l.place.number, Revoke: l.number})
}

// accept sends events to the guest, at the latest with flush.
func (t *guestPlace) accept(lent []lending) bool {
	g := t.guest
	if g.closed.Load() {
		return false
	}
	least := g.w.bus.clock.Now() + int64(g.w.guestRight())
	g.mu.Lock()
	for i := range lent {
		l := lent[i].loan
		if l.until.Load() < least {
			continue
		}
		g.next++
		l.number = g.next
		g.loans[l.number] = l
	}
	g.mu.Unlock()
	g.sending.Lock()
	for i := range lent {
		if lent[i].loan.number == 0 {
			continue
		}
		g.out = lent[i].appendTo(g.out, t.number)
		if len(g.out) >= lendBytes {
			g.flushLocked()
		}
	}
	g.sending.Unlock()
	for i := range lent {
		if lent[i].loan.number == 0 { // it would end before the guest's right does
			g.w.declined(t.place, lent[i:i+1])
		}
	}
	return true
}

func (t *guestPlace) assigned(slots []int, epoch uint64) {
	t.guest.news(hostNews{Place: t.number, Slots: slots, Epoch: epoch})
}

// recallAll has guests give up all that they have, and reports whether all have said that they did.
// A guest says so behind all that it had to say about events, and all of that is taken.
func recallAll(b *Bus, guests map[string]*guest) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(b.conn.Ctx), time.Second)
	defer cancel()
	all := make([]*guest, 0, len(guests))
	for _, g := range guests {
		all = append(all, g)
	}
	var silent atomic.Bool
	_ = concurrently(len(all), func(i int) error {
		g := all[i]
		data, err := json.Marshal(hostNews{Recall: true})
		if err == nil {
			var reply *nats.Msg
			reply, err = g.link.Request(ctx, g.data+".q", data)
			if err == nil && conn.NoResponders(reply) {
				err = nats.ErrNoResponders
			}
		}
		if err == nil {
			select {
			case <-g.gone:
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		if err != nil {
			silent.Store(true)
		}
		g.close()
		return nil
	})
	return !silent.Load()
}
