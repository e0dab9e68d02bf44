package outbox

// StatsSQL is what Stats asks, for tests that ask the database how it would answer.
func (s *SQLStore) StatsSQL() string { return s.q(statsQuery) }

// LookSQL is how a claim looks at lanes, with its parameters.
func (s *SQLStore) LookSQL(opts *ClaimOptions) (query string, args []any) {
	query, args = lookQuery(opts, "", opts.Limit*lookMost)
	return s.q(query), args
}
