package outbox

import (
	"context"
	"strconv"
	"time"
)

// Now implements Store.
func (s *SQLStore) Now(ctx context.Context) (time.Time, error) {
	if s.db == nil {
		return time.Time{}, errNoDB
	}
	var ms int64
	err := s.db.QueryRowContext(ctx, s.q("SELECT {now}")).Scan(&ms)
	return time.UnixMilli(ms), s.wrap("clock", err)
}

// Stats implements Store.
func (s *SQLStore) Stats(ctx context.Context) (Stats, error) {
	if s.db == nil {
		return Stats{}, errNoDB
	}
	st, err := s.stats(ctx)
	return st, s.wrap("stats", err)
}

// statsQuery can be answered from the lane index alone.
const statsQuery = `SELECT COUNT(*) FILTER (WHERE status = 'pending'), COUNT(*) FILTER (WHERE status = 'claimed'), COUNT(*) FILTER (WHERE status = 'error'),
  COALESCE({now} - MIN(added_at) FILTER (WHERE status <> 'error'), 0)
FROM {table} WHERE status <> 'sent'`

func (s *SQLStore) stats(ctx context.Context) (st Stats, err error) {
	var age int64 // in milliseconds; negative if the clock went back after the record was added
	err = s.db.QueryRowContext(ctx, s.q(statsQuery)).Scan(&st.Pending, &st.Claimed, &st.Errors, &age)
	st.OldestAge = max(0, time.Duration(age)*time.Millisecond)
	return st, err
}

// count adds n records of a status. age is the age of the oldest in milliseconds.
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

// List implements Store. For sent rows it scans the whole table, because no index orders sent rows
// by sequence.
func (s *SQLStore) List(ctx context.Context, opts ListOptions) ([]*Record, error) {
	if s.db == nil {
		return nil, errNoDB
	}
	unsent := "" // lets the database use the partial index of unsent rows
	if opts.Status != Sent {
		unsent = " AND status <> 'sent'"
	}
	list, err := s.records(ctx, "SELECT "+s.columns(0)+" FROM {table} WHERE status = ?"+unsent+" AND seq > ? ORDER BY seq LIMIT ?",
		[]any{string(opts.Status), opts.After, opts.limit()})
	return list, s.wrap("list", err)
}

// Retry implements Store. On SQLite it skips rows that are too large to process.
func (s *SQLStore) Retry(ctx context.Context, ids ...string) (int, error) {
	query := "UPDATE {table} SET status = 'pending', next_at = 0, attempts = 0, publish_began = 0 WHERE status <> 'sent' AND status = 'error'"
	if s.dialect == SQLite {
		query += " AND " + sqliteText + " <= " + strconv.Itoa(sqliteRow)
	}
	if len(ids) == 0 {
		return s.exec(ctx, "retry", query)
	}
	return s.exec(ctx, "retry", query+" AND id {ids}", idList(ids))
}

// Purge implements Store.
func (s *SQLStore) Purge(ctx context.Context, opts PurgeOptions) (int, error) {
	if err := opts.validate(); err != nil {
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
	if opts.Topic != "" {
		which += " AND o.aggregatetype = ?"
		args = append(args, opts.Topic)
	}
	// The outer statement checks the status again, so that a row retried after the subquery ran is
	// not deleted.
	return s.exec(ctx, "purge", "DELETE FROM {table} WHERE status = ? AND {row} {in SELECT o.{row} FROM {table} o WHERE "+which+" LIMIT ?{unlocked} in}",
		append(append([]any{string(opts.Status)}, args...), opts.limit())...)
}
