package native

// Event is one stored event: the record that clients see, and where it lies.
//
// The receiver owns an Event. Payload may share memory with the message in which it arrived, and
// must not be changed.
type Event struct {
	// ID is the id from the publisher, or a UUIDv7 from the hub. It is <stream>@<sequence> for an
	// event that a native NATS client published without an id.
	ID string
	// TS is the record's ts in epoch milliseconds: the publisher's value, or the time of storage
	// without one.
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
	// Partition is the slot of the key, in deliveries to members of ordered groups; HasPartition
	// says that there is one.
	Partition    int
	HasPartition bool
	// Payload is the body, byte for byte as published. It need not be JSON.
	Payload []byte
	// Tombstone is set when the event removes its key from a compacted topic. Its payload is null,
	// or empty.
	Tombstone bool
	// Stream and Sequence are the position of the event. The stream may have removed the event
	// since; the bucket of a compacted topic keeps the newest event of each key.
	Stream   string
	Sequence uint64
	// Gone is set by Keys.Get of package jetstream when only the bucket still holds the event. The
	// stream then has no event of the key, so a publish with ExpectKeySequence must expect 0.
	Gone bool
	// StoredAt is the time of storage in epoch nanoseconds. For an event from the stream, it is the
	// time of the stream. For an event from a bucket, it is the time of the bucket, which is
	// usually less than a millisecond later, and more for events that are older than the bucket.
	StoredAt int64
}
