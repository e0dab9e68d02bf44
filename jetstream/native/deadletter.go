package native

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream/jsonscan"
)

// MaxReason is how many bytes of the reason a dead letter keeps.
const MaxReason = 1024

// DeadLetter is an event that failed for a group for the last time. It is the payload of an event
// on the topic dlq.<topic>.
type DeadLetter struct {
	Group    string
	Original *Event
	// Reason is why the last attempt failed; see ShortReason.
	Reason   string
	Attempts int
	At       time.Time
}

// Append appends the payload of the dead letter to dst.
func (l *DeadLetter) Append(dst []byte) []byte {
	dst = jsonscan.AppendString(append(dst, `{"topic":`...), l.Original.Topic)
	dst = jsonscan.AppendString(append(dst, `,"group":`...), l.Group)
	dst = l.Original.AppendRecord(append(dst, `,"original":`...))
	dst = jsonscan.AppendString(append(dst, `,"err":`...), l.Reason)
	dst = strconv.AppendInt(append(dst, `,"ts":`...), l.At.UnixMilli(), 10)
	dst = strconv.AppendInt(append(dst, `,"attempts":`...), int64(l.Attempts), 10)
	return append(dst, '}')
}

// WithoutPayload returns the dead letter without the payload of the event, for one that does not
// fit into a message. The reason then says where the payload is.
func (l *DeadLetter) WithoutPayload() *DeadLetter {
	bare, original := *l, *l.Original
	bare.Reason += fmt.Sprintf(" (payload of %d bytes left out: it is at %s)", len(original.Payload), Place(original.Stream, original.Sequence))
	original.Payload = nil
	bare.Original = &original
	return &bare
}

// ShortReason returns the first MaxReason bytes of a reason.
func ShortReason(reason string) string {
	if len(reason) > MaxReason {
		return strings.ToValidUTF8(reason[:MaxReason], "") + "…"
	}
	return reason
}

// DeadLetterID names the failure of one event in one generation of one group, so that it is stored
// once. The times, at which the stream and the consumer were made, tell them from others that were
// made again under their names.
func DeadLetterID(stream string, streamMade time.Time, seq uint64, consumer string, consumerMade time.Time) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %d %s %d", stream, streamMade.UnixNano(), seq, consumer, consumerMade.UnixNano()))
	return "dlq:" + hex.EncodeToString(sum[:16])
}

// Origin returns the value of HeaderOriginal of a dead letter: the place of the event, the time of
// its storage in epoch nanoseconds, and flags.
func Origin(stream string, seq uint64, storedAt int64, tombstone, bare bool) string {
	s := stream + " " + strconv.FormatUint(seq, 10) + " " + strconv.FormatInt(storedAt, 10) + " -"
	if tombstone {
		s += "t"
	}
	if bare {
		s += "b"
	}
	return s
}
