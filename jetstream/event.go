package jetstream

import (
	"eventhub/jetstream/native"
)

// PayloadLevels is the number of JSON levels that may surround a payload on its way to a client:
// see native.PayloadLevels.
const PayloadLevels = native.PayloadLevels

// ValidPayload reports whether a record can carry b unchanged: see native.ValidPayload.
func ValidPayload(b []byte) bool { return native.ValidPayload(b) }
