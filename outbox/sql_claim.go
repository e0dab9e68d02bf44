package outbox

import (
	"cmp"
	"context"
	"slices"
)

// A claim looks at lanes, one after the other from where the last one ended, and only at the first rows of each: a lane that
// waits costs one look, however many rows it has. lookMost bounds the lanes of a claim, for each row that it may hand out.
const lookMost = 10

// candidate is a row that a claim has looked at.
type candidate struct {
	lane string
	id   string
	due  bool // pending, and its time has come
}

// Claim implements Store.
//
// It looks first and takes then, in two statements, so that it holds no lock meanwhile. What it takes is checked again by the
// database for each row. Rows of a lane behind one that somebody else was quicker to take are given back.
func (s *SQLStore) Claim(ctx context.Context, opts ClaimOptions) (Claim, error) {
	if s.db == nil {
		return Claim{}, errNoDB
	}
	if err := opts.check(); err != nil {
		return Claim{}, err
	}
	c, err := s.claim(ctx, &opts)
	return c, s.wrap("claim", err)
}

func (s *SQLStore) claim(ctx context.Context, opts *ClaimOptions) (Claim, error) {
	heads, more, err := s.heads(ctx, opts)
	if err != nil || len(heads) == 0 {
		return Claim{More: more}, err
	}
	runs := make(map[string][]string, len(heads)) // ids by lane, in order
	if each := opts.Limit / len(heads); each > 1 {
		rows, err := s.followers(ctx, opts, heads, each)
		if err != nil {
			return Claim{}, err
		}
		ended := make(map[string]bool)
		for _, row := range rows {
			if row.due && !ended[row.lane] {
				runs[row.lane] = append(runs[row.lane], row.id)
			} else {
				ended[row.lane] = true
			}
			more = more || row.due // there may be others behind
		}
	} else {
		for _, h := range heads {
			runs[h.lane] = []string{h.id}
		}
		more = true
	}
	return s.take(ctx, opts, runs, more)
}

// heads are the first rows of lanes that are due, at most opts.Limit. more says that not all lanes were looked at.
func (s *SQLStore) heads(ctx context.Context, opts *ClaimOptions) (heads []candidate, more bool, err error) {
	s.mu.Lock()
	start := s.cursor
	s.mu.Unlock()
	at, wrapped := start, start == ""
	for looks := opts.Limit * lookMost; ; {
		rows, err := s.look(ctx, opts, at, looks)
		if err != nil {
			return nil, false, err
		}
		full := len(rows) == looks
		for _, row := range rows {
			if wrapped && start != "" && row.lane > start {
				full = false // all the way round
				break
			}
			at = row.lane
			if row.due {
				heads = append(heads, row)
			}
			if len(heads) == opts.Limit {
				full = true
				break
			}
		}
		looks -= len(rows)
		switch {
		case full || looks <= 0:
			more = true
		case !wrapped:
			at, wrapped = "", true
			continue
		default:
			at = "" // all were looked at
		}
		s.mu.Lock()
		s.cursor = at
		s.mu.Unlock()
		return heads, more, nil
	}
}

// passed is what a lane's first row must not be, for those that go on past errors. The status <> 'sent' before it is what the
// index is made for.
func passed(opts *ClaimOptions) string {
	if opts.PassErrors {
		return " AND o.status <> 'error'"
	}
	return ""
}

