package jetstream

// access has what native clients may do, and answers the auth callouts of NATS servers.
type access struct {
	*core
	streams *streams

	native *nativeMaps
}

func newAccess(c *core, s *streams) *access {
	a := &access{core: c, streams: s}
	a.native = newNativeMaps(a)
	return a
}
