package jetstream

import (
	"context"
	"strings"
	"time"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// The reads that publishing is given as hooks.

// eachKey calls f for the keys in the bucket of a topic, and says of each whether it is removed.
func (b *Bus) eachKey(ctx context.Context, t *streams.Topic, f func(key string, removed bool)) error {
	return b.messages.Through(ctx, t.Bucket.Stream, reading.Query{HeadersOnly: true}, func(m *conn.StoredMsg) error {
		if key, ok := strings.CutPrefix(m.Subject, t.Bucket.Prefix); ok {
			op := m.Header.Get(native.HeaderOperation)
			f(native.ParseKeyToken(key), op != "" && op != "PUT")
		}
		return nil
	})
}

// hasKey reports whether a topic has a value of a key, by its leader.
func (b *Bus) hasKey(ctx context.Context, t *streams.Topic, key string) bool {
	_, err := b.reads.Latest(ctx, t, key)
	return err == nil
}

// eachID calls f for the ids of the events of a topic since a time, for at most most of them.
func (b *Bus) eachID(ctx context.Context, t *streams.Topic, since time.Time, most int, f func(id string)) error {
	return b.reads.Walk(ctx, t, reading.Query{Since: since, Max: most, HeadersOnly: true}, func(m *conn.StoredMsg) error {
		f(native.StoredID(m.Header, t.Stream.Name, m.Seq))
		return nil
	})
}

// storedIDs reports which of some ids a topic has since a time.
func (b *Bus) storedIDs(ctx context.Context, topic string, ids []string, since time.Time) (found map[string]bool, complete bool, err error) {
	return b.reads.FindIDs(ctx, topic, reading.IDSearch{IDs: ids, Since: since})
}
