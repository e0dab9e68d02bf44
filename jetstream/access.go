package jetstream

// access has where native clients find topics and groups, and writes what policies allow them as
// permissions of NATS.
type access struct {
	*core
	native *nativeMaps
}

func newAccess(c *core) *access {
	a := &access{core: c}
	a.native = newNativeMaps(a)
	return a
}
