package jetstream

// reads reads stored events: by position, by id, by key, in pages and in order.
type reads struct {
	*core
	streams *streams

	listings *listings
	ids      *idSearches
}

func newReads(c *core, s *streams) *reads {
	r := &reads{core: c, streams: s}
	r.listings = &listings{reads: r}
	r.ids = newIDSearches(r)
	return r
}
