package outbox

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// A claim divides its looks evenly among topics, so that no topic waits for the backlog of another.
// In each topic, the claim continues where the previous claim stopped.

// maxSpans is the maximum number of spans per query.
const maxSpans = 50

// maxCursors is the maximum number of topics whose position a store remembers. In other topics,
// each claim starts from the beginning.
const maxCursors = 10_000

// span is a range of the lanes of one topic, either those with a key or those without, that a claim
// has yet to examine.
type span struct {
	first string // the first lane of the full range
	start string // the lane to start at
	stop  string // the end of the range, exclusive
	whole string // the end of the full range, which identifies the span
	open  bool   // not examined since the last claim that found rows
}

// cursor is the position in a span that was examined only in part.
type cursor struct {
	next  string // the lane to continue at
	began int64  // number of the claim that examined the first lane
	used  int64  // number of the last claim that examined the span
}

// progress is the search position shared by the claims of a store.
type progress struct {
	claims int64 // number of claims so far
	found  int64 // number of the last claim that found rows
	// where the next claim starts to look for topics; "" means at the first
	at    string
	began int64 // number of the claim that started at the first topic
	// some lanes since then were not examined after the last claim that found rows
	open    bool
	cursors map[string]cursor // keyed by span.whole
}

// search is the search of one claim. It works on a copy of the progress, because claims may
// overlap.
type search struct {
	*SQLStore
	opts     *ClaimOptions
	progress progress
	looks    int // looks left
	heads    []candidate
}

// heads returns the first rows of lanes with due rows, at most opts.Limit. more means that other
// lanes may have due rows.
func (s *SQLStore) heads(ctx context.Context, opts *ClaimOptions) (heads []candidate, more bool, err error) {
	q := &search{SQLStore: s, opts: opts, looks: opts.Limit * maxLooks}
	s.mu.Lock()
	s.progress.claims++
	q.progress = s.progress
	q.progress.cursors = maps.Clone(s.progress.cursors)
	s.mu.Unlock()
	if more, err = q.run(ctx); err != nil {
		return nil, false, err
	}
	if len(q.heads) > 0 {
		q.progress.found = q.progress.claims
	}
	s.mu.Lock()
	q.progress.claims = s.progress.claims
	s.progress = q.progress
	s.mu.Unlock()
	return q.heads, more, nil
}

// run examines topics from where the last claim stopped, wrapping around at the end.
func (q *search) run(ctx context.Context) (more bool, err error) {
	p := &q.progress
	start, from := p.at, p.at
	if start == "" {
		p.began, p.open = p.claims, false
	}
	var open, wrapped, barren bool
	for q.looks > 0 && !q.full() {
		stop := ""
		if wrapped {
			stop = start
		}
		spans, next, err := q.topics(ctx, from, stop)
		if err != nil {
			return false, err
		}
		for round := 0; len(spans) > 0 && q.looks > 0 && !q.full(); round++ {
			// When the first lanes of the topics are blocked, each round examines more lanes per
			// topic.
			share := max(1, (q.opts.Limit-len(q.heads))/len(spans)) << (2 * round)
			if spans, err = q.lookAt(ctx, spans, max(1, min(share, q.looks/len(spans)))); err != nil {
				return false, err
			}
		}
		for _, left := range spans {
			open = open || left.open
		}
		if from = next; next != "" {
			continue
		}
		maps.DeleteFunc(p.cursors, func(_ string, c cursor) bool { return c.used < p.began })
		if start == "" || wrapped {
			p.at = ""
			return open, nil
		}
		wrapped, barren = true, !open && !p.open && p.began > p.found
		p.began, p.open = p.claims, false
	}
	p.at, p.open = from, p.open || open
	return !barren, nil
}

func (q *search) full() bool { return len(q.heads) == q.opts.Limit }

// topics returns the next topics with rows, in rotated order so that no topic is favored. It stops
// before stop unless stop is "". next is where to continue, or "" at the end.
func (q *search) topics(ctx context.Context, from, stop string) (spans []span, next string, err error) {
	query, args := topicsQuery(q.opts, from)
	rows, err := q.db.QueryContext(ctx, q.q(query), args...)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = rows.Close() }()
	end := from
	for rows.Next() {
		var lane string
		if err := rows.Scan(&lane); err != nil {
			return nil, "", err
		}
		if stop != "" && lane >= stop {
			break
		}
		if len(spans) == maxSpans {
			next = end
			break
		}
		q.looks--
		var topic string
		if topic, end = ofLane(lane); slices.Contains(q.opts.ExceptTopics, topic) {
			continue
		}
		sp := span{first: lane, start: lane, stop: end, whole: end, open: true}
		if c, ok := q.progress.cursors[end]; ok {
			sp.start = c.next
		}
		spans = append(spans, sp)
	}
	if len(spans) > 1 {
		at := rand.N(len(spans)) //nolint:gosec // not security-relevant
		spans = slices.Concat(spans[at:], spans[:at])
	}
	return spans, next, rows.Err()
}

