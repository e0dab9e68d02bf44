package jetstream

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

const (
	// deadWorkers is how many dead letters are on their way at a time, and deadOfTopic how many of
	// one topic.
	deadWorkers = 32
	deadOfTopic = deadWorkers / 2
	// What could not be done for a letter is tried again after deadFirst, then after twice as long
	// each time, up to deadRetry. An event whose letter finds no room, or is refused, comes again
	// after deadRetry.
	deadFirst = 250 * time.Millisecond
	deadRetry = 10 * time.Second
	// deadKeep is how often the letters that wait are looked at.
	deadKeep = 100 * time.Millisecond
	// A group whose letters are this part of all that may wait gets no further events.
	deadGroupPart = 8
	// deadOverhead is what a letter has besides the event.
	deadOverhead = 512
)

// deadLetters carries events whose last attempt failed to dlq.<topic>, and then settles them for
// their group. Until then it keeps their deliveries, so that nobody is given an event once more
// after its last attempt.
type deadLetters struct {
	core    *core
	burials *burials
	reads   *reading.Reads
	records *records.Records
	soon    *soon

	ctx     context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
	keeper  sync.WaitGroup

	mu      sync.Mutex
	work    sync.Cond
	waiting map[*deadLetter]struct{} // all that are not settled; bounded by Limits.DeadLetters
	topics  map[string]*deadTopic    // those of which a letter waits
	clients map[string]int           // letters that wait, by client
	closed  bool
}

// deadTopic is where the letters of a topic go. While it takes none, one letter at a time tries.
type deadTopic struct {
	queue   []*deadLetter // to be carried, the oldest first
	carried int
	letters int // all that wait
	failing bool
	next    int64 // while it fails: when to try again
	rest    backOff
}

// deadLetter is one on its way. While it is carried, it is its worker's.
type deadLetter struct {
	d       *Delivery
	failure lastFailure
	added   int64    // in the clock of the bus
	noted   int64    // when the failure was noted in the attempts bucket; 0: it was not
	stored  bool     // what is left is to settle the event
	unheard bool     // the consumer gave no answer
	next    int64    // when it is queued again; 0: it is queued, or being carried
	ration  []func() // give back what the client has reserved for it
	rest    backOff
}

// backOff is how long to wait before another try.
type backOff time.Duration

// more doubles the wait, up to most.
func (b *backOff) more(most time.Duration) int64 {
	*b = backOff(min(max(2*time.Duration(*b), deadFirst), most))
	return int64(*b)
}

func startDeadLetters(b *burials, reads *reading.Reads, r *records.Records, again *soon) *deadLetters {
	q := &deadLetters{
		core: b.core, burials: b, reads: reads, records: r, soon: again,
		waiting: make(map[*deadLetter]struct{}), topics: make(map[string]*deadTopic), clients: make(map[string]int),
	}
	q.work.L = &q.mu
	q.ctx, q.cancel = context.WithCancel(context.WithoutCancel(q.core.conn.Ctx))
	for range deadWorkers {
		q.workers.Go(func() {
			for l := q.take(); l != nil; l = q.take() {
				q.end(l, q.carry(l))
			}
		})
	}
	q.keeper.Go(q.keep)
	return q
}

// stop tries all that waits once more, except for letters beyond a ration, and waits until that was
// carried, or ctx ends. The events of letters that are left are noted and given back: the hub that
// has them next writes the letters.
func (q *deadLetters) stop(ctx context.Context) {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		now := q.core.clock.Now()
		for l := range q.waiting {
			if l.rest > 0 || l.next <= now {
				q.queueLocked(l)
			}
		}
		q.work.Broadcast()
	}
	q.mu.Unlock()
	stop := context.AfterFunc(ctx, q.cancel)
	q.workers.Wait()
	q.giveBack(ctx)
	stop()
	q.cancel()
	q.keeper.Wait()
}

// giveBack notes all that is left, and has it delivered again, to another hub or the next one.
func (q *deadLetters) giveBack(ctx context.Context) {
	q.mu.Lock()
	var left []*deadLetter
	for l := range q.waiting {
		left = append(left, l)
		q.forgetLocked(l)
	}
	q.mu.Unlock()
	answers := make(chan struct{}, len(left))
	for _, l := range left {
		if !q.usable(l.d) || l.d.moved() {
			answers <- struct{}{}
			continue
		}
		l.d.noteFailed(&l.failure, func(bool) {
			l.d.sendInTime(conn.NakNow) // without a note, it is delivered once more
			answers <- struct{}{}
		})
	}
	for range left {
		select {
		case <-answers:
		case <-ctx.Done():
			return
		}
	}
}

