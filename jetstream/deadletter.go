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
	if len(reason) > maxReason {
		reason = strings.ToValidUTF8(reason[:maxReason], "") + "…"
	}
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
	if !q.usable(d) {
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
	letter := appendDeadLetter(nil, l, d.m.sub.group, original)
	if most := int(d.m.sub.link.nc.MaxPayload()) - deadMargin; len(letter) > most {
		// Control characters of a native publisher's text grow sixfold as JSON. What does not fit stays in its stream.
		l.reason += fmt.Sprintf(" (payload of %d bytes left out: it is at %s@%d)", len(original.Payload), original.Stream, original.Sequence)
		bare := *original
		bare.Payload = nil
		letter = appendDeadLetter(nil, l, d.m.sub.group, &bare)
	}
	_, err := q.bus.publishWait(ctx, func(done func(Receipt, error)) error {
		return q.bus.publisher.send(ctx, dlqPrefix+d.Event.Topic, letter, &PublishOptions{ID: d.deadID()}, done)
	})
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
	if _, err := d.m.sub.link.request(ctx, d.reply, term); err != nil && !d.moved() {
		q.bus.log.Warn("a dead-lettered event could not be settled; it will be delivered once more",
			slog.String("topic", d.Event.Topic), slog.String("group", d.m.sub.group), slog.Any("error", err))
	}
}

func (q *deadLetters) usable(d *Delivery) bool {
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.usable(q.bus.clock.now())
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

func appendDeadLetter(dst []byte, l deadLetter, group string, original *Event) []byte {
	dst = jsonscan.AppendString(append(dst, `{"topic":`...), original.Topic)
	dst = jsonscan.AppendString(append(dst, `,"group":`...), group)
	dst = original.AppendRecord(append(dst, `,"original":`...))
	dst = jsonscan.AppendString(append(dst, `,"err":`...), l.reason)
	dst = strconv.AppendInt(append(dst, `,"ts":`...), l.at.UnixMilli(), 10)
	dst = strconv.AppendInt(append(dst, `,"attempts":`...), int64(l.d.Attempt), 10)
	return append(dst, '}')
}
