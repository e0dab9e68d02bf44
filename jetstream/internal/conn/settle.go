package conn

import (
	"strconv"
	"time"
)

// What a subscriber says to the server about a delivery.
var (
	AckNow     = []byte("+ACK")
	NakNow     = []byte("-NAK")
	InProgress = []byte("+WPI")
	Term       = []byte("+TERM")
)

// NakAfter refuses a delivery until the delay is over.
func NakAfter(delay time.Duration) []byte {
	if delay == 0 {
		return NakNow
	}
	return append(strconv.AppendInt([]byte(`-NAK {"delay":`), int64(delay), 10), '}')
}