// add takes a delivery that its subscription has ended after its last attempt. It does not block.
func (q *deadLetters) add(d *Delivery, reason string) { q.addFor(d, reason, d.m.sub.opts.CountFor) }

// addFor is add for the client for which the letter counts.
func (q *deadLetters) addFor(d *Delivery, reason, client string) {
	q.enter(&deadLetter{d: d, failure: lastFailure{
		Attempt: d.Attempt, At: time.Now().UnixMilli(), Reason: native.ShortReason(reason), Client: client,
	}})
}

// addFailed takes a delivery that came after the last attempt of its event, and that nobody has
// had. It does not block.
func (q *deadLetters) addFailed(d *Delivery) {
	d.m.sub.mu.Lock()
	d.released = true
	d.Event.Payload, d.Event.Headers, d.Event.Tags, d.Event.CausedBy = nil, nil, nil, nil
	failure := *d.failed
	d.m.sub.mu.Unlock()
	q.enter(&deadLetter{d: d, failure: failure, noted: q.core.clock.Now()})
}

// enter takes a letter. Beyond Limits.DeadLetters, its event comes again after deadRetry, and the
// letter then finds room or waits as long again. A topic whose letters cannot be stored, and a
// client beyond its ration, may take half of them.
func (q *deadLetters) enter(l *deadLetter) {
	l.added, l.next = q.core.clock.Now(), 1
	d, limit, client := l.d, q.core.limits.DeadLetters, l.failure.Client
	half := max(limit/2, 1)
	q.mu.Lock()
	t := q.topics[d.Event.Topic]
	closed := q.closed
	taken := !closed && len(q.waiting) < limit && (t == nil || !t.failing || t.letters < half) && (client == "" || q.clients[client] < half)
	if taken {
		if t == nil {
			t = &deadTopic{}
			q.topics[d.Event.Topic] = t
		}
		t.letters++
		q.waiting[l] = struct{}{}
		d.group.letters.Add(1)
		if client == "" {
			q.queueLocked(l)
		} else {
			q.clients[client]++
			q.rationLocked(l, client)
		}
	}
	waits := taken && l.next != 0
	q.mu.Unlock()
	switch {
	case waits:
		q.noteFailure(l)
	case taken:
	default:
		if !closed {
			q.core.obs.LimitReached("dead_letters")
		}
		q.putOff(l, q.core.clock.Now())
	}
}

// noteFailure notes the failure of a letter that waits, unless it was noted not long ago.
func (q *deadLetters) noteFailure(l *deadLetter) {
	now := q.core.clock.Now()
	q.mu.Lock()
	due := l.noted == 0 || now-l.noted > int64(records.AttemptsAge/2)
	if due {
		l.noted = now
	}
	q.mu.Unlock()
	if due {
		l.d.noteFailed(&l.failure, func(bool) {})
	}
}

// putOff gives an event back whose letter finds no room, once its failure is noted. While the
// bucket does not answer and the event is still the hub's, the event waits.
func (q *deadLetters) putOff(l *deadLetter, began int64) {
	d := l.d
	if l.noted != 0 {
		d.sendNak(q.core.cfg.deadRetry)
		return
	}
	d.noteFailed(&l.failure, func(stored bool) {
		if !stored && d.patient(began) && d.inTime() {
			q.soon.add(func() { q.putOff(l, began) })
			return
		}
		if d.inTime() {
			d.sendNak(q.core.cfg.deadRetry)
		}
	})
}

// rationLocked has a letter carried when it is its client's turn.
func (q *deadLetters) rationLocked(l *deadLetter, client string) {
	var wait time.Duration
	for _, r := range q.burials.rations.each() {
		w, back := r.set.Reserve(client, l.d.size+deadOverhead)
		l.ration = append(l.ration, back)
		if w > 0 {
			q.core.obs.LimitReached(r.limit)
		}
		wait = max(wait, w)
	}
	if wait > 0 {
		l.next = q.core.clock.Now() + int64(wait)
		return
	}
	q.queueLocked(l)
}