// look reads the first rows of the next lanes behind one.
func (s *SQLStore) look(ctx context.Context, opts *ClaimOptions, behind string, most int) ([]candidate, error) {
	return s.candidates(ctx, `WITH RECURSIVE lanes (lane, n) AS (
  SELECT (SELECT o.lane FROM {table} o WHERE o.status <> 'sent'`+passed(opts)+` AND o.lane > ? ORDER BY o.lane LIMIT 1), 1
  UNION ALL
  SELECT (SELECT o.lane FROM {table} o WHERE o.status <> 'sent'`+passed(opts)+` AND o.lane > l.lane ORDER BY o.lane LIMIT 1), l.n + 1
  FROM lanes l WHERE l.lane IS NOT NULL AND l.n < ?
), heads (lane, n, seq) AS (
  SELECT l.lane, l.n, (SELECT o.seq FROM {table} o WHERE o.status <> 'sent'`+passed(opts)+` AND o.lane = l.lane ORDER BY o.seq LIMIT 1)
  FROM lanes l WHERE l.lane IS NOT NULL
)
SELECT h.lane, o.id, CASE WHEN o.status = 'pending' AND o.next_at <= {now} THEN 1 ELSE 0 END
FROM heads h JOIN {table} o ON o.status <> 'sent' AND o.lane = h.lane AND o.seq = h.seq ORDER BY h.n`, behind, most)
}

// followers reads the first rows of lanes, at most each of one, in order.
func (s *SQLStore) followers(ctx context.Context, opts *ClaimOptions, heads []candidate, each int) ([]candidate, error) {
	ids := make([]string, len(heads))
	for i, h := range heads {
		ids[i] = h.id
	}
	return s.candidates(ctx, `WITH RECURSIVE run (lane, seq, n) AS (
  SELECT o.lane, o.seq, 1 FROM {table} o WHERE o.id IN {ids}
  UNION ALL
  SELECT r.lane, (SELECT o.seq FROM {table} o WHERE o.status <> 'sent'`+passed(opts)+` AND o.lane = r.lane AND o.seq > r.seq ORDER BY o.seq LIMIT 1), r.n + 1
  FROM run r WHERE r.seq IS NOT NULL AND r.n < ?
)
SELECT o.lane, o.id, CASE WHEN o.status = 'pending' AND o.next_at <= {now} THEN 1 ELSE 0 END
FROM run r JOIN {table} o ON o.status <> 'sent' AND o.lane = r.lane AND o.seq = r.seq ORDER BY r.n`, idList(ids), each)
}

func (s *SQLStore) candidates(ctx context.Context, query string, args ...any) ([]candidate, error) {
	rows, err := s.db.QueryContext(ctx, s.q(query), args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var list []candidate
	for rows.Next() {
		var c candidate
		if err := rows.Scan(&c.lane, &c.id, &c.due); err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	return list, rows.Err()
}

// take claims the rows of runs that can still be had, up to the first of each run that cannot.
func (s *SQLStore) take(ctx context.Context, opts *ClaimOptions, runs map[string][]string, more bool) (Claim, error) {
	var ids []string
	for _, run := range runs {
		ids = append(ids, run...)
	}
	c := Claim{More: more}
	got, err := s.records(ctx, `UPDATE {table} SET status = 'claimed', claimed_by = ?, lease_until = {now} + ?,
  publish_began = CASE WHEN publish_began = 0 THEN {now} ELSE publish_began END
WHERE status = 'pending' AND id IN (SELECT o.id FROM {table} o WHERE o.id IN {ids} AND o.status = 'pending' AND o.next_at <= {now}{unlocked})
RETURNING `+columns+`, {now}`, []any{opts.Worker, opts.Lease.Milliseconds(), idList(ids)}, &c.Now)
	if err != nil {
		return Claim{}, err
	}
	taken := make(map[string]*Record, len(got))
	for _, r := range got {
		taken[r.ID] = r
	}
	var back Settlement
	for _, run := range runs {
		gap := false
		for _, id := range run {
			r := taken[id]
			switch {
			case r == nil:
				gap = true
			case gap:
				back.Failed = append(back.Failed, Failure{Record: r, Unsent: r.PublishBegan >= c.Now})
			default:
				c.Records = append(c.Records, r)
			}
		}
	}
	if len(back.Failed) > 0 {
		if err := s.Settle(ctx, opts.Worker, back); err != nil {
			return Claim{}, err
		}
	}
	slices.SortFunc(c.Records, func(a, b *Record) int { return cmp.Compare(a.Sequence, b.Sequence) })
	return c, nil
}
