package jetstream

import (
	"strings"

	"eventhub/jetstream/native"
)

// Event is one stored event: the record that clients see (protocol section 1), and where it lies.
// Native NATS clients read events as the same type, which package native describes.
type Event = native.Event

// PayloadLevels is the number of JSON levels that may surround a payload on its way to a client:
// see native.PayloadLevels.
const PayloadLevels = native.PayloadLevels

// ValidPayload reports whether a record can carry b unchanged: see native.ValidPayload.
func ValidPayload(b []byte) bool { return native.ValidPayload(b) }

// hasHeaders reports whether the event's headers have all these values. Names are compared in any
// case.
func hasHeaders(e *Event, wanted map[string]string) bool {
	for name, value := range wanted {
		if got, ok := e.Headers[name]; ok && got == value {
			continue
		}
		found := false
		for have, got := range e.Headers {
			found = found || got == value && strings.EqualFold(have, name)
		}
		if !found {
			return false
		}
	}
	return true
}