// crowded reports that so many letters of a group wait that it is to get no further events.
func (q *deadLetters) crowded(g *group) bool {
	return int(g.letters.Load()) >= max(q.core.limits.DeadLetters/deadGroupPart, 1)
}

// queueLocked has a letter that rests carried.
func (q *deadLetters) queueLocked(l *deadLetter) {
	if l.next == 0 {
		return
	}
	l.next = 0
	t := q.topics[l.d.Event.Topic]
	t.queue = append(t.queue, l)
	q.work.Signal()
}

// take returns the next letter to carry, once there is one; nil at the end.
func (q *deadLetters) take() *deadLetter {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		now := q.core.clock.Now()
		queued := false
		for _, t := range q.topics { // in any order, so that none is preferred
			if len(t.queue) == 0 {
				continue
			}
			queued = true
			if t.failing && !q.closed && (t.carried > 0 || now < t.next) || t.carried >= deadOfTopic {
				continue
			}
			l := t.queue[0]
			t.queue[0] = nil
			t.queue = t.queue[1:]
			t.carried++
			return l
		}
		if q.closed && !queued {
			return nil
		}
		q.work.Wait()
	}
}

// end takes the outcome of a try: nil when nothing is left to do for the letter.
func (q *deadLetters) end(l *deadLetter, err error) {
	topic, now := l.d.Event.Topic, q.core.clock.Now()
	q.mu.Lock()
	t := q.topics[topic]
	t.carried--
	closed, first := q.closed, false
	if l.stored {
		t.failing, t.rest = false, 0
	}
	switch {
	case err == nil:
		q.forgetLocked(l)
	case closed: // giveBack has it
	case l.stored, l.unheard:
		l.next = now + l.rest.more(q.core.cfg.deadRetry)
	default:
		first, t.failing = !t.failing, true
		t.next = now + t.rest.more(q.core.cfg.deadRetry)
		t.queue = append(t.queue, l)
	}
	q.work.Broadcast()
	q.mu.Unlock()
	if first {
		q.core.often.Log(q.core.conn.Ctx, slog.LevelWarn, "failed to store a dead letter; retrying, as with others of its topic", topic,
			slog.String("topic", topic), slog.String("group", l.d.m.sub.group), slog.Any("error", err))
	}
	if err != nil {
		q.noteFailure(l)
	}
}

func (q *deadLetters) forgetLocked(l *deadLetter) {
	topic, client := l.d.Event.Topic, l.failure.Client
	delete(q.waiting, l)
	l.d.group.letters.Add(-1)
	if !l.stored {
		for _, back := range l.ration {
			back()
		}
	}
	if client != "" {
		if q.clients[client]--; q.clients[client] == 0 {
			delete(q.clients, client)
		}
	}
	t := q.topics[topic]
	if t.letters--; t.letters == 0 {
		delete(q.topics, topic)
	}
}

// keep asks the server to keep what waits, forgets what the hub has lost its right to, and has
// tried again what has rested.
func (q *deadLetters) keep() {
	tick := time.NewTicker(deadKeep)
	defer tick.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case <-tick.C:
		}
		now := q.core.clock.Now()
		touch := make(map[*member][]*Delivery)
		var note []*deadLetter // that may have to be noted
		q.mu.Lock()
		for l := range q.waiting {
			d := l.d
			d.m.sub.mu.Lock()
			ours := d.usable(now) && d.cuts == d.m.sub.link.Cuts.Load() && !d.movedOn()
			if ours && d.touchDue() <= now {
				d.asked = now
				touch[d.m] = append(touch[d.m], d)
			}
			d.m.sub.mu.Unlock()
			if ours && (l.noted == 0 && now-l.added >= int64(deadFirst) || l.noted != 0 && now-l.noted > int64(records.AttemptsAge/2)) {
				note = append(note, l) // the hub may lose its right to it
			}
			switch {
			case l.next == 0: // its worker decides
			case !ours:
				q.forgetLocked(l)
			case l.next <= now:
				q.queueLocked(l)
			}
		}
		if len(q.waiting) > 0 {
			q.work.Broadcast() // topics that failed may be tried again
		}
		q.mu.Unlock()
		for m, ds := range touch {
			m.sub.touch(ds, now)
		}
		for _, l := range note {
			q.noteFailure(l)
		}
	}
}
