package records

import (
	"context"
	"log/slog"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/reading"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/pacedlog"
)

// Records reads and writes what hubs note about groups. Its methods may be called concurrently.
type Records struct {
	Config
	Hooks  Hooks
	Makers *Makers
	// Retention is about what retention did to groups.
	Retention *Retention

	kv      natsjs.KeyValue // of the generations; nil until Open
	unsaved unsaved
}

// Config is what a Records is given.
type Config struct {
	Conn     *conn.Pool
	Streams  *streams.Streams
	Messages *reading.Messages
	// OpenBucket opens a bucket that hubs share, and makes it if it is not there.
	OpenBucket func(ctx context.Context, cfg natsjs.KeyValueConfig) (natsjs.KeyValue, error)
	Limits     Limits

	Log   *slog.Logger
	Often *pacedlog.Log
	Obs   event.Observer
	Clock *conn.Clock
}

// Limits are those of the bus with the same names.
type Limits struct {
	Topics, ClientTopics, ClientGroups, GroupsPerClient, AttemptsKnown int
}

// Hooks are called by records, for what stands above them. They are set before generations are
// followed.
type Hooks struct {
	// Held answers a hub that asks what is held of a consumer.
	Held func(q *Question)
	// TopicDeleted forgets a stream that was deleted on purpose.
	TopicDeleted func(stream string, created time.Time)
	// GroupMoved has the members of a group here look at its new generation.
	GroupMoved func(key string, g *Generation)
	// EndDeletion finishes the deletion of a topic whose hub died. If the stream is still there,
	// EndDeletion takes the mark back, provided that the mark has this revision.
	EndDeletion func(ctx context.Context, stream string, revision uint64) error
}

// New returns the records of a bus that is not connected yet.
func New(cfg Config) *Records {
	r := &Records{Config: cfg, Retention: &Retention{cfg}, unsaved: unsaved{notes: make(map[string]Note), marks: make(map[string]Mark)}}
	r.Makers = newMakers(r)
	return r
}

// OpenGenerations opens the bucket of generations.
func (r *Records) OpenGenerations(ctx context.Context) (err error) {
	r.kv, err = r.OpenBucket(ctx, natsjs.KeyValueConfig{Bucket: groupsBucket, Description: "eventhub: the consumer of each group that was moved"})
	return err
}

// OpenOthers opens the other buckets.
func (r *Records) OpenOthers(ctx context.Context) error {
	for _, cfg := range []natsjs.KeyValueConfig{
		{Bucket: attemptsBucket, Description: "eventhub: deliveries that no client had", TTL: AttemptsAge, MaxBytes: attemptsBytes},
		{Bucket: MarksBucket, Description: "eventhub: how far groups in memory are", TTL: marksAge},
		{Bucket: MakersBucket, Description: "eventhub: the groups that clients have made"},
		{Bucket: BookmarksBucket, Description: "eventhub: bookmarks of groups"},
		{Bucket: RetentionBucket, Description: "eventhub: what groups have lost, and who holds topics that reject", TTL: retentionAge, MaxBytes: retentionBytes},
	} {
		if _, err := r.OpenBucket(ctx, cfg); err != nil {
			return err
		}
	}
	return nil
}

// cleanWait bounds the removal of what the next sweep would remove as well.
const cleanWait = 2 * time.Second

// Noted are the notes with a subject in a bucket. The subject may have wildcards.
type Noted struct{ Bucket, Subject string }

// OfStream returns all that hubs note about the groups of a stream.
func OfStream(stream string) []Noted {
	return []Noted{
		{groupsBucket, generationSubject(stream + ".>")},
		{BookmarksBucket, "$KV." + BookmarksBucket + "." + stream + ".>"},
		{MarksBucket, "$KV." + MarksBucket + "." + stream + ".>"},
		{attemptsBucket, "$KV." + attemptsBucket + "." + stream + ".>"},
		{MakersBucket, makersPrefix + "*." + stream + ".>"},
		{MakersBucket, makersPrefix + "*." + stream},
		{RetentionBucket, "$KV." + RetentionBucket + ".*." + stream + ".>"},
		{RetentionBucket, purgeSubject(stream)},
	}
}

// Forget removes what is noted about a group that was deleted, apart from its generation. A maker
// of "" is none.
func (r *Records) Forget(ctx context.Context, t *streams.Topic, group, maker string) error {
	notes := []Noted{
		{MarksBucket, markSubject(t, group)},
		{attemptsBucket, "$KV." + attemptsBucket + "." + GroupKey(t, group) + ".>"},
		{BookmarksBucket, bookmarkSubject(t, group, ">")},
		{RetentionBucket, lossSubject(t, group)},
		{RetentionBucket, seenSubject(t, group)},
	}
	if maker != "" {
		notes = append(notes, Noted{MakersBucket, makerSubject(maker, t, group)})
	}
	r.unsaved.mu.Lock()
	delete(r.unsaved.marks, markSubject(t, group))
	r.unsaved.mu.Unlock()
	for _, n := range notes {
		if err := r.Conn.Purge(ctx, n.Bucket, n.Subject, 0); err != nil {
			return err
		}
	}
	return nil
}
