package outbox

import (
	"context"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// A claim deals its looks out evenly to topics, so that none waits for the backlog of another. In each topic it goes on where the
// last claim stopped.

// maxSpans bounds the spans that one query looks at.
const maxSpans = 50

// maxCursors bounds how many topics a store knows where to go on in; in others each claim begins anew.
const maxCursors = 10_000

// span is the lanes of a topic, those with a key or those without one, that a claim is to look at.
type span struct {
	first string // the first lane of all
	start string // the lane to begin at
	stop  string // the end, which is not looked at any more
	whole string // the end of all, by which the span is known
	open  bool   // no claim has looked at it since the last one that found something
}

// cursor is where to go on in a span that was not looked through.
type cursor struct {
	next  string // lane
	began int64  // the claim that looked at the first lane
	used  int64  // the claim that looked last
}

// progress is how far the claims of a store have looked.
type progress struct {
	claims  int64             // how many there were
	found   int64             // the last one that found something
	at      string            // where the next one begins to look for topics, "" at the first
	began   int64             // the claim that began at the first topic
	open    bool              // since then there were lanes that no claim looked at since the last one that found something
	cursors map[string]cursor // by span.whole
}

// search is the search of one claim for lanes. It works on a copy of the progress, for claims may overlap.
type search struct {
	*SQLStore
	opts     *ClaimOptions
	progress progress
	looks    int // how many are left
	heads    []candidate
}

// heads are the first rows of lanes that are due, at most opts.Limit. more says that others may be due.
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

// run looks at topics from where the last claim stopped, all the way round if it can.
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
			// Where the first lanes of topics wait, more of each are looked at.
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

// topics are the next topics that have rows, before stop unless that is "", in an order that favors none; and where to go on, ""
// when there are no others.
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
		at := rand.N(len(spans)) //nolint:gosec // no secret
		spans = slices.Concat(spans[at:], spans[:at])
	}
	return spans, next, rows.Err()
}

// ofLane is the topic of a lane, and the end of the lanes of that topic that begin as this one does. '0' is the byte after '/',
// and as topics have no slash, nothing else lies in between.
func ofLane(lane string) (topic, end string) {
	topic, _, _ = strings.Cut(strings.TrimLeft(lane, "/"), "/")
	if strings.HasPrefix(lane, "/") {
		return topic, "/" + topic + "0"
	}
	return topic, topic + "0"
}

// topicsQuery asks for the first lane of each topic from one on, going from topic to topic by the index of lanes.
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

// lookAt looks at the first row of each of the next lanes of spans, at most share of each, and takes those that are due. It
// returns what is left of the spans.
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
		if err := rows.Scan(&n, &c.lane, &c.id, &c.due, &c.size); err != nil {
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

// note notes that a span was looked at up to next, which is "" at its end, and returns what is left of it.
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
		sp.start = next // where all was looked at before, the rest need not be
		return sp, true
	case sp.stop == sp.whole && sp.start != sp.first: // what is before the cursor
		return span{first: sp.first, start: sp.first, stop: sp.start, whole: sp.whole, open: c.began <= p.found}, true
	default:
		return span{}, false
	}
}

// lookQuery asks for the first rows of the next lanes of spans, and those of one lane more of each, going from lane to lane by
// the index of lanes. The limit tells PostgreSQL how many spans there are: for the hundred that it assumes otherwise it compiles
// the query, which takes longer than running it.
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
