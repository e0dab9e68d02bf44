package bench

import (
	"bytes"
	"fmt"
	"strconv"
	"time"
)

// A payload is a heartbeat, padded to its size by a string. It begins with the event's number and
// the time at which it was due, at fixed offsets, so that writing and reading them is cheap.
const (
	payloadHead  = `{"seq":"0000000000","at":"000000000000000"`
	payloadBody  = `,"pid":12345,"name":"stt","host":"dev","cpu_pct":12.3,"mem_mb":256`
	payloadPad   = `,"pad":"`
	payloadTail  = `"}`
	seqAt        = len(`{"seq":"`)
	seqDigits    = 10
	timeAt       = seqAt + seqDigits + len(`","at":"`)
	timeDigits   = 15
	minPayload   = len(payloadHead) + len(payloadPad) + len(payloadTail)
	maxEvents    = 1_000_000_000
	headerLength = len(payloadHead)
)

// started is the zero of payload times. Differences from it use the monotonic clock.
var started = time.Now()

// now returns the current payload time in nanoseconds.
func now() int64 { return int64(time.Since(started)) }

// newPayload returns a payload of size bytes. size must be at least minPayload.
func newPayload(size int) []byte {
	var b bytes.Buffer
	b.WriteString(payloadHead)
	if b.Len()+len(payloadBody)+len(payloadPad)+len(payloadTail) <= size {
		b.WriteString(payloadBody)
	}
	b.WriteString(payloadPad)
	b.Write(bytes.Repeat([]byte{'x'}, size-b.Len()-len(payloadTail)))
	b.WriteString(payloadTail)
	return b.Bytes()
}

// stamp writes an event's number and time into a payload.
func stamp(payload []byte, seq int, at int64) {
	putDigits(payload[seqAt:seqAt+seqDigits], int64(seq))
	putDigits(payload[timeAt:timeAt+timeDigits], at)
}

func putDigits(b []byte, n int64) {
	for i := len(b) - 1; i >= 0; i-- {
		b[i] = byte('0' + n%10)
		n /= 10
	}
}

// readStamp returns the values that stamp wrote.
func readStamp(payload []byte) (seq int, at int64, err error) {
	if len(payload) < minPayload || string(payload[:seqAt]) != payloadHead[:seqAt] {
		return 0, 0, fmt.Errorf("payload not from this benchmark: %.60q", payload)
	}
	seq, err = strconv.Atoi(string(payload[seqAt : seqAt+seqDigits]))
	if err != nil {
		return 0, 0, fmt.Errorf("parse the number of a payload: %w", err)
	}
	at, err = strconv.ParseInt(string(payload[timeAt:timeAt+timeDigits]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("parse the time of a payload: %w", err)
	}
	return seq, at, nil
}
