package jetstream

import "eventhub/jetstream/internal/publish"

// Refused reports whether err, the error of a publish, is a refusal by the stream, for example
// because the stream is full or the event is too large. Nothing was stored then, and NATS is
// reachable. A cluster without a leader refuses nothing: it answers so until it has one. Nor does a
// stream that has begun to store an event with the same id, nor a NATS that has no room for any
// event.
func Refused(err error) bool { return publish.Refused(err) }
