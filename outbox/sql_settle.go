package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
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
	lost, kept := refs(records), make(map[ref]bool, len(records))
	_, err := divide(ctx, s.db, lost, func(list []ref) error { return s.renew(ctx, worker, lease, list, kept) })
	if err != nil {
		return nil, s.wrap("renew", err)
	}
	isKept := func(r ref) bool { return kept[r] }
	lost = slices.DeleteFunc(lost, isKept)
	for wait := lockWaitFirst; unlockedOf[s.dialect] != "" && len(lost) > 0 && wait <= lockWaitMax && pause(ctx, wait); wait *= 2 {
		if !s.renewLocked(ctx, worker, lease, lost, kept) {
			break
		}
		lost = slices.DeleteFunc(lost, isKept)
	}
	ids := make([]string, len(lost))
	for i, r := range lost {
		ids[i] = r.id
	}
	return ids, nil
}

// renewLocked renews leases that were not renewed because the rows were locked, and reports whether
// another call may help. What is not renewed counts as lost.
func (s *SQLStore) renewLocked(ctx context.Context, worker string, lease time.Duration, list []ref, kept map[ref]bool) bool {
	ids, same := refArgs(list)
	locked, err := s.refs(ctx, s.db, ofTopic(stillHeld, list), ids, same, worker)
	return err == nil && len(locked) > 0 && s.renew(ctx, worker, lease, locked, kept) == nil
}

// renew renews leases and adds the records to kept.
func (s *SQLStore) renew(ctx context.Context, worker string, lease time.Duration, list []ref, kept map[ref]bool) error {
	ids, same := refArgs(list)
	renewed, err := s.refs(ctx, s.db, ofTopic("UPDATE {table} AS o SET lease_until = {now} + ? WHERE {rows o.id {ids} AND {same} rows} AND status = 'claimed' AND claimed_by = ? RETURNING aggregatetype, id", list),
		lease.Milliseconds(), ids, same, worker)
	if err != nil {
		return err
	}
	for _, r := range renewed {
		kept[r] = true
	}
	return nil
}

// refs returns the topics and ids that a query returns.
func (s *SQLStore) refs(ctx context.Context, db querier, query string, args ...any) (list []ref, err error) {
	rows, err := s.query(ctx, db, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var r ref
		if err := rows.Scan(&r.topic, &r.id); err != nil {
			return nil, err
		}
		list = append(list, r)
	}
	return list, rows.Err()
}

const (
	markSent = `UPDATE {table} AS o SET status = 'sent', sent_at = {now}, claimed_by = '', lease_until = 0, last_err = ''
WHERE {rows o.id {ids} AND {same} rows} AND status <> 'sent'`
	markFailed = `UPDATE {table} AS o SET status = ?, next_at = {now} + ?, attempts = attempts + ?, publish_began = publish_began * ?,
  last_err = CASE WHEN CAST(? AS TEXT) = '' THEN last_err ELSE CAST(? AS TEXT) END, claimed_by = '', lease_until = 0
WHERE {rows o.id = ? AND o.aggregatetype = ? rows} AND status = 'claimed' AND claimed_by = ?`
	// An update that changed fewer rows than expected skipped rows that are locked, or that no
	// longer need it. notSent and stillHeld select the former.
	notSent   = "SELECT o.aggregatetype, o.id FROM {table} o WHERE o.id {ids} AND {same} AND o.status <> 'sent'"
	stillHeld = "SELECT o.aggregatetype, o.id FROM {table} o WHERE o.id {ids} AND {same} AND o.status = 'claimed' AND o.claimed_by = ?"
)

// Settle implements Store.
func (s *SQLStore) Settle(ctx context.Context, worker string, st Settlement) (Unsettled, error) {
	if s.db == nil {
		return Unsettled{}, errNoDB
	}
	var left Unsettled
	if len(st.Sent)+len(st.Failed) == 0 {
		return left, nil
	}
	began := time.Now()
	err := s.settle(ctx, s.db, worker, &st, &left.Locked)
	if err != nil && refused(ctx, s.db, began) {
		left, err = s.settleLanes(ctx, worker, &st)
	}
	for wait := lockWaitFirst; err == nil && len(left.Locked.Sent)+len(left.Locked.Failed) > 0 && wait <= lockWaitMax && pause(ctx, wait); wait *= 2 {
		var locked Settlement
		if s.settle(ctx, s.db, worker, &left.Locked, &locked) != nil {
			break // the error may be that of a single record: leave all of them to the next call
		}
		left.Locked = locked
	}
	return left, s.wrap("settle", err)
}

// Claims of other drainers lock rows for some milliseconds. Settle and Renew try a locked row again
// after lockWaitFirst, doubled up to lockWaitMax.
const (
	lockWaitFirst = 2 * time.Millisecond
	lockWaitMax   = 32 * time.Millisecond
)

