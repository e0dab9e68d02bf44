package native

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Delivery is an event that a member of a group has, until the member settles it by Ack or Nack, or
// loses it: AckWait after it arrived, unless Keep prolongs that. Its methods may be called
// concurrently.
type Delivery struct {
	// Event is the event.
	Event *Event
	// Attempt counts how often the event was handed to a member of the group, from 1. It counts the
	// attempts of members that have connected to a hub, too.
	Attempt int

	group   *Group
	msg     natsjs.Msg
	meta    *natsjs.MsgMetadata
	at      place
	server  string        // the id of the server that the client was connected to
	settled chan struct{} // closed when the member has settled it

	mu      sync.Mutex
	over    bool
	kept    time.Time // when the server last knew that this member has it
	refused *refusal  // a Nack without a connection
}

// refusal is a Nack that was not sent.
type refusal struct {
	reason string
	delay  time.Duration
}

// DefaultDelay as the delay of a Nack leaves the delay to the package: see Backoff.
const DefaultDelay time.Duration = -1

// Receive makes a Delivery of a message that a pull of the group's consumer has brought. Call it
// when the message arrives, because the time of the Delivery runs from then on. It returns nil, and
// no error, for an event that needs no handling: one that the group had settled before it went back
// to a bookmark is acknowledged, and one whose last attempt is over is dead-lettered.
func (g *Group) Receive(ctx context.Context, msg natsjs.Msg) (*Delivery, error) {
	return g.receive(ctx, msg, time.Now())
}

func (g *Group) receive(ctx context.Context, msg natsjs.Msg, arrived time.Time) (*Delivery, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return nil, fmt.Errorf("native: message on %s: %w", msg.Subject(), err)
	}
	event, err := Decode(msg)
	if err != nil {
		return nil, err
	}
	d := &Delivery{Event: event, group: g, msg: msg, meta: meta, at: g.at(), kept: arrived, server: g.client.js.Conn().ConnectedServerId(), settled: make(chan struct{})}
	if Covered(d.at.settled, meta.Sequence.Stream) {
		return nil, d.Ack()
	}
	note := d.note(ctx)
	d.Attempt = max(int(meta.NumDelivered)-note.Spared, 1) + AttemptsBefore(d.at.tried, meta.Sequence.Stream) //nolint:gosec // a count of deliveries
	if f := note.Failed; f != nil {
		return nil, d.deadLetter(ctx, &DeadLetter{Group: g.name, Original: event, Reason: f.Reason, Attempts: f.Attempt, At: time.UnixMilli(f.At)})
	}
	return d, nil
}

// A delivery waits noteWait for what hubs have noted of it. Without an answer, the group asks for
// no notes for noteRest: a token with a policy is not permitted to.
const (
	noteWait = 2 * time.Second
	noteRest = time.Minute
)

// note reads what hubs have noted of an event that was delivered before. Without an answer, every
// delivery counts for an attempt. The end of ctx does not cut the question short: the handler may
// run all the same, and a count that is too high may make this attempt the last.
func (d *Delivery) note(ctx context.Context) AttemptNote {
	if d.meta.NumDelivered <= 1 {
		return AttemptNote{}
	}
	g := d.group
	g.mu.Lock()
	rests := time.Now().Before(g.noted)
	g.mu.Unlock()
	if rests {
		return AttemptNote{}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), noteWait)
	defer cancel()
	var note AttemptNote
	value := d.entry(ctx, d.meta.Sequence.Stream)
	if value != nil {
		note, _ = ParseNote(value)
	}
	if note.Spared < 0 {
		return note
	}
	var runs SparedRuns
	if value := d.entry(ctx, 0); json.Unmarshal(value, &runs) == nil {
		note.Spared = max(note.Spared, min(runs.Of(d.meta.Sequence.Stream), int(d.meta.NumDelivered)-1)) //nolint:gosec // a count of deliveries
	}
	return note
}

