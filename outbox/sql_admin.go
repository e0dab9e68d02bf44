package outbox

import (
	"context"
	"time"
)

// Stats implements Store.
func (s *SQLStore) Stats(ctx context.Context) (Stats, error) {
	if s.db == nil {
		return Stats{}, errNoDB
	}
	st, err := s.stats(ctx)
	return st, s.wrap("stats", err)
}

func (s *SQLStore) stats(ctx context.Context) (st Stats, err error) {
	rows, err := s.db.QueryContext(ctx, s.q("SELECT status, COUNT(*), {now} - MIN(added_at) FROM {table} WHERE status <> 'sent' GROUP BY status"))
	if err != nil {
		return Stats{}, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var status Status
		var n int
		var age int64
		if err := rows.Scan(&status, &n, &age); err != nil {
			return Stats{}, err
		}
		st.count(status, n, age)
	}
	return st, rows.Err()
}

// count adds n records of a status, the oldest of which has an age in milliseconds.
func (s *Stats) count(status Status, n int, age int64) {
	switch status {
	case Pending:
		s.Pending += n
	case Claimed:
		s.Claimed += n
	case Errored:
		s.Errors += n
		return
	default:
		return
	}
	s.OldestAge = max(s.OldestAge, time.Duration(age)*time.Millisecond)
}

// List implements Store. Sent rows have no index by sequence: of those, it looks at all.
func (s *SQLStore) List(ctx context.Context, opts ListOptions) ([]*Record, error) {
	if s.db == nil {
		return nil, errNoDB
	}
	unsent := "" // says to the database that the index of unsent rows will do
	if opts.Status != Sent {
		unsent = " AND status <> 'sent'"
	}
	list, err := s.records(ctx, "SELECT "+columns+" FROM {table} WHERE status = ?"+unsent+" AND seq > ? ORDER BY seq LIMIT ?",
		[]any{string(opts.Status), opts.After, opts.limit()})
	return list, s.wrap("list", err)
}

// Retry implements Store.
func (s *SQLStore) Retry(ctx context.Context, ids ...string) (int, error) {
	const query = "UPDATE {table} SET status = 'pending', next_at = 0, attempts = 0, publish_began = 0 WHERE status <> 'sent' AND status = 'error'"
	if len(ids) == 0 {
		return s.exec(ctx, "retry", query)
	}
	return s.exec(ctx, "retry", query+" AND id {ids}", idList(ids))
}

// Purge implements Store.
func (s *SQLStore) Purge(ctx context.Context, opts PurgeOptions) (int, error) {
	if err := opts.check(); err != nil {
		return 0, err
	}
	which := "o.status = 'sent' AND o.sent_at <= {now} - ?"
	if opts.Status == Errored {
		which = "o.status <> 'sent' AND o.status = 'error' AND o.added_at <= {now} - ?"
	}
	args := []any{opts.OlderThan.Milliseconds()}
	if len(opts.IDs) > 0 {
		which += " AND o.id {ids}"
		args = append(args, idList(opts.IDs))
	}
	return s.exec(ctx, "purge", "DELETE FROM {table} WHERE id {in SELECT o.id FROM {table} o WHERE "+which+" LIMIT ? in}", append(args, opts.limit())...)
}