// ofLane returns the topic of a lane, and the end of the lanes of that topic with the same prefix.
// '0' is the byte after '/', and topics contain no slash, so no other lane falls into that range.
func ofLane(lane string) (topic, end string) {
	topic, _, _ = strings.Cut(strings.TrimLeft(lane, "/"), "/")
	if strings.HasPrefix(lane, "/") {
		return topic, "/" + topic + "0"
	}
	return topic, topic + "0"
}

// topicsQuery selects the first lane of each topic, starting at from. It skips from topic to topic
// by the lane index.
func topicsQuery(opts *ClaimOptions, from string) (query string, args []any) {
	next := "(SELECT o.lane FROM {table} o WHERE o.status <> 'sent'" + passed(opts) + " AND o.lane >= "
	return `WITH RECURSIVE topics (lane, n) AS (
  SELECT ` + next + `? ORDER BY o.lane LIMIT 1), 1
  UNION ALL
  SELECT ` + next + `CASE WHEN l.lane LIKE '/%' THEN '/' ELSE '' END || {topic} || '0' ORDER BY o.lane LIMIT 1), l.n + 1
  FROM topics l WHERE l.lane IS NOT NULL AND l.n < ?
)
SELECT l.lane FROM topics l WHERE l.lane IS NOT NULL ORDER BY l.n`, []any{from, maxSpans + 2*len(opts.ExceptTopics) + 1}
}

// lookAt examines the first row of each of the next lanes of spans, at most share lanes per span,
// and collects the due rows. It returns the unexamined rest of the spans.
func (q *search) lookAt(ctx context.Context, spans []span, share int) (rest []span, err error) {
	query, args := q.lookQuery(q.opts, spans, share)
	rows, err := q.db.QueryContext(ctx, q.q(query), args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	looked, next := make([]int, len(spans)), make([]string, len(spans))
	for rows.Next() {
		var c candidate
		var n int
		if err := rows.Scan(&n, &c.lane, &c.id, &c.topic, &c.due, &c.size); err != nil {
			return nil, err
		}
		switch {
		case next[n] != "":
		case looked[n] == share || q.full():
			next[n] = c.lane
		default:
			looked[n]++
			q.looks--
			if c.due && !q.ails(c.lane) {
				q.heads = append(q.heads, c)
			}
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	for i, sp := range spans {
		if left, ok := q.note(sp, next[i]); ok {
			rest = append(rest, left)
		}
	}
	return rest, nil
}

// note records that a span was examined up to next, or to its end if next is "", and returns the
// rest of the span.
func (q *search) note(sp span, next string) (left span, ok bool) {
	p := &q.progress
	c, known := p.cursors[sp.whole]
	if !known {
		c.began = p.claims
	}
	delete(p.cursors, sp.whole)
	switch {
	case next != "":
		if len(p.cursors) < maxCursors {
			if p.cursors == nil {
				p.cursors = make(map[string]cursor)
			}
			p.cursors[sp.whole] = cursor{next: next, began: c.began, used: p.claims}
		}
		sp.start = next // sp.open still holds: if the span was examined before, so was its rest
		return sp, true
	case sp.stop == sp.whole && sp.start != sp.first: // the part before the cursor is left
		return span{first: sp.first, start: sp.first, stop: sp.start, whole: sp.whole, open: c.began <= p.found}, true
	default:
		return span{}, false
	}
}

// lookQuery selects the first rows of the next lanes of spans, and one lane more per span. It skips
// from lane to lane by the lane index. The LIMIT tells PostgreSQL how many spans there are;
// otherwise PostgreSQL assumes a hundred and JIT-compiles the query, which takes longer than
// running it.
func (s *SQLStore) lookQuery(opts *ClaimOptions, spans []span, share int) (query string, args []any) {
	unsent := "{table} o WHERE o.status <> 'sent'" + passed(opts)
	next := func(from, stop string) string {
		return "(SELECT o.lane FROM " + unsent + " AND o.lane " + from + " AND o.lane < " + stop + " ORDER BY o.lane LIMIT 1)"
	}
	first := "(SELECT o.seq FROM " + unsent + " AND o.lane = l.lane ORDER BY o.seq LIMIT 1)"
	list := make([]string, len(spans))
	for i, sp := range spans {
		list[i] = idList([]string{sp.start, sp.stop})
	}
	return `WITH RECURSIVE lanes (span, lane, stop, n) AS (
  SELECT s.n, ` + next(">= s.start", "s.stop") + `, s.stop, 1 FROM ({spans} LIMIT ` + strconv.Itoa(len(spans)) + `) s
  UNION ALL
  SELECT l.span, ` + next("> l.lane", "l.stop") + `, l.stop, l.n + 1 FROM lanes l WHERE l.lane IS NOT NULL AND l.n <= ?
)
` + s.candidates(opts, "lanes l", "l.span, l.lane", "l.lane IS NOT NULL", unsent+" AND o.lane = l.lane AND o.seq = "+first, 1) + `
ORDER BY l.n, l.span`, []any{"[" + strings.Join(list, ",") + "]", share}
}