// entry reads an entry about the group's consumer; nil: there is none, or no answer.
func (d *Delivery) entry(ctx context.Context, seq uint64) []byte {
	g := d.group
	value, err := g.client.entry(ctx, AttemptsBucket, NoteKey(d.meta.Stream, d.meta.Consumer, ConsumerMade(d.at.consumer.CachedInfo()), seq))
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrNotPermitted) {
		g.mu.Lock()
		g.noted = time.Now().Add(noteRest)
		g.mu.Unlock()
	}
	if err != nil {
		return nil
	}
	return value
}

// ackWait is how long the server waits for this member.
func (d *Delivery) ackWait() time.Duration {
	return max(d.at.consumer.CachedInfo().Config.AckWait, time.Second)
}

// held reports whether the server surely still keeps the event for this member. A server that was
// restarted may have forgotten that, and another server may lead the consumer. d.mu is held.
func (d *Delivery) held() bool {
	if now := d.group.client.js.Conn().ConnectedServerId(); now != "" && d.server != "" && now != d.server {
		return false
	}
	return !d.over && time.Since(d.kept) < d.ackWait()-Margin(d.ackWait())
}

// heldOr returns ErrNotHeld if this member has lost the event, and else err.
func (d *Delivery) heldOr(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held() {
		return ErrNotHeld
	}
	return err
}

// settle ends the delivery, if this member still has it.
func (d *Delivery) settle() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held() {
		return ErrNotHeld
	}
	if !d.group.client.js.Conn().IsConnected() {
		return ErrNotConnected
	}
	d.over = true
	close(d.settled)
	return nil
}

// whenConnected settles the event, and waits for the connection if there is none, as long as this
// member holds the event.
func (d *Delivery) whenConnected(ctx context.Context, settle func() error) error {
	for {
		err := settle()
		if !errors.Is(err, ErrNotConnected) || d.group.client.js.Conn().IsClosed() {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retryFirst):
		}
	}
}

// unsent returns the Nack that was not sent, or nil.
func (d *Delivery) unsent() *refusal {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.refused
}

// Ack settles the event for the group. It does not wait for the server. It returns ErrNotHeld when
// this member does not have the event any more, and ErrNotConnected when there is no connection.
func (d *Delivery) Ack() error {
	if err := d.settle(); err != nil {
		return err
	}
	return d.msg.Ack()
}

// Nack refuses the event: it comes again, to any member, after delay. At the last attempt
// (GroupOptions.MaxAttempts), the event goes to dlq.<topic> instead, with the first 1 KiB of
// reason; Nack then returns when it is stored there. Events of dlq topics are never dead-lettered.
// It returns ErrNotHeld when this member does not have the event any more, and ErrNotConnected when
// there is no connection; Group.Consume then refuses the event when the connection is back.
func (d *Delivery) Nack(ctx context.Context, reason string, delay time.Duration) error {
	err := d.nack(ctx, reason, delay)
	if errors.Is(err, ErrNotConnected) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.refused = &refusal{reason, delay}
	}
	return err
}

func (d *Delivery) nack(ctx context.Context, reason string, delay time.Duration) error {
	if limit := d.group.opts.MaxAttempts; limit != NeverGiveUp && d.Attempt >= limit && d.Event.Topic+"." != DeadLetterPrefix && !strings.HasPrefix(d.Event.Topic, DeadLetterPrefix) {
		if reason == "" {
			reason = "refused"
		}
		return d.deadLetter(ctx, &DeadLetter{Group: d.group.name, Original: d.Event, Reason: ShortReason(reason), Attempts: d.Attempt, At: time.Now()})
	}
	if err := d.settle(); err != nil {
		return err
	}
	if delay < 0 {
		delay = Backoff(d.Attempt)
	}
	if delay == 0 {
		return d.msg.Nak()
	}
	return d.msg.NakWithDelay(delay)
}

