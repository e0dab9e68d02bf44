package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
)

// maxLooks limits how many lanes a claim examines, per row that it may return. A claim examines
// only the first rows of each lane, so a blocked lane costs one look, however many rows it has.
const maxLooks = 10

// maxAiling is the maximum number of lanes remembered as failed. When it is reached, the store
// forgets them and tries all lanes again.
const maxAiling = 1_000

// candidate is a row that a claim examined.
type candidate struct {
	ref

	lane string
	due  bool // pending, and its retry time has come
	size int  // bytes that loading the row would read
}

// Claim implements Store.
//
// It first searches without locks and then takes rows by an UPDATE that checks each row again. If
// another drainer took a row first, Claim gives back the rows after it in the same lane.
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
	lanes := make(map[string][]candidate, len(heads)) // the first rows of each lane, in order
	each := opts.Limit / len(heads)
	if each > 1 {
		if lanes, err = s.followers(ctx, opts, heads, each); err != nil {
			return Claim{}, err
		}
	} else {
		for _, h := range heads {
			lanes[h.lane] = []candidate{h}
		}
	}
	runs := make(map[string][]ref, len(heads)) // by lane, in order
	ended := make(map[string]bool)
	left := opts.bytes()
	for n := range each { // round-robin over the lanes, so that the limits are shared evenly
		for _, h := range heads {
			if ended[h.lane] || n >= len(lanes[h.lane]) {
				continue
			}
			switch row := lanes[h.lane][n]; {
			case !row.due:
				ended[h.lane] = true
			case row.size > left && len(runs) > 0:
				ended[h.lane], more = true, true
			default:
				left -= row.size
				runs[h.lane] = append(runs[h.lane], row.ref)
				more = more || n == each-1 // the lane may have further rows
			}
		}
	}
	if len(runs) == 0 {
		return Claim{More: more}, nil // other drainers took all of them
	}
	c, err := s.take(ctx, opts, runs, more)
	if err == nil || len(runs) == 1 || ctx.Err() != nil {
		return c, err
	}
	return s.takeEach(ctx, opts, runs, more)
}

