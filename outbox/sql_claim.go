package outbox

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
)

// A claim looks at lanes, one after the other from where the last one ended, and only at the first rows of each: a lane that
// waits costs one look, however many rows it has. lookMost bounds the lanes of a claim, for each row that it may hand out.
const lookMost = 10

// candidate is a row that a claim has looked at.
type candidate struct {
	lane string
	id   string
	gone bool // it was settled just now
	due  bool // pending, its time has come, and its topic is asked for
	size int  // of the payload, in bytes
}

// Claim implements Store.
//
// It looks first and takes then, in two statements, so that it holds no lock meanwhile. What it takes is checked again by the
// database for each row. Rows of a lane behind one that somebody else was quicker to take are given back.
func (s *SQLStore) Claim(ctx context.Context, opts ClaimOptions) (Claim, error) {
	if s.db == nil {
		return Claim{}, errNoDB
	}
	if err := opts.validate(); err != nil {
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
	rows, each := heads, opts.Limit/len(heads)
	if each > 1 {
		if rows, err = s.followers(ctx, opts, heads, each); err != nil {
			return Claim{}, err
		}
	}
	runs := make(map[string][]string, len(heads)) // ids by lane, in order
	ended := make(map[string]bool)
	left := opts.bytes()
	for _, row := range rows {
		switch {
		case ended[row.lane] || row.gone:
		case !row.due:
			ended[row.lane] = true
		case row.size > left && len(runs) > 0:
			ended[row.lane], more = true, true
		default:
			left -= row.size
			runs[row.lane] = append(runs[row.lane], row.id)
			more = more || len(runs[row.lane]) == each // there may be others behind
		}
	}
	if len(runs) == 0 {
		return Claim{More: more}, nil // others were quicker
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

// due says of row o whether it can be claimed. Its parameter is the topics to leave out, if there are any.
func due(opts *ClaimOptions) string {
	not := ""
	if len(opts.ExceptTopics) > 0 {
		not = " AND NOT o.aggregatetype {ids}"
	}
	return "CASE WHEN o.status = 'pending' AND o.next_at <= {now}" + not + " THEN 1 ELSE 0 END"
}

// behind is where to go on from lane l.lane. Its parameter is the topics to leave out, if there are any: all lanes of such a
// topic that begin as this one does are passed at once. '0' is the byte after '/', and as topics have no slash, nothing else
// lies in between.
func behind(opts *ClaimOptions) string {
	if len(opts.ExceptTopics) == 0 {
		return "l.lane"
	}
	return "CASE WHEN {topic} {ids} THEN CASE WHEN l.lane LIKE '/%' THEN '/' ELSE '' END || {topic} || '0' ELSE l.lane END"
}

// look reads the first rows of the next lanes after one. It goes from lane to lane by the index, in small queries that leave
// the database no other way. Of a topic to leave out it looks at two lanes, one with a key and one without, however many
// there are.
func (s *SQLStore) look(ctx context.Context, opts *ClaimOptions, after string, most int) ([]candidate, error) {
	query, args := lookQuery(opts, after, most)
	return s.candidates(ctx, query, args...)
}

func lookQuery(opts *ClaimOptions, after string, most int) (query string, args []any) {
	args = []any{after, most}
	if len(opts.ExceptTopics) > 0 {
		except := idList(opts.ExceptTopics)
		args = []any{after, except, most, except}
	}
	next := func(of, lane string) string {
		return "(SELECT " + of + " FROM {table} o WHERE o.status <> 'sent'" + passed(opts) + " AND o.lane " + lane + " LIMIT 1)"
	}
	first := "= l.lane ORDER BY o.seq"
	return `WITH RECURSIVE lanes (lane, n) AS (
  SELECT ` + next("o.lane", "> ? ORDER BY o.lane") + `, 1
  UNION ALL
  SELECT ` + next("o.lane", "> "+behind(opts)+" ORDER BY o.lane") + `, l.n + 1 FROM lanes l WHERE l.lane IS NOT NULL AND l.n < ?
)
SELECT l.lane, ` + next("o.id", first) + `, ` + next(due(opts), first) + `, ` + next("octet_length(o.payload)", first) + `
FROM lanes l WHERE l.lane IS NOT NULL ORDER BY l.n`, args
}

// followers reads the first rows of lanes, at most each of one, in order.
func (s *SQLStore) followers(ctx context.Context, opts *ClaimOptions, heads []candidate, each int) ([]candidate, error) {
	ids := make([]string, len(heads))
	for i, h := range heads {
		ids[i] = h.id
	}
	row := func(what string) string {
		return "(SELECT " + what + " FROM {table} o WHERE o.status <> 'sent' AND o.lane = r.lane AND o.seq = r.seq)"
	}
	args := []any{idList(ids), each}
	if len(opts.ExceptTopics) > 0 {
		args = append(args, idList(opts.ExceptTopics))
	}
	return s.candidates(ctx, `WITH RECURSIVE run (lane, seq, n) AS (
  SELECT o.lane, o.seq, 1 FROM {table} o WHERE o.id {ids} AND o.status <> 'sent'
  UNION ALL
  SELECT r.lane, (SELECT o.seq FROM {table} o WHERE o.status <> 'sent'`+passed(opts)+` AND o.lane = r.lane AND o.seq > r.seq ORDER BY o.seq LIMIT 1), r.n + 1
  FROM run r WHERE r.seq IS NOT NULL AND r.n < ?
)
SELECT r.lane, `+row("o.id")+`, `+row(due(opts))+`, `+row("octet_length(o.payload)")+` FROM run r WHERE r.seq IS NOT NULL ORDER BY r.n`, args...)
}

func (s *SQLStore) candidates(ctx context.Context, query string, args ...any) ([]candidate, error) {
	rows, err := s.db.QueryContext(ctx, s.q(query), args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var list []candidate
	for rows.Next() {
		c := candidate{}
		var id sql.NullString
		var due, size sql.NullInt64
		if err := rows.Scan(&c.lane, &id, &due, &size); err != nil {
			return nil, err
		}
		c.id, c.gone, c.due, c.size = id.String, !id.Valid, due.Int64 == 1, int(size.Int64)
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
WHERE status = 'pending' AND id {in SELECT o.id FROM {table} o WHERE o.id {ids} AND o.status = 'pending' AND o.next_at <= {now}{unlocked} in}
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
				back.Failed = append(back.Failed, Failure{Record: r, Unsent: r.PublishBegan == c.Now})
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
	slices.SortFunc(c.Records, bySequence)
	return c, nil
}

func bySequence(a, b *Record) int { return cmp.Compare(a.Sequence, b.Sequence) }
