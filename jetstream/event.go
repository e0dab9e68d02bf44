package jetstream

// Event is one stored event: the record that clients see (protocol section 1), and where it lies.
//
// An Event is owned by whoever received it. Payload may share memory with the message it came in
// and must not be changed.
type Event struct {
	// ID is the id that the publisher gave, or the hub made (UUIDv7), or <stream>@<sequence> for an
	// event that a native NATS client published without one.
	ID string
	// TS is the record's ts in epoch milliseconds: what the publisher said, else when the stream
	// stored the event.
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
	// Payload is the body, byte for byte as published. It need not be JSON.
	Payload []byte
	// Tombstone is set when the event removes its key from a compacted topic. Its payload is null,
	// or empty.
	Tombstone bool
	// Stream and Sequence say where the event lies, or lay: the stream keeps events for a while
	// only, the bucket of a compacted topic keeps the newest of each key.
	Stream   string
	Sequence uint64
	// Gone is set by Keys.Get when the stream does not hold the event any more, and only the bucket
	// does: the key has no event in the stream, so a publish with ExpectKeySequence expects 0.
	Gone bool
	// StoredAt is when the stream stored the event, in epoch nanoseconds; when it was read from a
	// bucket, it is when the bucket did, which is later: by less than a millisecond usually, and by
	// more for what was there before the bucket was.
	StoredAt int64
}
