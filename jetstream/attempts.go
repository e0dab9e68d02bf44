package jetstream

import (
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// lastFailure is how the last attempt of an event failed.
type lastFailure = native.LastFailure

// account is what a hub knows of the deliveries of one event to one group.
type account struct {
	last   int // the server's number of the newest delivery that this hub had
	spared int // how many deliveries up to last reached no client
	// over means that the last attempt has failed. If the event comes again nevertheless, the
	// bucket tells whether its dead letter is still to be written.
	over bool
	// until is when an event of an ordered group may be lent again, in the clock of the bus.
	until int64
}

// attempts turns the server's count of deliveries into the count of attempts. The server counts
// every delivery to a hub; an attempt is a delivery that was handed to a client. The difference is
// the number of deliveries that were spared: given back, or lost with a connection, before a client
// had them.
//
// A hub knows the difference when it had the delivery before this one. Otherwise it asks the
// attempts bucket, where each hub notes what it spares before it gives the event back. So only what
// a hub held when it was killed counts for an attempt that no client saw. The caller holds the
// group's mu.
type attempts struct {
	accounts map[uint64]account  // by stream sequence
	ended    map[uint64]settling // events that came more than once and are settled
}

// settling is the delivery with which this hub settled an event. An earlier one may still come: it
// has waited between servers.
type settling struct {
	delivered int
	at        int64
}

// knowledge is what a hub knows of the deliveries before one that arrives.
type knowledge int

const (
	// unknown: other hubs may have had the event meanwhile. The bucket knows, and the number is the
	// least that it can be.
	unknown knowledge = iota
	known
	// forgotten: the server counts from an older number, as it was restarted. This hub knows
	// better, and is to tell the others.
	forgotten
	// settled: this hub has settled the event since.
	settled
)

// arrived returns how many deliveries of the event were spared before this one, and how well that
// is known. The number is negative when the server has forgotten deliveries.
func (a *attempts) arrived(seq uint64, delivered int) (spared int, how knowledge) {
	acc, ok := a.accounts[seq]
	end, over := a.ended[seq]
	switch {
	case over && delivered <= end.delivered:
		return 0, settled
	case acc.over:
		return acc.spared, unknown
	case !ok && delivered <= 1:
		return 0, known
	case !ok:
		return 0, unknown
	case delivered == acc.last+1:
		return acc.spared, known
	case delivered <= acc.last:
		return delivered - 1 - (acc.last - acc.spared), forgotten
	default:
		return acc.spared, unknown
	}
}

// asNoted is how many deliveries were spared, as the bucket says of an event that is delivered for
// the given time. least is what the hub knows itself.
func asNoted(noted, least, delivered int) int {
	if noted < 0 {
		return noted // the server has forgotten deliveries
	}
	return min(max(noted, least), delivered-1)
}

// attempt is the number of the delivery among those that clients had, of which spared were not.
func (d *Delivery) attempt(spared int) int { return max(d.delivered-spared, 1) + d.before }

// failed notes a delivery that a client had and did not settle.
func (a *attempts) failed(seq uint64, delivered, spared, limit int) (full bool) {
	return a.note(seq, account{last: delivered, spared: spared}, limit)
}

// over notes that the delivery noted last was of the last attempt.
func (a *attempts) over(seq uint64) {
	if acc, ok := a.accounts[seq]; ok {
		acc.over = true
		a.accounts[seq] = acc
	}
}

// spare notes a delivery that no client had.
func (a *attempts) spare(seq uint64, delivered, spared, limit int) (full bool) {
	return a.note(seq, account{last: delivered, spared: spared + 1}, limit)
}

func (a *attempts) note(seq uint64, acc account, limit int) (full bool) {
	old, ok := a.accounts[seq]
	if ok && old.last > acc.last && old.last-old.spared >= acc.last-acc.spared {
		return false // a late end of an earlier delivery
	}
	acc.until = max(acc.until, old.until)
	if a.accounts == nil {
		a.accounts = make(map[uint64]account)
	}
	if !ok && len(a.accounts) >= limit {
		full = true
		for other := range a.accounts { // any other will do: the bucket knows
			delete(a.accounts, other)
			break
		}
	}
	a.accounts[seq] = acc
	return full
}

// wait notes that an event of an ordered group is not to be lent before a moment.
func (a *attempts) wait(d *Delivery, spared int, until int64, limit int) (full bool) {
	return a.note(d.seq, account{last: d.delivered, spared: spared, until: until}, limit)
}

// settled forgets an event, but for the number of the delivery with which it was settled.
func (a *attempts) settled(seq uint64, delivered int, now int64, limit int) (full bool) {
	delete(a.accounts, seq)
	if delivered <= 1 {
		return false
	}
	if a.ended == nil {
		a.ended = make(map[uint64]settling)
	}
	if _, ok := a.ended[seq]; !ok && len(a.ended) >= limit {
		full = true
		for other := range a.ended {
			delete(a.ended, other)
			break
		}
	}
	a.ended[seq] = settling{delivered, now}
	return full
}

// settledUpTo forgets all events up to the group's ack floor, and those that were settled before
// the given moment.
func (a *attempts) settledUpTo(floor uint64, before int64) {
	for seq := range a.accounts {
		if seq <= floor {
			delete(a.accounts, seq)
		}
	}
	for seq, end := range a.ended {
		if end.at < before {
			delete(a.ended, seq)
		}
	}
}

// restingGroups are the accounts of groups whose last member on this hub has left. A member that
// comes back would otherwise ask the bucket about each event that it had before. Deliveries
// by other hubs meanwhile show in the server's count.
type restingGroups struct {
	mu    sync.Mutex
	byKey map[string]restingGroup
	size  int // of all together
}

type restingGroup struct {
	created  time.Time
	accounts map[uint64]account
}

// restingShare is how many accounts all resting groups have together, in those of one group.
const restingShare = 5

// keep takes the accounts of a group.
func (r *restingGroups) keep(g *group) {
	g.mu.Lock()
	accounts := g.known.accounts
	g.known.accounts = nil // what is given back late must not change what another group has by then
	g.mu.Unlock()
	if len(accounts) == 0 || g.deleted.Load() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropLocked(g.key())
	for key := range r.byKey { // any other will do: the bucket knows
		if r.size+len(accounts) <= restingShare*g.bus.limits.AttemptsKnown {
			break
		}
		r.dropLocked(key)
	}
	if r.byKey == nil {
		r.byKey = make(map[string]restingGroup)
	}
	r.byKey[g.key()] = restingGroup{g.created, accounts}
	r.size += len(accounts)
}

// wake gives a group that has a member again its accounts.
func (r *restingGroups) wake(g *group) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if own := r.byKey[g.key()]; own.created.Equal(g.created) {
		g.known.accounts = own.accounts
	}
	r.dropLocked(g.key())
}

