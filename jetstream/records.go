package jetstream

import (
	"context"
	"time"

	"eventhub/jetstream/internal/streams"
)

// records has what hubs store about groups: their consumers and generations, pauses, marks of
// groups in memory, notes of deliveries, bookmarks, what groups have lost, and whose turn it is to
// move a group or to remove events.
type records struct {
	*core
	streams     *streams.Streams
	recordHooks recordHooks

	generations *generations // nil until open
	makers      *makers
	unsaved     unsaved
}

// recordHooks are called by records, for what stands above them. They are set before generations
// are followed.
type recordHooks struct {
	// held answers a hub that asks what is held of a consumer. live says that the question is new.
	held func(value []byte, live bool)
	// topicDeleted forgets a stream that was deleted on purpose.
	topicDeleted func(stream string, created time.Time)
	// groupMoved has the members of a group here look at its new generation.
	groupMoved func(key string, g *generation)
	// endDeletion finishes the deletion of a topic whose hub died. If the stream is still there,
	// endDeletion takes the mark back, provided that the mark has this revision.
	endDeletion func(ctx context.Context, stream string, revision uint64) error
}

func newRecords(c *core, s *streams.Streams) *records {
	return &records{core: c, streams: s, makers: newMakers(c), unsaved: unsaved{notes: make(map[string]note), marks: make(map[string]mark)}}
}
