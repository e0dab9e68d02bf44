package jetstream

import (
	"errors"
	"log/slog"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// attemptsBucket holds, for each event that a hub gave back before a client had it, how many of the server's deliveries
// count for no attempt.
const attemptsBucket = "eventhub_attempts"

// Bounds of the attempts bucket. An event that comes again after that counts deliveries as attempts that no client had.
const (
	attemptsAge   = 7 * 24 * time.Hour
	attemptsBytes = 1 << 30
)

// account is what a hub knows of the deliveries of one event to one group.
type account struct {
	last   int // the server's number of the newest delivery that this hub had
	spared int // how many deliveries up to last reached no client
}

// attempts turns the server's count of deliveries into the count of attempts. The server counts every delivery to a hub;
// an attempt is a delivery that was handed to a client. The difference is the number of deliveries that were spared: given
// back, or lost with a connection, before a client had them.
//
// A hub knows the difference when it had the delivery before this one. Otherwise it asks the attempts bucket, where each hub
// notes what it spares before it gives the event back. So only what a hub held when it was killed counts for an attempt that
// no client saw. The caller holds the group's mu.
type attempts struct {
	accounts map[uint64]account // by stream sequence
}

// arrived returns how many deliveries of the event were spared before this one, and whether that is known. If not, the
// number is the least that it can be.
func (a *attempts) arrived(seq uint64, delivered int) (spared int, known bool) {
	if len(a.accounts) == 0 {
		return 0, delivered <= 1
	}
	acc, ok := a.accounts[seq]
	switch {
	case !ok:
		return 0, delivered <= 1
	case delivered == acc.last+1:
		return acc.spared, true
	case delivered <= acc.last:
		// The server was restarted, or the consumer made anew: it has forgotten deliveries.
		return delivered - 1 - (acc.last - acc.spared), true
	default:
		return acc.spared, false // other hubs had it meanwhile
	}
}

// failed notes a delivery that a client had and did not settle.
func (a *attempts) failed(seq uint64, delivered, spared, most int) (full bool) {
	return a.note(seq, account{last: delivered, spared: spared}, most)
}

// spare notes a delivery that no client had.
func (a *attempts) spare(seq uint64, delivered, spared, most int) (full bool) {
	return a.note(seq, account{last: delivered, spared: spared + 1}, most)
}

func (a *attempts) note(seq uint64, acc account, most int) (full bool) {
	if old, ok := a.accounts[seq]; ok && old.last > acc.last && old.last-old.spared >= acc.last-acc.spared {
		return false // a late end of an earlier delivery
	}
	if a.accounts == nil {
		a.accounts = make(map[uint64]account)
	}
	if _, ok := a.accounts[seq]; !ok && len(a.accounts) >= most {
		full = true
		for other := range a.accounts { // any other will do: the bucket knows
			delete(a.accounts, other)
			break
		}
	}
	a.accounts[seq] = acc
	return full
}

// settled forgets an event.
func (a *attempts) settled(seq uint64) { delete(a.accounts, seq) }

// settledUpTo forgets all events up to the group's ack floor.
func (a *attempts) settledUpTo(floor uint64) {
	for seq := range a.accounts {
		if seq <= floor {
			delete(a.accounts, seq)
		}
	}
}

// eventKey names an event of one consumer, as it was made at that time, in the hub's buckets. A generation's number holds a
// character that keys must not.
func eventKey(stream, consumer string, created time.Time, seq uint64) string {
	group, _, _ := strings.Cut(consumer, "~")
	return stream + "." + group + "." + strconv.FormatInt(created.UnixNano(), 36) + "." + strconv.FormatUint(seq, 10)
}

func (d *Delivery) eventKey() string {
	return eventKey(d.group.topic.stream.name, d.group.consumer, d.group.created, d.Event.Sequence)
}

// attemptsSubject is where the deliveries of the event are noted.
func (d *Delivery) attemptsSubject() string { return "$KV." + attemptsBucket + "." + d.eventKey() }

// lookUp asks the bucket how many deliveries of d were spared, and calls then with the answer, or with what is known without
// one. It does not block.
func (d *Delivery) lookUp(then func(spared int)) {
	l := d.m.sub.link
	d.m.sub.mu.Lock()
	least := d.spared
	d.m.sub.mu.Unlock()
	b := d.group.bus
	b.askStored(l, attemptsBucket, d.attemptsSubject(), func(value []byte, err error) {
		n, bad := strconv.Atoi(string(value))
		if err != nil || bad != nil {
			n = least
		}
		if before := d.delivered - 1; n > before {
			// The server was killed and has forgotten deliveries. From now on its count and the note go together again.
			n = before
			b.noteSpared(l, spareNote{subject: d.attemptsSubject(), spared: n}, func() {})
		}
		then(max(n, least))
	})
}

// spare ends a delivery that no client had: it counts for no attempt. The bucket is told before the server is, so that
// whichever hub has the event next knows. With nak, the event is given back; without, the hub has lost its right to it. s.mu
// is not held.
func (s *Subscription) spare(d *Delivery, nak bool) {
	d.group.loosen(d.Event.Sequence)
	s.mu.Lock()
	resolved, spared := d.resolved, d.spared
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
	full := g.known.spare(d.Event.Sequence, d.delivered, spared, b.limits.AttemptsKnown)
	g.mu.Unlock()
	if full {
		b.obs.LimitReached("attempts_known")
	}
	note := spareNote{subject: d.attemptsSubject(), spared: spared + 1}
	s.returning.tryEnter(maxReturning)
	b.noteSpared(s.link, note, func() {
		if nak {
			wait := time.Duration(0)
			if d.bounced {
				wait = bounceDelay(spared)
			}
			d.sendInTime(nakAfter(wait))
		}
		s.returning.leave()
	})
}

// maxReturning does not bound what is on its way back: that is bounded by what was held.
const maxReturning = 1 << 30

// spareNote is what the attempts bucket is told.
type spareNote struct {
	subject string
	spared  int
}

// unsaved are notes and marks that could not be stored, by subject.
type unsaved struct {
	mu    sync.Mutex
	notes map[string]int // bounded by Limits.AttemptsKnown
	marks map[string]mark
}

// noteSpared stores a note and calls then, whatever the outcome. It does not block.
func (b *Bus) noteSpared(l *link, n spareNote, then func()) {
	b.dropNote(n)
	msg := &nats.Msg{Subject: n.subject, Data: strconv.AppendInt(nil, int64(n.spared), 10)}
	err := l.ask(msg, b.clock.now(), askerFunc(func(reply *nats.Msg, err error) {
		switch {
		case err != nil, noResponders(reply):
			b.keepNote(n)
		default:
			if _, err := parsePubAck(reply.Data, "KV_"+attemptsBucket); err != nil {
				b.obs.LimitReached("attempts_bucket") // it counts as an attempt
				b.log.Debug("failed to note a delivery that no client had", slog.Any("error", err))
			}
		}
		then()
	}))
	if err != nil {
		b.keepNote(n)
		then()
	}
}

// keepNote keeps a note until it can be stored. Without room, it counts as an attempt.
func (b *Bus) keepNote(n spareNote) {
	b.unsaved.mu.Lock()
	defer b.unsaved.mu.Unlock()
	if _, known := b.unsaved.notes[n.subject]; !known && len(b.unsaved.notes) >= b.limits.AttemptsKnown {
		b.obs.LimitReached("attempts_known")
		return
	}
	b.unsaved.notes[n.subject] = max(n.spared, b.unsaved.notes[n.subject])
}

// dropNote forgets a kept note that a newer one replaces.
func (b *Bus) dropNote(n spareNote) {
	b.unsaved.mu.Lock()
	defer b.unsaved.mu.Unlock()
	if len(b.unsaved.notes) > 0 && b.unsaved.notes[n.subject] <= n.spared {
		delete(b.unsaved.notes, n.subject)
	}
}

// saveUnsaved stores what could not be stored before, unless something newer is there. It does not block.
func (b *Bus) saveUnsaved(l *link) {
	b.unsaved.mu.Lock()
	notes, marks := b.unsaved.notes, maps.Clone(b.unsaved.marks)
	b.unsaved.notes = make(map[string]int)
	b.unsaved.mu.Unlock()
	for subject, spared := range notes {
		b.askStored(l, attemptsBucket, subject, func(value []byte, err error) {
			n := spareNote{subject: subject, spared: spared}
			if err != nil {
				b.keepNote(n)
				return
			}
			if stored, err := strconv.Atoi(string(value)); err != nil || stored < spared {
				b.noteSpared(l, n, func() {})
			}
		})
	}
	for subject, m := range marks {
		b.saveMark(l, subject, m)
	}
}

// askStored asks the leader of a bucket for the value under a subject, and calls then with it: empty where there is none. It
// does not block.
func (b *Bus) askStored(l *link, bucket, subject string, then func(value []byte, err error)) {
	msg := &nats.Msg{Subject: b.api + "STREAM.MSG.GET.KV_" + bucket, Data: []byte(`{"last_by_subj":"` + subject + `"}`)}
	err := l.ask(msg, b.clock.now(), askerFunc(func(reply *nats.Msg, err error) {
		if err != nil {
			then(nil, err)
			return
		}
		stored, err := parseStored(reply)
		switch {
		case errors.Is(err, ErrNotFound):
			then(nil, nil)
		case err != nil:
			then(nil, err)
		default:
			then(stored.data, nil)
		}
	}))
	if err != nil {
		then(nil, err)
	}
}
