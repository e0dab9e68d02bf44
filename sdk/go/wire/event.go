package wire

import (
	"bytes"
	"context"
	"fmt"
	"strconv"
	"time"
)

// DefaultBackoff is the delay of a Nack that leaves the delay to the hub: 50 ms, doubled per
// attempt up to 10 s.
const DefaultBackoff time.Duration = -1

// Event is one delivery: an event that is leased to this subscription until Deadline. It owns its
// bytes. Its methods may be called concurrently.
type Event struct {
	// Record is the event record, byte for byte as the hub sent it.
	Record []byte
	// ID, TS (epoch milliseconds), Topic, Key ("" when there is none) and Payload are fields of the
	// record. Payload shares memory with Record.
	ID      string
	TS      int64
	Topic   string
	Key     string
	Payload []byte
	// Partition is the slot of the key in an ordered group, and -1 elsewhere or without a key.
	Partition int
	// More reports whether Record has other fields besides, such as headers.
	More bool
	// Attempt counts the deliveries of this event to the group, from 1. It may skip numbers.
	Attempt int
	// Deadline is when the lease ends, by this machine's clock. ModAck moves the end of the lease
	// but not this field.
	Deadline time.Time

	sub *Subscription
}

// newEvent copies what it keeps of f.
func newEvent(f *frame, sub *Subscription, now time.Time) (Event, error) {
	record := append([]byte(nil), f.event...)
	if err := eachField(record, f.setRecord); err != nil {
		return Event{}, err
	}
	if err := eachField(f.ctx, f.setContext); err != nil {
		return Event{}, err
	}
	ev := Event{Record: record, Payload: f.payload, Topic: sub.topic, More: f.recMore, sub: sub}
	var err error
	if ev.ID, err = text(f.recID); err != nil {
		return Event{}, err
	}
	if !bytes.Equal(f.recTopic, sub.topicJSON) { // of a further topic
		if ev.Topic, err = text(f.recTopic); err != nil {
			return Event{}, err
		}
	}
	if f.recKey != nil {
		if ev.Key, err = text(f.recKey); err != nil {
			return Event{}, err
		}
	}
	ev.Partition = -1
	if f.recSlot != nil {
		if ev.Partition, err = strconv.Atoi(string(f.recSlot)); err != nil {
			return Event{}, fmt.Errorf("%w: partition: %w", errFrame, err)
		}
	}
	if ev.TS, err = strconv.ParseInt(string(f.recTS), 10, 64); err != nil {
		return Event{}, fmt.Errorf("%w: ts: %w", errFrame, err)
	}
	if ev.Attempt, err = strconv.Atoi(string(f.attempt)); err != nil {
		return Event{}, fmt.Errorf("%w: attempt: %w", errFrame, err)
	}
	left, err := strconv.ParseInt(string(f.deadline), 10, 64)
	if err != nil {
		return Event{}, fmt.Errorf("%w: ack_deadline_ms: %w", errFrame, err)
	}
	ev.Deadline = now.Add(time.Duration(left) * time.Millisecond)
	return ev, nil
}

// Ack settles the event and does not wait for the hub's answer.
func (e *Event) Ack() error { return e.sub.client.post(e.settle("ACK")) }

// AckWait settles the event and waits for the hub's answer, which is OK even when the lease has
// ended.
func (e *Event) AckWait(ctx context.Context) error {
	return e.sub.client.request(ctx, e.settle("ACK"))
}

// Nack refuses the event and does not wait for the hub's answer. The event is redelivered after
// delay, which is rounded down to milliseconds and at most 12 h, or after DefaultBackoff.
func (e *Event) Nack(reason string, delay time.Duration) error {
	return e.sub.client.post(e.nack(reason, delay))
}

// NackAsync is Nack with an answer, which done receives. done must not block.
func (e *Event) NackAsync(reason string, delay time.Duration, done func(error)) error {
	return e.sub.ask(e.nack(reason, delay), done)
}

// NackWait is Nack and waits for the hub's answer.
func (e *Event) NackWait(ctx context.Context, reason string, delay time.Duration) error {
	return e.sub.client.request(ctx, e.nack(reason, delay))
}

// ModAck makes the lease end d from now, at least 1 s, and does not wait for the hub's answer. With
// 0, the lease lasts for the subscription's AckTimeoutMS.
func (e *Event) ModAck(d time.Duration) error { return e.sub.client.post(e.modAck(d)) }

// ModAckAsync is ModAckWait, and done receives the answer. done must not block.
func (e *Event) ModAckAsync(d time.Duration, done func(error)) error {
	return e.sub.ask(e.modAck(d), done)
}

// ModAckWait is ModAck and waits for the hub's answer: an *Error with the code unknown_id when the
// lease has ended.
func (e *Event) ModAckWait(ctx context.Context, d time.Duration) error {
	return e.sub.client.request(ctx, e.modAck(d))
}

func (e *Event) settle(op string) func([]byte) []byte {
	return func(b []byte) []byte { return appendField(e.sub.frame(b, op), "id", e.ID) }
}

func (e *Event) nack(reason string, delay time.Duration) func([]byte) []byte {
	return func(b []byte) []byte {
		b = appendField(e.settle("NACK")(b), "reason", reason)
		if delay >= 0 {
			b = append(b, `,"delay_ms":`...)
			b = strconv.AppendInt(b, delay.Milliseconds(), 10)
		}
		return b
	}
}

func (e *Event) modAck(d time.Duration) func([]byte) []byte {
	return func(b []byte) []byte {
		b = append(e.settle("MODACK")(b), `,"extend_ms":`...)
		return strconv.AppendInt(b, d.Milliseconds(), 10)
	}
}
