// Package event has the words that all parts of the bus share: what was stored, how requests fail,
// and what observers and tracers are called with. Package jetstream repeats these names, except
// BadOptions, NopObserver and PayloadMargin, so a program that uses the bus seldom imports package
// event.
//
// The main names are Event, Error with its Code constants, Observer and Tracer.
package event

import "eventhub/jetstream/native"

// Event is one stored event: the record that clients see (protocol section 1), and where it lies.
// Native NATS clients read events as the same type, which package native describes.
type Event = native.Event

// PayloadMargin is how many bytes headers, and the wrapping of a dead letter, may add to a payload.
const PayloadMargin = 64 << 10

// Receipt is the result of a confirmed publish.
type Receipt struct {
	// ID is the event's id.
	ID string
	// Stream and Sequence are the position of the event. For a duplicate, they are the position of
	// the event that was stored before. They are empty for an event that waits (Delay, At).
	Stream   string
	Sequence uint64
	// Duplicate is set when an event of that id was stored already, and nothing was stored now.
	Duplicate bool
}
