package jetstream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/jsonscan"
)

const (
	// deadWorkers is how many dead letters are on their way at a time.
	deadWorkers = 32
	// A letter that could not be stored is tried again after deadFirst, then after twice as long each time, up to deadRetry.
	// An event beyond Limits.DeadLetters comes again after deadRetry.
	deadFirst = 250 * time.Millisecond
	deadRetry = 10 * time.Second
	// deadKeep is how often the letters that wait are looked at.
	deadKeep = 100 * time.Millisecond
	// deadMargin is what the headers of a letter may take of the server's max_payload.
	deadMargin = 4 << 10
	// maxReason is the most bytes of a failure's reason that are kept.
	maxReason = 1024
)

// deadLetters carries events whose last attempt failed to dlq.<topic>, and then settles them for their group. Until then it
// keeps their deliveries, so that nobody is given an event once more after its last attempt.
type deadLetters struct {
	bus     *Bus
	queue   chan *deadLetter // those to be carried now
	ctx     context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup
	keeper  sync.WaitGroup

	mu      sync.Mutex
	waiting map[*deadLetter]struct{} // all that are not settled; bounded by Limits.DeadLetters
	closed  bool
}

type deadLetter struct {
	d      *Delivery
	reason string
	at     time.Time

	rest time.Duration // how long it rested last; only its worker uses it
	next int64         // when it is tried again; 0: it is queued, or being carried
}

func startDeadLetters(b *Bus) *deadLetters {
	q := &deadLetters{
		bus: b, queue: make(chan *deadLetter, b.limits.DeadLetters), waiting: make(map[*deadLetter]struct{}),
	}
	q.ctx, q.cancel = context.WithCancel(context.WithoutCancel(b.ctx))
	for range deadWorkers {
		q.workers.Go(func() {
			for l := range q.queue {
				if err := q.carry(l); err != nil {
					q.again(l, err)
				} else {
					q.forget(l)
				}
			}
		})
	}
	q.keeper.Go(q.keep)
	return q
}

// stop tries all that waits once more, and waits until that was carried, or ctx ends: what is left is delivered once more
// after AckWait.
func (q *deadLetters) stop(ctx context.Context) {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		for l := range q.waiting {
			if l.next != 0 {
				l.next = 0
				q.queue <- l
			}
		}
		close(q.queue)
	}
	q.mu.Unlock()
	stop := context.AfterFunc(ctx, q.cancel)
	q.workers.Wait()
	stop()
	q.cancel()
	q.keeper.Wait()
}

// add takes a delivery that its subscription has ended. It does not block: beyond Limits.DeadLetters, the event is delivered
// once more instead.
func (q *deadLetters) add(d *Delivery, reason string) {
	l := &deadLetter{d: d, reason: shortReason(reason), at: time.Now()}
	q.mu.Lock()
	taken := !q.closed && len(q.waiting) < q.bus.limits.DeadLetters
	if taken {
		q.waiting[l] = struct{}{}
		q.queue <- l // never more than wait
	}
	closed := q.closed
	q.mu.Unlock()
	if taken {
		return
	}
	if !closed {
		q.bus.obs.LimitReached("dead_letters")
	}
	d.sendNak(deadRetry)
}

func (q *deadLetters) forget(l *deadLetter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.waiting, l)
}

// again has a letter tried again later. When the hub ends, its event is delivered once more.
func (q *deadLetters) again(l *deadLetter, err error) {
	q.bus.log.Warn("failed to store a dead letter; retrying",
		slog.String("topic", l.d.Event.Topic), slog.String("group", l.d.m.sub.group), slog.Any("error", err))
	l.rest = min(max(2*l.rest, deadFirst), deadRetry)
	q.mu.Lock()
	closed := q.closed
	if closed {
		delete(q.waiting, l)
	} else {
		l.next = q.bus.clock.now() + int64(l.rest)
	}
	q.mu.Unlock()
	if closed && q.usable(l.d) {
		l.d.sendNak(deadRetry)
	}
}

// keep asks the server to keep what waits, and has tried again what has rested.
func (q *deadLetters) keep() {
	tick := time.NewTicker(deadKeep)
	defer tick.Stop()
	for {
		select {
		case <-q.ctx.Done():
			return
		case <-tick.C:
		}
		now := q.bus.clock.now()
		var waiting []*Delivery
		q.mu.Lock()
		for l := range q.waiting {
			waiting = append(waiting, l.d)
			if l.next != 0 && l.next <= now && !q.closed {
				l.next = 0
				q.queue <- l
			}
		}
		q.mu.Unlock()
		touch := make(map[*member][]*Delivery)
		for _, d := range waiting {
			d.m.sub.mu.Lock()
			if d.usable(now) && d.touchDue() <= now && !d.movedOn() {
				d.asked = now
				touch[d.m] = append(touch[d.m], d)
			}
			d.m.sub.mu.Unlock()
		}
		for m, ds := range touch {
			m.sub.touch(ds, now)
		}
	}
}

