package jetstream

import (
	"context"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/topics"
)

// Admin has the operations of operators on the streams of a bus. An Admin is a small value that
// costs nothing to create. Its methods may be called concurrently. Their errors are for operators:
// they name the server and the cause.
type Admin struct{ bus *Bus }

// Admin gives access to the streams behind the topics.
func (b *Bus) Admin() Admin { return Admin{b} }

// Snapshots returns the rules that are in force and request snapshots, the built-in rules included.
// Each is for one topic, and its Every is filled in.
func (a Admin) Snapshots() []topics.Rule {
	return a.bus.rules.Snapshots()
}

// admin has what operators look at and change: topics, rules, buckets, replicas, and the figures of
// groups.
type admin struct {
	*core
	streams    *streams.Streams
	reads      *reading.Reads
	records    *records.Records
	publishers *publish.Publishers
	adminHooks adminHooks

	lagEvents lagEvents
}

// adminHooks are called by admin, for what members of this hub know and do. They are set before the
// bus is open.
type adminHooks struct {
	// members returns how many members of a group with this consumer the hub has.
	members func(t *streams.Topic, consumer string) int
	// seen takes what the server has said of a consumer.
	seen func(info *natsjs.ConsumerInfo)
	// stuckSince returns since when a group is stuck; the zero time if it is not.
	stuckSince func(info *natsjs.ConsumerInfo) time.Time
	// deleteGroup deletes a group.
	deleteGroup func(ctx context.Context, topic, group string) error
}

func newAdmin(c *core, s *streams.Streams, r *reading.Reads, records *records.Records, p *publish.Publishers) *admin {
	return &admin{core: c, streams: s, reads: r, records: records, publishers: p}
}
