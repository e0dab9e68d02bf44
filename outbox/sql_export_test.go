package outbox

// Hasten makes a store wait for a tenth of the time for which it waits otherwise.
func (s *SQLStore) Hasten() {
	s.pace = pace{ailing: usualPace.ailing / 10, migratePause: usualPace.migratePause / 10, aheadTimeout: "300ms"}
}

// StatsSQL is what Stats asks, for tests that ask the database how it would answer.
func (s *SQLStore) StatsSQL() string { return s.q(statsQuery) }

// SQL is a query with its parameters.
type SQL struct {
	Query string
	Args  []any
}

// LookSQL is how a claim looks at topics, at lanes, and at the rows of lanes.
func (s *SQLStore) LookSQL(opts *ClaimOptions) (topics, lanes, rows SQL) {
	q := func(query string, args []any) SQL { return SQL{s.q(query), args} }
	end := "orders0"
	return q(topicsQuery(opts, "")), q(s.lookQuery(opts, []span{{start: "orders/k", stop: end}, {start: "/orders/a", stop: "/" + end}}, 10)),
		q(s.followersQuery(opts, []candidate{{ref: ref{"orders", "a"}}, {ref: ref{"orders", "b"}}}, 10))
}
