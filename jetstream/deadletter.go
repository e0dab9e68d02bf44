package jetstream

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

const (
	// deadMargin is what the headers of a letter may take of the server's max_payload.
	deadMargin = 4 << 10
	// deadSure is for how long a group's consumer is taken for the one that it was.
	deadSure = time.Second
)

// carry stores the dead letter and then settles the event. If the hub is lost between the two, the
// event is delivered once more, and its next dead letter has the same id. It returns an error when
// the letter is to be tried again.
func (q *deadLetters) carry(l *deadLetter) error {
	d := l.d
	ctx, cancel := context.WithTimeout(q.ctx, conn.PublishWait)
	defer cancel()
	ours, err := q.prolong(ctx, d)
	if l.unheard = err != nil; err != nil || !ours {
		return err // not ours: it may be another member's, and its next end decides
	}
	if !l.stored {
		if same, err := q.sameConsumer(ctx, d, l.added); err != nil || !same {
			return err
		}
		began := q.core.clock.Now()
		switch err := q.store(ctx, l); {
		case Refused(err) && !full(err):
			q.core.often.Log(ctx, slog.LevelWarn, "a stream refused a dead letter; the event will be delivered once more", d.group.source(),
				slog.String("topic", d.Event.Topic), slog.String("group", d.m.sub.group), slog.Any("error", err))
			d.forgetFailed()
			d.sendInTime(conn.NakAfter(q.core.cfg.deadRetry))
			return nil
		case err != nil:
			return err
		}
		l.stored = true
		if same, err := q.sameConsumer(ctx, d, began); err != nil || !same {
			return err
		}
	}
	if !q.usable(d) || d.moved() {
		return nil // there is nothing to settle any more
	}
	ctx, cancel = context.WithTimeout(q.ctx, settleWait)
	defer cancel()
	reply, err := d.m.sub.link.Request(ctx, d.reply, conn.Term)
	switch {
	case err != nil:
		return err
	case conn.NoResponders(reply):
		return nats.ErrNoResponders
	}
	d.group.settled(d)
	if w := d.m.sub.keeper; w != nil {
		w.buried(d)
	}
	q.mu.Lock()
	noted := l.noted != 0
	q.mu.Unlock()
	if noted {
		d.forgetFailed()
	}
	return nil
}

// store stores the letter. The payload is not kept while leased; it is read from the stream again.
func (q *deadLetters) store(ctx context.Context, l *deadLetter) error {
	d := l.d
	original := &d.Event
	if d.released || d.recast {
		e, err := q.reads.BySequence(ctx, d.group.topic, d.seq)
		if err != nil && !errors.Is(err, event.ErrNotFound) {
			return err
		}
		if err == nil {
			original = e
		} // else retention has removed it: what is known of it must do
	}
	return q.burials.store(ctx, deadEvent{original: original, group: d.m.sub.group, reason: l.failure.Reason, attempts: l.failure.Attempt, at: time.UnixMilli(l.failure.At), id: d.deadID()})
}

// prolong has the server confirm that it keeps the delivery for us, and reports whether it does. A
// failure that was told to a server that stood still must not dead-letter what another member has
// by now.
func (q *deadLetters) prolong(ctx context.Context, d *Delivery) (ours bool, err error) {
	if !q.usable(d) || d.moved() {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, settleWait)
	defer cancel()
	sent := q.core.clock.Now()
	reply, err := d.m.sub.link.Request(ctx, d.reply, conn.InProgress)
	if !q.usable(d) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if conn.NoResponders(reply) {
		if same, err := q.sameConsumer(ctx, d, 0); err == nil && !same {
			return false, nil // the group was deleted
		}
		return false, nats.ErrNoResponders // its leader may be changing
	}
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	d.keptSince(sent, q.core.clock.Now())
	return true, nil
}

// sameConsumer reports whether the group's consumer is the one that delivered d. One that was made
// anew under its name answers for it. The server is asked only if some time has passed since.
func (q *deadLetters) sameConsumer(ctx context.Context, d *Delivery, since int64) (bool, error) {
	if q.core.clock.Now()-since < int64(deadSure) {
		return true, nil
	}
	info, err := q.records.Consumer(ctx, d.group.topic, d.group.consumer)
	if gone(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return native.ConsumerMade(info).Equal(d.group.created), nil
}

func (q *deadLetters) usable(d *Delivery) bool {
	d.m.sub.mu.Lock()
	defer d.m.sub.mu.Unlock()
	return d.usable(q.core.clock.Now()) && d.cuts == d.m.sub.link.Cuts.Load()
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
// The times tell them from those of a stream or a consumer that was created again under its name.
func (d *Delivery) deadID() string {
	return native.DeadLetterID(d.group.topic.Stream.Name, d.group.topic.Stream.Created, d.seq, d.group.consumer, d.group.created)
}

// deadEvent is what a dead letter says.
type deadEvent struct {
	original *event.Event
	group    string
	reason   string
	attempts int
	at       time.Time
	id       string // of the letter
	whole    bool   // not without the payload, which is stored nowhere else
}

// full reports that a stream could not store a letter for want of room, which there may be later.
func full(err error) bool {
	refused, ok := errors.AsType[*conn.APIError](err)
	return ok && refused.ErrCode == streams.ErrCodeStoreFailed
}

// DeadLetter stores an event of the topic on dlq.<topic> as a failure of the group, and returns
// once it is stored. It settles nothing. It is for programs that read events in an order of their
// own, as projections do; the failure of a Delivery needs no such call. The dead letter keeps 1 KiB
// of reason. The same event of the same group is stored once within the duplicate window of the
// dead letters (24 h). It returns a bad_topic *Error for an event of another topic.
func (g Group) DeadLetter(ctx context.Context, e *event.Event, reason string, attempts int) error {
	if e.Topic != g.topic {
		return &event.Error{Code: event.CodeBadTopic, Msg: fmt.Sprintf("the event is of topic %s, and cannot fail for a group of %s", e.Topic, g.topic)}
	}
	if strings.HasPrefix(e.Topic, native.DeadLetterPrefix) {
		return nil // as for deliveries: dead letters have none of their own
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d group %s", e.Stream, e.Sequence, e.StoredAt, g.name))
	return g.bus.burials.store(ctx, deadEvent{
		original: e, group: g.name, reason: native.ShortReason(reason), attempts: attempts, at: time.Now(), id: "dlq:" + hex.EncodeToString(sum[:16]),
	})
}

func (l *deadEvent) letter() *native.DeadLetter {
	return &native.DeadLetter{Group: l.group, Original: l.original, Reason: l.reason, Attempts: l.attempts, At: l.at}
}
