package eventhub

import (
	"context"
	"encoding/json"
	"time"

	"eventhub/sdk/go/wire"
)

// Event is an event, as it is stored.
type Event struct {
	ID string `json:"id"`
	// TS is in epoch milliseconds.
	TS       int64             `json:"ts"`
	Topic    string            `json:"topic"`
	Key      string            `json:"key,omitempty"`
	SID      string            `json:"sid,omitempty"`
	Headers  map[string]string `json:"headers,omitempty"`
	CausedBy []string          `json:"caused_by,omitempty"`
	Tags     []string          `json:"tags,omitempty"`
	// Payload is JSON, byte for byte as it was published.
	Payload json.RawMessage `json:"payload"`
}

// Decode decodes the payload into v, as json.Unmarshal does.
func (e *Event) Decode(v any) error {
	if err := json.Unmarshal(e.Payload, v); err != nil {
		return invalidPayload(err)
	}
	return nil
}

// phase is how far this client is with a delivery.
type phase int

const (
	waiting phase = iota // for a handler
	running              // in a handler
	open                 // its handler is done, and the user settles the event
)

// Delivery is an event in the hands of this client: a lease, which ends when the event is settled
// or when its time is over. Its methods may be called concurrently.
type Delivery struct {
	Event

	// Group is the group of the subscription.
	Group string
	// Attempt counts the deliveries of this event to the group, from 1. It may skip numbers.
	Attempt int
	// Partition is the slot of the key in an ordered group, and -1 elsewhere or without a key.
	Partition int
	// Deadline is when the lease ended or ends, unless it is prolonged, by this machine's clock.
	Deadline time.Time

	sub *Subscription
	raw wire.Event

	// The fields that follow are guarded by Subscription.mu.

	phase   phase
	settled bool // by the handler or for it
	acked   bool // settled by an acknowledgement
	lost    bool // the lease has ended without being settled: the hub delivers the event again
	// again is the same event, delivered anew while its handler still runs.
	again  *Delivery
	due    time.Time // when the lease is prolonged next
	until  time.Time // the lease is not prolonged after
	ends   time.Time // when the lease ends, as far as this client knows
	cancel context.CancelCauseFunc
}

// decodeMore decodes the fields of a record that package wire does not.
func (e *Event) decodeMore(record []byte) {
	// The hub's JSON is valid. The payload is not decoded twice.
	var more struct {
		SID      string            `json:"sid"`
		Headers  map[string]string `json:"headers"`
		CausedBy []string          `json:"caused_by"`
		Tags     []string          `json:"tags"`
	}
	if json.Unmarshal(record, &more) == nil {
		e.SID, e.Headers, e.CausedBy, e.Tags = more.SID, more.Headers, more.CausedBy, more.Tags
	}
}

func newDelivery(s *Subscription, raw wire.Event) *Delivery {
	d := &Delivery{
		Event:   Event{ID: raw.ID, TS: raw.TS, Topic: raw.Topic, Key: raw.Key, Payload: raw.Payload},
		Group:   s.group,
		Attempt: raw.Attempt, Partition: raw.Partition, Deadline: raw.Deadline, ends: raw.Deadline,
		sub: s, raw: raw,
	}
	if raw.More {
		d.decodeMore(raw.Record)
	}
	return d
}

// Record returns the event record, byte for byte as the hub sent it. It is not to be changed.
func (d *Delivery) Record() []byte { return d.raw.Record }

// Ack settles the event. It returns false if the lease is over, and then the event comes again, or
// if the event is settled already.
func (d *Delivery) Ack() bool { return d.sub.ack(d) }

// DefaultBackoff leaves the delay of a Nack to the hub: 50 ms, doubled per attempt up to 10 s.
const DefaultBackoff = wire.DefaultBackoff

// Nack refuses the event. It is delivered again after delay, or after DefaultBackoff, or becomes a
// dead letter with the reason after its last attempt. Nack returns false as Ack does.
func (d *Delivery) Nack(reason string, delay time.Duration) bool { return d.sub.nack(d, reason, delay) }

// Extend sets the lease to end so long from now, at least 1 s. It returns false if the lease is
// over.
func (d *Delivery) Extend(by time.Duration) bool { return d.sub.extend(d, by) }

// lose notes that the lease has ended. Subscription.mu is held.
func (d *Delivery) lose() {
	d.lost = true
	if d.cancel != nil {
		d.cancel(errLeaseLost)
	}
}
