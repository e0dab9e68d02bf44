package jetstream

import (
	"strings"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
)

// PayloadLevels is the number of JSON levels that may surround a payload on its way to a client:
// see native.PayloadLevels.
const PayloadLevels = native.PayloadLevels

// ValidPayload reports whether a record can carry b unchanged: see native.ValidPayload.
func ValidPayload(b []byte) bool { return native.ValidPayload(b) }

// hasHeaders reports whether the event's headers have all these values. Names are compared in any
// case.
func hasHeaders(e *event.Event, wanted map[string]string) bool {
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