func (r *restingGroups) dropLocked(key string) {
	r.size -= len(r.byKey[key].accounts)
	delete(r.byKey, key)
}

// eventKey names the event of d in the hub's buckets.
func (d *Delivery) eventKey() string {
	return native.NoteKey(d.group.topic.Stream.Name, d.group.consumer, d.group.created, d.seq)
}

// attemptsSubject is where the deliveries of the event are noted.
func (d *Delivery) attemptsSubject() string {
	return records.NoteSubject(d.group.topic.Stream.Name, d.group.consumer, d.group.created, d.seq)
}

// lookUp asks the bucket how many deliveries of d were spared; since the given time. It asks again
// while the bucket does not answer and d is still the hub's, and calls then once: with the answer,
// or with the least that the number can be. It does not block.
func (d *Delivery) lookUp(began int64, then func(n records.Note, sure bool)) {
	l, b := d.m.sub.link, d.group.bus
	d.m.sub.mu.Lock()
	least := d.spared
	d.m.sub.mu.Unlock()
	b.records.AskNote(l, d.attemptsSubject(), func(value []byte, err error) {
		switch {
		case err == nil:
		case d.patient(began) && d.inTime():
			b.soon.add(func() { d.lookUp(began, then) })
			return
		default:
			then(records.Note{Spared: least}, false)
			return
		}
		noted, _ := records.ParseNote(value)
		d.group.readSpared(l, func(runs native.SparedRuns, err error) {
			switch {
			case err == nil:
			case d.patient(began) && d.inTime():
				b.soon.add(func() { d.lookUp(began, then) })
				return
			default:
				then(records.Note{Spared: least, Failed: noted.Failed, Until: noted.Until}, false)
				return
			}
			if noted.Spared >= 0 { // else the server has forgotten deliveries since
				noted.Spared = max(noted.Spared, runs.Of(d.seq))
			}
			d.looked(noted, least, then)
		})
	})
}

// looked takes what the bucket says of d.
func (d *Delivery) looked(noted records.Note, least int, then func(n records.Note, sure bool)) {
	spared := asNoted(noted.Spared, least, d.delivered)
	if spared < noted.Spared && d.inTime() {
		// The server was killed and has forgotten deliveries. From now on its count and the note go
		// together again.
		d.group.bus.records.NoteSpared(d.m.sub.link, records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: spared, Failed: noted.Failed, Until: noted.Until}}, func(bool) {})
	}
	then(records.Note{Spared: spared, Failed: noted.Failed, Until: noted.Until}, true)
}