// takeEach claims each lane separately after a claim of all lanes together failed. The cause, such
// as a damaged page or a trigger that rejects the change, then affects only its own lanes. Claims
// skip failed lanes for pace.ailing.
func (s *SQLStore) takeEach(ctx context.Context, opts *ClaimOptions, runs map[string][]ref, more bool) (Claim, error) {
	all, each := Claim{More: more}, *opts
	for lane, run := range runs {
		c, err := s.take(ctx, &each, map[string][]ref{lane: run}, more)
		if err != nil {
			all.Failed = append(all.Failed, LaneError{lane, err})
			continue
		}
		all.Now, all.Began, each.Began = c.Now, c.Began, c.Began
		all.Records = append(all.Records, c.Records...)
		all.Unsettled.add(&c.Unsettled)
	}
	if len(all.Failed) == len(runs) {
		return Claim{}, all.Failed[0].Err // every lane failed, so the cause is not in the rows
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range all.Failed {
		if s.ailing == nil || len(s.ailing) == maxAiling {
			s.ailing = make(map[string]time.Time)
		}
		s.ailing[f.Lane] = time.Now().Add(s.pace.ailing)
	}
	slices.SortFunc(all.Records, bySequence)
	return all, nil
}

// ails reports whether a claim of the lane failed recently.
func (s *SQLStore) ails(lane string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	until, ok := s.ailing[lane]
	if ok && time.Now().After(until) {
		delete(s.ailing, lane)
		return false
	}
	return ok
}

// passed returns the condition that skips parked rows if opts.PassErrors is set. The lane index
// only applies together with the condition status <> 'sent'.
func passed(opts *ClaimOptions) string {
	if opts.PassErrors {
		return " AND o.status <> 'error'"
	}
	return ""
}

// candidates returns a query for candidate rows. For each row of query that meets cond, it selects
// key and at most limit rows o of from, with whether each can be claimed and how many bytes it
// would read. from must end with a condition. The form of the query makes PostgreSQL look rows up
// by index: without it, PostgreSQL misjudges the size of the table.
func (s *SQLStore) candidates(opts *ClaimOptions, query, key, cond, from string, limit int) string {
	var sizes []string
	for _, c := range s.largeColumns(opts.MaxPayload) {
		sizes = append(sizes, fmt.Sprintf("CASE WHEN octet_length(o.%[1]s) <= %[2]d THEN octet_length(o.%[1]s) ELSE 0 END", c.name, c.most))
	}
	columns := "o.id, o.aggregatetype, CASE WHEN o.status = 'pending' AND o.next_at <= {now} THEN 1 ELSE 0 END AS due, " + strings.Join(sizes, " + ") + " AS size"
	if s.dialect == SQLite {
		return fmt.Sprintf("SELECT %s, %s FROM %s CROSS JOIN %s AND %s", key, columns, query, from, cond)
	}
	return fmt.Sprintf("SELECT %s, o.id, o.aggregatetype, o.due, o.size FROM %s CROSS JOIN LATERAL (SELECT %s FROM %s ORDER BY o.id LIMIT %d) o WHERE %s", key, query, columns, from, limit, cond)
}

// followers reads up to each first rows of every lane, ordered by sequence and then by id.
func (s *SQLStore) followers(ctx context.Context, opts *ClaimOptions, heads []candidate, each int) (map[string][]candidate, error) {
	query, args := s.followersQuery(opts, heads, each)
	rows, err := s.query(ctx, s.db, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	lanes := make(map[string][]candidate, len(heads))
	for rows.Next() {
		var c candidate
		if err := rows.Scan(&c.lane, &c.id, &c.topic, &c.due, &c.size); err != nil {
			return nil, err
		}
		lanes[c.lane] = append(lanes[c.lane], c)
	}
	return lanes, rows.Err()
}

func (s *SQLStore) followersQuery(opts *ClaimOptions, heads []candidate, each int) (query string, args []any) {
	list := make([]ref, len(heads))
	for i := range heads {
		list[i] = heads[i].ref
	}
	ids, same := refArgs(list)
	unsent := "{table} o WHERE o.status <> 'sent'" + passed(opts)
	return ofTopic(`WITH RECURSIVE run (lane, seq, n) AS (
  SELECT o.lane, o.seq, 1 FROM {table} o WHERE o.id {ids} AND {same} AND o.status <> 'sent'
  UNION ALL
  SELECT r.lane, (SELECT o.seq FROM `+unsent+` AND o.lane = r.lane AND o.seq > r.seq ORDER BY o.seq LIMIT 1), r.n + 1
  FROM run r WHERE r.seq IS NOT NULL AND r.n < ?
)
`+s.candidates(opts, "run r", "r.lane", "r.seq IS NOT NULL", unsent+" AND o.lane = r.lane AND o.seq = r.seq", each)+`
ORDER BY r.n, o.id`, list), []any{ids, same, each}
}

// take claims the rows of runs that are still available, and in each run stops at the first row
// that is not.
func (s *SQLStore) take(ctx context.Context, opts *ClaimOptions, runs map[string][]ref, more bool) (Claim, error) {
	var list []ref
	for _, run := range runs {
		list = append(list, run...)
	}
	ids, same := refArgs(list)
	c := Claim{More: more}
	got, err := s.records(ctx, ofTopic(`UPDATE {table} AS o SET status = 'claimed', claimed_by = ?, lease_until = {now} + ?,
  publish_began = COALESCE(NULLIF(publish_began, 0), NULLIF(CAST(? AS BIGINT), 0), {now})
WHERE status = 'pending' AND {rows o.id {ids} AND {same} AND o.status = 'pending' AND o.next_at <= {now} rows}
RETURNING `+s.columns(opts.MaxPayload)+`, {now}`, list), []any{opts.Worker, opts.Lease.Milliseconds(), opts.Began, ids, same}, &c.Now)
	if err != nil {
		return Claim{}, err
	}
	c.Began = cmp.Or(opts.Began, c.Now)
	taken := make(map[ref]*Record, len(got))
	for _, r := range got {
		taken[r.ref()] = r
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
				back.Failed = append(back.Failed, Failure{Record: r, Unsent: r.PublishBegan == c.Began})
			default:
				c.Records = append(c.Records, r)
			}
		}
	}
	if len(back.Failed) > 0 {
		left, err := s.Settle(ctx, opts.Worker, back)
		if err != nil {
			return Claim{}, err
		}
		c.Unsettled.add(&left.Locked)
		c.Unsettled.add(&left.Refused)
	}
	slices.SortFunc(c.Records, bySequence)
	return c, nil
}

func bySequence(a, b *Record) int {
	return cmp.Or(cmp.Compare(a.Sequence, b.Sequence), cmp.Compare(a.ID, b.ID))
}