// settleLanes settles after the database refused to settle all lanes together.
func (s *SQLStore) settleLanes(ctx context.Context, worker string, st *Settlement) (left Unsettled, err error) {
	lanes := byLane(st)
	failed, err := divide(ctx, s.db, slices.Sorted(maps.Keys(lanes)), func(names []string) error {
		var part, locked Settlement
		for _, name := range names {
			part.add(lanes[name])
		}
		err := s.settle(ctx, s.db, worker, &part, &locked)
		if err == nil {
			left.Locked.add(&locked)
		}
		return err
	})
	for _, f := range failed {
		left.Refused.add(lanes[f.item])
		left.Failed = append(left.Failed, LaneError{f.item, f.err})
	}
	return left, err
}

// settle saves the outcomes in one transaction, and adds those of locked records to locked.
func (s *SQLStore) settle(ctx context.Context, db *sql.DB, worker string, st, locked *Settlement) error {
	if len(st.Failed) == 0 { // one statement needs no explicit transaction
		return s.settleSent(ctx, db, st.Sent, locked)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	if err := s.settleSent(ctx, tx, st.Sent, locked); err != nil {
		return err
	}
	if err := s.settleFailed(ctx, tx, worker, st.Failed, locked); err != nil {
		return err
	}
	return tx.Commit()
}

func (s *SQLStore) settleSent(ctx context.Context, db querier, records []*Record, locked *Settlement) error {
	if len(records) == 0 {
		return nil
	}
	list := refs(records)
	ids, same := refArgs(list)
	res, err := s.run(ctx, db, ofTopic(markSent, list), ids, same)
	if err != nil {
		return err
	}
	n, err := res.RowsAffected()
	if err != nil || int(n) == len(records) || unlockedOf[s.dialect] == "" {
		return err
	}
	left, err := s.refs(ctx, db, ofTopic(notSent, list), ids, same)
	for _, r := range records {
		if slices.Contains(left, r.ref()) {
			locked.Sent = append(locked.Sent, r)
		}
	}
	return err
}

func (s *SQLStore) settleFailed(ctx context.Context, tx *sql.Tx, worker string, failed []Failure, locked *Settlement) error {
	var unchanged []ref
	for i := range failed {
		f := &failed[i]
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
		res, err := s.run(ctx, tx, markFailed, string(status), f.Delay.Milliseconds(), counts, keep, text, text, f.Record.ID, f.Record.Topic, worker)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil {
			return err
		} else if n == 0 {
			unchanged = append(unchanged, f.Record.ref())
		}
	}
	if len(unchanged) == 0 || unlockedOf[s.dialect] == "" {
		return nil
	}
	ids, same := refArgs(unchanged)
	held, err := s.refs(ctx, tx, ofTopic(stillHeld, unchanged), ids, same, worker)
	for _, f := range failed {
		if slices.Contains(held, f.Record.ref()) {
			locked.Failed = append(locked.Failed, f)
		}
	}
	return err
}

// maxRequeue is the maximum number of records that RequeueExpired makes pending after the database
// refused to change all of them together.
const maxRequeue = 1_000

// RequeueExpired implements Store.
func (s *SQLStore) RequeueExpired(ctx context.Context) (int, error) {
	const expired = " FROM {table} o WHERE o.status = 'claimed' AND o.lease_until < {now}"
	const requeue = "UPDATE {table} SET status = 'pending', claimed_by = '', lease_until = 0 WHERE status = 'claimed' AND {row} {in SELECT o.{row}" + expired
	began := time.Now()
	n, err := s.exec(ctx, "requeue", requeue+"{unlocked} in}")
	if err == nil || s.db == nil || !refused(ctx, s.db, began) {
		return n, err
	}
	list, err := s.refs(ctx, s.db, "SELECT o.aggregatetype, o.id"+expired+" ORDER BY o.lease_until LIMIT ?", maxRequeue)
	if err != nil {
		return 0, s.wrap("requeue", err)
	}
	failed, err := divide(ctx, s.db, list, func(list []ref) error {
		ids, same := refArgs(list)
		some, err := s.exec(ctx, "requeue", ofTopic(requeue+" AND o.id {ids} AND {same}{unlocked} in}", list), ids, same)
		n += some
		return err
	})
	if err == nil && len(failed) > 0 {
		err = fmt.Errorf("record %q of %s: %w", failed[0].item.id, failed[0].item.topic, failed[0].err)
	}
	return n, err
}

// exec runs a statement and returns the number of rows it changed.
func (s *SQLStore) exec(ctx context.Context, what, query string, args ...any) (int, error) {
	if s.db == nil {
		return 0, errNoDB
	}
	res, err := s.run(ctx, s.db, query, args...)
	if err != nil {
		return 0, s.wrap(what, err)
	}
	n, err := res.RowsAffected()
	return int(n), s.wrap(what, err)
}
