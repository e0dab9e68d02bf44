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

	"eventhub/jetstream/jsonscan"
)

// Dead letters are carried by a few workers: failure is the rare case.
const (
	deadWorkers = 4
	// deadRetry is when an event comes again that could not be dead-lettered.
	deadRetry = 10 * time.Second
	// deadMargin is what the headers of a letter may take of the server's max_payload.
	deadMargin = 4 << 10
	// maxReason is the most bytes of a failure's reason that are kept.
	maxReason = 1024
)

// deadLetters carries events whose last attempt failed to dlq.<topic>, and then settles them for their group.
type deadLetters struct {
	bus    *Bus
	queue  chan deadLetter
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	closed bool
}

type deadLetter struct {
	d      *Delivery
	reason string
	at     time.Time
}

func startDeadLetters(b *Bus) *deadLetters {
	q := &deadLetters{bus: b, queue: make(chan deadLetter, b.limits.DeadLetters)}
	q.ctx, q.cancel = context.WithCancel(context.WithoutCancel(b.ctx))
	for range deadWorkers {
		q.wg.Go(func() {
			for l := range q.queue {
				q.carry(l)
			}
		})
	}
	return q
}

// stop waits until what is queued was carried, or ctx ends: what is left is delivered once more after AckWait.
func (q *deadLetters) stop(ctx context.Context) {
	q.mu.Lock()
	if !q.closed {
		q.closed = true
		close(q.queue)
	}
	q.mu.Unlock()
	defer q.cancel()
	defer context.AfterFunc(ctx, q.cancel)()
	q.wg.Wait()
}

// add takes a delivery that its subscription has ended. It does not block: when the queue is full, the event is delivered
// once more instead.
func (q *deadLetters) add(d *Delivery, reason string) {
	reason = shortReason(reason)
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		select {
		case q.queue <- deadLetter{d: d, reason: reason, at: time.Now()}:
			return
		default:
			q.bus.obs.LimitReached("dead_letters")
		}
	}
	d.sendNak(deadRetry)
}

// carry stores the dead letter and then settles the event. If the hub is lost between the two, the event is delivered once
// more, and its next dead letter has the same id.
func (q *deadLetters) carry(l deadLetter) {
	d := l.d
	ctx, cancel := context.WithTimeout(q.ctx, publishWait)
	defer cancel()
	if !q.prolong(ctx, d) {
		return // it may be another member's: its next end decides
	}
	original := &d.Event
	if d.released {
		e, err := q.bus.bySequence(ctx, d.group.topic, d.Event.Sequence)
		if err != nil && !errors.Is(err, ErrNotFound) {
			q.failed(d, err)
			return
		}
		if err == nil {
			original = e
		} // else retention has removed it: what is known of it must do
	}
	err := q.bus.storeLetter(ctx, deadEvent{original: original, group: d.m.sub.group, reason: l.reason, attempts: d.Attempt, at: l.at, id: d.deadID()})
	if err != nil {
		q.failed(d, err)
		return
	}
	if !q.usable(d) || d.moved() {
		return // there is nothing to settle any more
	}
	// A consumer that is being deleted right now gives no answer.
	ctx, cancel = context.WithTimeout(ctx, settleWait)
	defer cancel()
	if _, err := d.m.sub.link.request(ctx, d.reply, term); err == nil {
		d.group.settled(d.Event.Sequence)
	} else if !d.moved() {
		q.bus.log.Warn("a dead-lettered event could not be settled; it will be delivered once more",
			slog.String("topic", d.Event.Topic), slog.String("group", d.m.sub.group), slog.Any("error", err))
	}
}

// prolong has the server confirm that it keeps the delivery for us. A failure that was told to a server that stood still must
// not dead-letter what another member has by now.
func (q *deadLetters) prolong(ctx context.Context, d *Delivery) bool {
	if !q.usable(d) {
		return false
	}
	sent := q.bus.clock.now()
	reply, err := d.m.sub.link.request(ctx, d.reply, progress)
	if err != nil || noResponders(reply) || !q.usable(d) {
		return false
	}
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	d.keptSince(sent, q.bus.clock.now())
	return true
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
	return d.m.group != d.group
}

func (q *deadLetters) failed(d *Delivery, err error) {
	q.bus.log.Warn("an event could not be dead-lettered; it will be delivered once more",
		slog.String("topic", d.Event.Topic), slog.String("group", d.m.sub.group), slog.Any("error", err))
	if q.usable(d) {
		d.sendNak(deadRetry)
	}
}

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
	if most := int(b.publisher.link.nc.MaxPayload()) - deadMargin; len(letter) > most {
		// Control characters of a native publisher's text grow sixfold as JSON. What does not fit stays in its stream.
		l.reason += fmt.Sprintf(" (payload of %d bytes left out: it is at %s@%d)", len(l.original.Payload), l.original.Stream, l.original.Sequence)
		bare := *l.original
		bare.Payload = nil
		l.original = &bare
		letter = l.append(nil)
	}
	_, err := b.publishWait(ctx, func(done func(Receipt, error)) error {
		return b.publisher.send(ctx, dlqPrefix+l.original.Topic, letter, &PublishOptions{ID: l.id}, done)
	})
	return err
}

// DeadLetter stores an event on dlq.<topic> as a failure of a group, and returns once it is stored. It settles nothing. It
// is for who reads events in an order of its own, as projections do; a Delivery's failure needs no such call. The same
// event of the same group is stored once within the duplicate window of the dead letters (24 h).
func (b *Bus) DeadLetter(ctx context.Context, e *Event, group, reason string, attempts int) error {
	if strings.HasPrefix(e.Topic, dlqPrefix) {
		return nil // as for deliveries: dead letters have none of their own
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d group %s", e.Stream, e.Sequence, group))
	return b.storeLetter(ctx, deadEvent{
		original: e, group: group, reason: shortReason(reason), attempts: attempts, at: time.Now(), id: "dlq:" + hex.EncodeToString(sum[:16]),
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