// carry stores the dead letter and then settles the event. If the hub is lost between the two, the event is delivered once
// more, and its next dead letter has the same id. It returns an error when the letter is to be tried again.
func (q *deadLetters) carry(l *deadLetter) error {
	d := l.d
	ctx, cancel := context.WithTimeout(q.ctx, publishWait)
	defer cancel()
	if ours, err := q.prolong(ctx, d); err != nil || !ours {
		return err // not ours: it may be another member's, and its next end decides
	}
	original := &d.Event
	if d.released {
		e, err := q.bus.bySequence(ctx, d.group.topic, d.Event.Sequence)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if err == nil {
			original = e
		} // else retention has removed it: what is known of it must do
	}
	err := q.bus.storeLetter(ctx, deadEvent{original: original, group: d.m.sub.group, reason: l.reason, attempts: d.Attempt, at: l.at, id: d.deadID()})
	if err != nil {
		return err
	}
	if !q.usable(d) || d.moved() {
		return nil // there is nothing to settle any more
	}
	// A consumer that is being deleted right now gives no answer.
	ctx, cancel = context.WithTimeout(ctx, settleWait)
	defer cancel()
	if _, err := d.m.sub.link.request(ctx, d.reply, term); err == nil {
		d.group.settled(d.Event.Sequence)
	} else if !d.moved() {
		q.bus.log.Warn("failed to settle a dead-lettered event; it will be delivered once more",
			slog.String("topic", d.Event.Topic), slog.String("group", d.m.sub.group), slog.Any("error", err))
	}
	return nil
}

// prolong has the server confirm that it keeps the delivery for us, and reports whether it does. A failure that was told to a
// server that stood still must not dead-letter what another member has by now.
func (q *deadLetters) prolong(ctx context.Context, d *Delivery) (ours bool, err error) {
	if !q.usable(d) {
		return false, nil
	}
	sent := q.bus.clock.now()
	reply, err := d.m.sub.link.request(ctx, d.reply, progress)
	if !q.usable(d) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if noResponders(reply) {
		return false, nats.ErrNoResponders // its leader may be changing
	}
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	d.keptSince(sent, q.bus.clock.now())
	return true, nil
}

func (q *deadLetters) usable(d *Delivery) bool {
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.usable(q.bus.clock.now()) && d.cuts == d.m.sub.link.cuts.Load()
}

// moved reports that the group's consumer is another one by now.
func (d *Delivery) moved() bool {
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.movedOn()
}

// movedOn is moved where s.mu is held.
func (d *Delivery) movedOn() bool { return d.m.group != d.group }

// deadID names the failure of one event in one generation of one group, so that it is stored once.
func (d *Delivery) deadID() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %s", d.Event.Stream, d.Event.Sequence, d.group.consumer))
	return "dlq:" + hex.EncodeToString(sum[:16])
}

// deadEvent is what a dead letter says.
type deadEvent struct {
	original *Event
	group    string
	reason   string
	attempts int
	at       time.Time
	id       string // of the letter
}

// storeLetter stores a dead letter, and returns once it is stored.
func (b *Bus) storeLetter(ctx context.Context, l deadEvent) error {
	letter := l.append(nil)
	if limit := int(b.publisher.link.nc.MaxPayload()) - deadMargin; len(letter) > limit {
		// Control characters of a native publisher's text grow sixfold as JSON. What does not fit stays in its stream.
		l.reason += fmt.Sprintf(" (payload of %d bytes left out: it is at %s@%d)", len(l.original.Payload), l.original.Stream, l.original.Sequence)
		bare := *l.original
		bare.Payload = nil
		l.original = &bare
		letter = l.append(nil)
	}
	t, err := b.topic(ctx, dlqPrefix+l.original.Topic, "") // not admitted: a letter is larger than what it wraps, and has no key
	if err != nil {
		return err
	}
	_, err = b.publishWait(ctx, func(done func(Receipt, error)) error {
		return b.publisher.send(ctx, t, letter, &PublishOptions{ID: l.id}, done)
	})
	return err
}

// DeadLetter stores an event of the topic on dlq.<topic> as a failure of the group, and returns once it is stored. It settles
// nothing. It is for those who read events in an order of their own, as projections do; a Delivery's failure needs no such
// call. Of reason, 1 KiB is kept. The same event of the same group is stored once within the duplicate window of the dead
// letters (24 h). It returns a bad_topic *Error for an event of another topic.
func (g Group) DeadLetter(ctx context.Context, e *Event, reason string, attempts int) error {
	if e.Topic != g.topic {
		return &Error{Code: CodeBadTopic, Msg: fmt.Sprintf("the event is of topic %s, and cannot fail for a group of %s", e.Topic, g.topic)}
	}
	if strings.HasPrefix(e.Topic, dlqPrefix) {
		return nil // as for deliveries: dead letters have none of their own
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d group %s", e.Stream, e.Sequence, g.name))
	return g.bus.storeLetter(ctx, deadEvent{
		original: e, group: g.name, reason: shortReason(reason), attempts: attempts, at: time.Now(), id: "dlq:" + hex.EncodeToString(sum[:16]),
	})
}

func shortReason(reason string) string {
	if len(reason) > maxReason {
		return strings.ToValidUTF8(reason[:maxReason], "") + "…"
	}
	return reason
}

func (l *deadEvent) append(dst []byte) []byte {
	dst = jsonscan.AppendString(append(dst, `{"topic":`...), l.original.Topic)
	dst = jsonscan.AppendString(append(dst, `,"group":`...), l.group)
	dst = l.original.AppendRecord(append(dst, `,"original":`...))
	dst = jsonscan.AppendString(append(dst, `,"err":`...), l.reason)
	dst = strconv.AppendInt(append(dst, `,"ts":`...), l.at.UnixMilli(), 10)
	dst = strconv.AppendInt(append(dst, `,"attempts":`...), int64(l.attempts), 10)
	return append(dst, '}')
}
