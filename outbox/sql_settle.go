package outbox

import (
	"context"
	"database/sql"
	"slices"
	"time"
)

// Renew implements Store.
func (s *SQLStore) Renew(ctx context.Context, worker string, lease time.Duration, records []*Record) ([]string, error) {
	if s.db == nil {
		return nil, errNoDB
	}
	if len(records) == 0 {
		return nil, nil
	}
	lost, err := s.renew(ctx, worker, lease, idsOfRecords(records))
	return lost, s.wrap("renew", err)
}

func (s *SQLStore) renew(ctx context.Context, worker string, lease time.Duration, ids []string) ([]string, error) {
	rows, err := s.db.QueryContext(ctx, s.q("UPDATE {table} SET lease_until = {now} + ? WHERE id {ids} AND status = 'claimed' AND claimed_by = ? RETURNING id"),
		lease.Milliseconds(), idList(ids), worker)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	kept := make(map[string]bool, len(ids))
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, err
		}
		kept[id] = true
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(ids, func(id string) bool { return kept[id] }), nil
}

const markSent = "UPDATE {table} SET status = 'sent', sent_at = {now}, claimed_by = '', lease_until = 0, last_err = '' WHERE id {ids} AND status <> 'sent'"

// Settle implements Store.
func (s *SQLStore) Settle(ctx context.Context, worker string, st Settlement) error {
	if s.db == nil {
		return errNoDB
	}
	if len(st.Failed) == 0 {
		if len(st.Sent) == 0 {
			return nil
		}
		_, err := s.db.ExecContext(ctx, s.q(markSent), idList(idsOfRecords(st.Sent)))
		return s.wrap("settle", err)
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return s.wrap("settle", err)
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	if err := s.settle(ctx, tx, worker, &st); err != nil {
		return s.wrap("settle", err)
	}
	return s.wrap("settle", tx.Commit())
}

func (s *SQLStore) settle(ctx context.Context, tx *sql.Tx, worker string, st *Settlement) error {
	if len(st.Sent) > 0 {
		if _, err := tx.ExecContext(ctx, s.q(markSent), idList(idsOfRecords(st.Sent))); err != nil {
			return err
		}
	}
	query := s.q(`UPDATE {table} SET status = ?, next_at = {now} + ?, attempts = attempts + ?, publish_began = publish_began * ?,
  last_err = CASE WHEN CAST(? AS TEXT) = '' THEN last_err ELSE CAST(? AS TEXT) END, claimed_by = '', lease_until = 0
WHERE id = ? AND status = 'claimed' AND claimed_by = ?`)
	for i := range st.Failed {
		f := &st.Failed[i]
		status, counts, keep := Pending, 0, 1
		if f.Park {
			status = Errored
		}
		if f.Counts {
			counts = 1
		}
		if f.Unsent {
			keep = 0
		}
		text := errText(f.Err)
		if _, err := tx.ExecContext(ctx, query, string(status), f.Delay.Milliseconds(), counts, keep, text, text, f.Record.ID, worker); err != nil {
			return err
		}
	}
	return nil
}

// RequeueExpired implements Store.
func (s *SQLStore) RequeueExpired(ctx context.Context) (int, error) {
	return s.exec(ctx, "requeue", `UPDATE {table} SET status = 'pending', claimed_by = '', lease_until = 0
WHERE status = 'claimed' AND id {in SELECT o.id FROM {table} o WHERE o.status = 'claimed' AND o.lease_until < {now}{unlocked} in}`)
}

// exec runs a statement and returns the number of rows it changed.
func (s *SQLStore) exec(ctx context.Context, what, query string, args ...any) (int, error) {
	if s.db == nil {
		return 0, errNoDB
	}
	res, err := s.db.ExecContext(ctx, s.q(query), args...)
	if err != nil {
		return 0, s.wrap(what, err)
	}
	n, err := res.RowsAffected()
	return int(n), s.wrap(what, err)
}