// Keep has the server wait for another AckWait, and returns when the server has confirmed that. It
// returns ErrNotHeld when this member does not have the event any more.
func (d *Delivery) Keep(ctx context.Context) error {
	if err := d.heldOr(nil); err != nil {
		return err
	}
	sent := time.Now()
	if err := d.request(ctx, "+WPI"); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.held() { // the answer came too late to say whose the event is
		return ErrNotHeld
	}
	d.kept = sent
	return nil
}

// request tells the server about the delivery, and waits for the answer.
func (d *Delivery) request(ctx context.Context, what string) error {
	ctx, cancel := within(ctx)
	defer cancel()
	_, err := d.group.client.js.Conn().RequestWithContext(ctx, d.msg.Reply(), []byte(what))
	if errors.Is(err, nats.ErrNoResponders) {
		return ErrNotHeld // the consumer is gone
	}
	if err != nil {
		return fmt.Errorf("native: %s for event %s: %w", what, d.Event.ID, err)
	}
	return nil
}

// keepWhile keeps the event until ctx ends, or it is settled. When it is lost, it calls lose.
func (d *Delivery) keepWhile(ctx context.Context, lose func()) {
	every := (d.ackWait() - Margin(d.ackWait())) / 3
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.settled:
			return
		case <-tick.C:
		}
		asking, cancel := context.WithTimeout(ctx, every)
		err := d.Keep(asking)
		cancel()
		if errors.Is(err, ErrNotHeld) {
			lose()
			return
		}
	}
}

// DeadLetterMargin is what the headers of a dead letter may take of the server's max_payload.
const DeadLetterMargin = 4 << 10

// deadRetry is when an event comes again whose dead letter could not be stored.
const deadRetry = 10 * time.Second

// deadLetter stores the letter, and then settles the event. A member that dies between the two
// leaves an event that comes again, and whose next dead letter has the same id, unless one of the
// members may see the stream and the next may not.
func (d *Delivery) deadLetter(ctx context.Context, l *DeadLetter) error {
	if !d.group.client.js.Conn().IsConnected() {
		return d.heldOr(ErrNotConnected)
	}
	if err := d.Keep(ctx); err != nil {
		return err // what is not ours any more is not ours to dead-letter
	}
	if err := d.storeLetter(ctx, l); err != nil {
		if d.settle() == nil {
			_ = d.msg.NakWithDelay(deadRetry)
		}
		return err
	}
	if err := d.settle(); err != nil {
		return err
	}
	return d.request(ctx, "+TERM")
}

func (d *Delivery) storeLetter(ctx context.Context, l *DeadLetter) error {
	c, topic := d.group.client, DeadLetterPrefix+d.Event.Topic
	fields := Fields{ID: DeadLetterID(d.meta.Stream, d.at.made, d.meta.Sequence.Stream, d.meta.Consumer, ConsumerMade(d.at.consumer.CachedInfo()))}
	bare := false
	payload := l.Append(nil)
	if len(payload) > int(c.js.Conn().MaxPayload())-DeadLetterMargin {
		bare, payload = true, l.WithoutPayload().Append(nil)
	}
	for {
		msg, err := c.message(ctx, topic, payload, &fields)
		if err != nil {
			return err
		}
		msg.Header.Set(HeaderOriginal, Origin(d.Event.Stream, d.Event.Sequence, d.Event.StoredAt, d.Event.Tombstone, bare))
		ctx, cancel := within(ctx)
		_, err = c.js.PublishMsg(ctx, msg)
		cancel()
		if refused, ok := errors.AsType[*natsjs.APIError](err); ok && refused.ErrorCode == codeTooLarge && !bare {
			bare, payload = true, l.WithoutPayload().Append(nil)
			continue
		}
		if err != nil {
			return fmt.Errorf("native: store a dead letter on %s: %w", topic, err)
		}
		return nil
	}
}

// codeTooLarge is the server's error for a message beyond the stream's max_msg_size.
const codeTooLarge natsjs.ErrorCode = 10054