// tellForgotten notes what the hub knows of d and the server has forgotten, and then calls then. A
// delivery that is late says nothing of what the server knows.
func (d *Delivery) tellForgotten(began int64, then func(n records.Note, sure bool)) {
	b := d.group.bus
	d.m.sub.mu.Lock()
	spared := d.spared
	d.m.sub.mu.Unlock()
	if !d.inTime() {
		then(records.Note{Spared: spared}, false)
		return
	}
	b.records.NoteSpared(d.m.sub.link, records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: spared}}, func(stored bool) {
		if !stored && d.patient(began) && d.inTime() {
			b.soon.add(func() { d.tellForgotten(began, then) })
			return
		}
		then(records.Note{Spared: spared}, true)
	})
}

// noteFailed notes that the last attempt of d has failed, so that whichever hub has the event next
// writes its dead letter, and calls then. It does not block. Like a settlement, the note is sent
// only while d is the hub's and the server answers: otherwise it could count for an event that
// another member has by then.
func (d *Delivery) noteFailed(f *lastFailure, then func(stored bool)) {
	l, b := d.m.sub.link, d.group.bus
	if !d.inTime() {
		then(false)
		return
	}
	again := func() { b.soon.add(func() { d.noteFailed(f, then) }) }
	if d.group.silent(l, b.clock.Now()) {
		again()
		return
	}
	d.m.sub.mu.Lock()
	spared := d.spared
	d.m.sub.mu.Unlock()
	n := b.records.DropNote(records.SpareNote{Subject: d.attemptsSubject(), Note: records.Note{Spared: spared, Failed: f}})
	err := l.AskUntil(&nats.Msg{Subject: n.Subject, Data: n.Value()}, b.clock.Now()+int64(records.NoteWait), conn.AskerFunc(func(reply *nats.Msg, err error) {
		if err != nil || conn.NoResponders(reply) {
			again()
			return
		}
		_, err = conn.ParsePubAck(reply.Data, "KV_"+native.AttemptsBucket)
		then(err == nil)
	}))
	if err != nil {
		again()
	}
}

// forgetFailed removes the note of d. It does not wait: a note that stays is about an event that is
// settled.
func (d *Delivery) forgetFailed() {
	d.group.bus.records.ForgetNote(d.m.sub.link, d.attemptsSubject())
}

// spare ends a delivery that no client had: it counts for no attempt. The bucket is told before the
// server is, so that whichever hub has the event next knows. With nak, the event is given back;
// without, the hub has lost its right to it. s.mu is not held.
func (s *Subscription) spare(d *Delivery, nak bool) {
	if d.loan != nil {
		if nak {
			d.loan.end(loanEnd{What: loanBack})
		}
		return
	}
	d.group.addUnsettled(d.seq)
	s.mu.Lock()
	resolved, n := d.resolved, records.Note{Spared: d.spared + 1, Failed: d.failed, Until: d.until}
	if !resolved {
		d.unseen, d.unseenNak = true, nak
	}
	s.mu.Unlock()
	if !resolved {
		d.resolve()
		return
	}
	g, b := d.group, s.bus
	g.mu.Lock()
	full := g.known.spare(d.seq, d.delivered, n.Spared-1, b.limits.AttemptsKnown)
	g.mu.Unlock()
	if full {
		b.obs.LimitReached("attempts_known")
	}
	if d.knows == forgotten && !d.inTime() {
		return // it is late: newer deliveries of the event were noted
	}
	s.returning.TryAcquire(maxReturning)
	d.giveBack(b.clock.Now(), records.SpareNote{Subject: d.attemptsSubject(), Note: n}, nak)
}

// patient reports whether the bucket is to be asked again about d, since the given time.
func (d *Delivery) patient(began int64) bool {
	return d.group.bus.clock.Now()-began < int64(records.NotePatience)
}

// giveBack notes that no client had d and, with nak, then has the server deliver the event again.
// While the bucket does not answer and d is still the hub's, the event waits: whichever hub has it
// next is to find the note.
func (d *Delivery) giveBack(began int64, note records.SpareNote, nak bool) {
	s, b := d.m.sub, d.group.bus
	b.records.NoteSpared(s.link, note, func(stored bool) {
		if nak && !stored && d.patient(began) && d.inTime() {
			b.soon.add(func() { d.giveBack(began, note, nak) })
			return
		}
		if nak {
			wait := time.Duration(0)
			if d.bounced {
				wait = b.lingering.bounceDelay(d.group, note.Spared-1)
			}
			d.sendInTime(conn.NakAfter(wait))
		}
		s.returning.Release()
	})
}

// maxReturning does not bound what is on its way back: that is bounded by what was held.
const maxReturning = 1 << 30

// soon are questions to ask again. There is at most one for each delivery that the hub holds or
// gives back.
type soon struct {
	mu  sync.Mutex
	ask []func()
}

func (s *soon) add(ask func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ask = append(s.ask, ask)
}

// run asks all of them.
func (s *soon) run() {
	s.mu.Lock()
	ask := s.ask
	s.ask = nil
	s.mu.Unlock()
	for _, f := range ask {
		f()
	}
}
