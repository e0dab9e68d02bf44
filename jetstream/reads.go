package jetstream

import "eventhub/jetstream/internal/streams"

// reads reads stored events: by position, by id, by key, in pages and in order.
type reads struct {
	*core
	streams *streams.Streams

	listings *listings
	ids      *idSearches
}

func newReads(c *core, s *streams.Streams) *reads {
	r := &reads{core: c, streams: s}
	r.listings = &listings{reads: r}
	r.ids = newIDSearches(r)
	return r
}
