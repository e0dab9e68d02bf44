package jetstream

// Event is one stored event: the record that clients see (protocol section 1), and where it lies.
//
// An Event is owned by whoever received it. Payload may share memory with the message it came in and must not be
// changed.
type Event struct {
	// ID is the id that the publisher gave, or the hub made (UUIDv7), or <stream>@<sequence> for an event that a
	// native NATS client published without one.
	ID string
	// TS is the record's ts in epoch milliseconds: what the publisher said, else when the stream stored the event.
	TS int64
	// Topic is the event's own topic.
	Topic string
	// Key is the compaction key, or "".
	Key string
	// SID, Headers, CausedBy and Tags are as published; empty when unset.
	SID      string
	Headers  map[string]string
	CausedBy []string
	Tags     []string
	// Payload is the body, byte for byte as published. Events from native clients need not be JSON.
	Payload []byte
	// Stream and Sequence say where the event lies.
	Stream   string
	Sequence uint64
	// StoredAt is when the stream stored the event, in epoch nanoseconds.
	StoredAt int64
}
