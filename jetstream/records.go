package jetstream

import (
	"context"
	"time"
)

// records has what hubs store about groups: their consumers and generations, marks of groups in
// memory, notes of deliveries, bookmarks, and what groups have lost.
type records struct {
	*core
	streams     *streams
	recordHooks recordHooks

	generations *generations // nil until open
	unsaved     unsaved
}

// recordHooks are called by records, for what stands above them. They are set before generations
// are followed.
type recordHooks struct {
	// held answers a hub that asks what is held of a consumer. live: the question is new.
	held func(value []byte, live bool)
	// topicDeleted forgets a stream that was deleted on purpose.
	topicDeleted func(stream string, created time.Time)
	// groupMoved has the members of a group here look at its new generation.
	groupMoved func(key string, g *generation)
	// unfinished ends the deletion of a topic whose hub died, unless its mark has another revision.
	unfinished func(ctx context.Context, stream string, revision uint64) error
}

func newRecords(c *core, s *streams) *records {
	return &records{core: c, streams: s, unsaved: unsaved{notes: make(map[string]note), marks: make(map[string]mark)}}
}
