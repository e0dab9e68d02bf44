package facade

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/cloudevents"
)

const (
	defaultPage = 100
	maxPage     = 1000 // items of a page, and keys of a request
	maxOffset   = 1_000_000_000
	// principalWaits is how many page requests of one principal may be read or wait at a time.
	principalWaits = 64
	// keysAtOnce is how many keys are read at a time, which bounds how far a read exceeds
	// Limits.PageBytes.
	keysAtOnce = 64
	// behindWait is how long a consistent page waits for the bucket to apply removals.
	behindWait = 2 * time.Second
)

// pageQuery is the query of GET /snap/{topic}: a page of all keys, or the records of given keys.
type pageQuery struct {
	offset, limit int
	keys          []string // nil for a page
	consistent    bool
	listing       bool   // a page of a listing, not a page at an offset
	next          string // the cursor of a listing; "" at its beginning
	version       int    // in which records are sent, as Server.casterOf takes it
}

// pageRead is the result of a query.
type pageRead struct {
	events []*jetstream.Event
	next   string // the cursor of the next page of a listing
	caster *caster
}

// parsePage reads the query of GET /snap/{topic}.
func parsePage(r *http.Request) (q pageQuery, fail *fault) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return q, &fault{code: codeBadOptions, msg: "The query is not URL-encoded correctly."}
	}
	if q.offset, fail = queryInt(values, "offset", 0, 0, maxOffset); fail != nil {
		return q, fail
	}
	if q.limit, fail = queryInt(values, "limit", defaultPage, 1, maxPage); fail != nil {
		return q, fail
	}
	if q.version, fail = versionParam(values); fail != nil {
		return q, fail
	}
	switch given := values["consistent"]; {
	case len(given) == 0:
	case len(given) == 1 && (given[0] == "true" || given[0] == "false"):
		q.consistent = given[0] == "true"
	default:
		return q, &fault{code: codeBadOptions, msg: "consistent must be true or false, and given once."}
	}
	if values.Has("next") {
		q.listing, q.next = true, values.Get("next")
		switch {
		case len(values["next"]) > 1:
			return q, &fault{code: codeBadOptions, msg: "next must be given once."}
		case values.Has("offset") || values.Has("keys") || values.Has("consistent"):
			return q, &fault{code: codeBadOptions, msg: "next goes with limit and schemaVersion only."}
		}
		return q, nil
	}
	given := values["keys"]
	switch {
	case len(given) == 0:
		return q, nil
	case len(given) > maxPage:
		return q, &fault{code: codeBadOptions, msg: "keys is given " + strconv.Itoa(len(given)) + " times: at most " + strconv.Itoa(maxPage) + " are allowed."}
	case values.Has("offset") || values.Has("limit"):
		return q, &fault{code: codeBadOptions, msg: "keys goes without offset and limit."}
	}
	known := make(map[string]bool, len(given))
	for _, key := range given {
		if fail := checkKey("A key among keys", key); fail != nil {
			return q, fail
		}
		if !known[key] {
			known[key] = true
			q.keys = append(q.keys, key)
		}
	}
	return q, nil
}

// queryInt reads an optional integer parameter.
func queryInt(values url.Values, name string, byDefault, least, limit int) (int, *fault) {
	given := values[name]
	if len(given) == 0 {
		return byDefault, nil
	}
	n, err := strconv.Atoi(given[0])
	if err != nil || len(given) > 1 || n < least || n > limit {
		return 0, &fault{code: codeBadOptions, msg: name + " must be an integer from " + strconv.Itoa(least) + " to " + strconv.Itoa(limit) + ", given once."}
	}
	return n, nil
}

// servePage serves GET /snap/{topic}.
func (s *Server) servePage(w http.ResponseWriter, r *http.Request) {
	p, topic, fail := s.snapTopic(r, s.mayRead)
	var q pageQuery
	if fail == nil {
		q, fail = parsePage(r)
	}
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	page, held, fail := s.readPage(r, p.Key(), topic, &q)
	defer func() { s.pages.give(p.Key(), held) }()
	if fail != nil {
		s.refuse(w, fail)
		return
	}
	s.writePage(w, r, &q, page, s.cloudFormFor(w, r, topic))
}

// readPage executes the query when it is the principal's turn, within Limits.PageBytes. It takes
// what a page may have from the budget of pages before anything is read, and keeps held bytes of
// that for the page: the caller gives them back, also after a fault.
func (s *Server) readPage(r *http.Request, who, topic string, q *pageQuery) (page pageRead, held int, fail *fault) {
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	if !s.reading.Enter(ctx, who, principalWaits, func() { s.cfg.Observer.LimitReached("pages") }) {
		return page, 0, &fault{code: codeOverloaded, msg: "The hub has reached its limit of concurrent page reads."}
	}
	defer s.reading.Leave(who)
	limit := s.cfg.Limits.PageBytes
	if ok, mine := s.pages.take(who, limit); !ok {
		name := "page_total"
		if mine {
			name = "principal_page_total"
		}
		s.cfg.Observer.LimitReached(name)
		return page, 0, &fault{code: codeOverloaded, msg: "The hub has reached its limit of pages that clients have not taken yet."}
	}
	page, fail = s.queryPage(ctx, r, topic, q)
	held = min(sizes(page.events), limit) // one record alone may be larger
	s.pages.give(who, limit-held)
	return page, held, fail
}

// queryPage reads a page from the bus.
func (s *Server) queryPage(ctx context.Context, r *http.Request, topic string, q *pageQuery) (page pageRead, fail *fault) {
	cast, err := s.casterOf(ctx, topic, q.version, principalOf(r).Key())
	switch {
	case err != nil:
	case q.keys != nil:
		var whole bool
		page.events, whole, err = s.readKeys(ctx, topic, q.keys, q.consistent)
		if err == nil && !whole {
			s.cfg.Observer.LimitReached("page_bytes")
			return page, &fault{code: codeBadOptions, msg: "The records of these keys have more than " + strconv.Itoa(s.cfg.Limits.PageBytes) + " bytes: ask for fewer keys at a time."}
		}
	case q.listing:
		page, err = s.readListing(ctx, topic, q)
	default:
		page.events, err = s.readLatest(ctx, topic, q)
	}
	if err != nil {
		return page, s.readFault(r, topic, err)
	}
	page.caster = cast
	return page, nil
}

// readListing reads a page of a listing.
func (s *Server) readListing(ctx context.Context, topic string, q *pageQuery) (pageRead, error) {
	l, err := s.cfg.Bus.Keys(topic).List(ctx, jetstream.ListOptions{Next: q.next, Limit: q.limit, Bytes: s.cfg.Limits.PageBytes})
	if l.Cut {
		s.cfg.Observer.LimitReached("page_bytes")
	}
	return pageRead{events: l.Events, next: l.Next}, err
}

// errBehind is returned when all keys of a page were removed and the bucket did not learn of that
// in time.
var errBehind = errors.New("facade: read a page: the bucket of the compacted topic lags behind its stream")

// readLatest reads a page of all keys, newest first. A consistent page is not empty while there are
// more keys: if every record that the bucket has for the page was removed, readLatest reads again
// until the bucket knows of the removals.
func (s *Server) readLatest(ctx context.Context, topic string, q *pageQuery) ([]*jetstream.Event, error) {
	for deadline := time.Now().Add(behindWait); ; {
		events, err := s.readStored(ctx, topic, q)
		if err != nil || !q.consistent || len(events) == 0 {
			return events, err
		}
		keys := make([]string, len(events))
		for i, e := range events {
			keys[i] = e.Key
		}
		// Records that changed meanwhile may be larger. readKeys cuts the page again, and keeps at
		// least one record.
		events, _, err = s.readKeys(ctx, topic, keys, true)
		if err != nil || len(events) > 0 {
			slices.SortStableFunc(events, func(a, b *jetstream.Event) int { return cmp.Compare(b.Sequence, a.Sequence) })
			return events, err
		}
		if time.Now().After(deadline) {
			return nil, errBehind
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// readStored reads a page from the bucket as it is.
func (s *Server) readStored(ctx context.Context, topic string, q *pageQuery) ([]*jetstream.Event, error) {
	events, err := s.cfg.Bus.Keys(topic).Page(ctx, q.offset, q.limit)
	if errors.Is(err, jetstream.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	n := fitting(events, s.cfg.Limits.PageBytes)
	if n < len(events) {
		s.cfg.Observer.LimitReached("page_bytes")
	}
	clear(events[n:])
	return events[:n], nil
}

// readKeys reads the records of keys, in the order of keys, without keys that have no record. It
// stops early when the records exceed Limits.PageBytes, but returns at least one. whole reports
// whether it reached the end.
func (s *Server) readKeys(ctx context.Context, topic string, keys []string, consistent bool) (events []*jetstream.Event, whole bool, err error) {
	read := s.cfg.Bus.Keys(topic).GetMany
	if consistent {
		read = s.cfg.Bus.Keys(topic).GetConsistent
	}
	size := 0
	for some := range slices.Chunk(keys, keysAtOnce) {
		found, err := read(ctx, some)
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil, true, nil
		}
		if err != nil {
			return nil, false, err
		}
		for _, key := range some {
			e := found[key]
			if e == nil || e.Tombstone {
				continue
			}
			if size += eventSize(e); size > s.cfg.Limits.PageBytes && len(events) > 0 {
				return events, false, nil
			}
			events = append(events, e)
		}
	}
	return events, true, nil
}

// fitting returns how many of events have at most limit bytes together, but at least one if there
// is one.
func fitting(events []*jetstream.Event, limit int) int {
	size := 0
	for i, e := range events {
		if size += eventSize(e); size > limit && i > 0 {
			return i
		}
	}
	return len(events)
}

func sizes(events []*jetstream.Event) (size int) {
	for _, e := range events {
		size += eventSize(e)
	}
	return size
}

// eventSize estimates the bytes that an event takes in memory and in an answer.
func eventSize(e *jetstream.Event) int {
	size := 256 + len(e.Payload) + len(e.Key) + len(e.SID)
	for name, value := range e.Headers {
		size += len(name) + len(value)
	}
	for _, list := range [][]string{e.Tags, e.CausedBy} {
		for _, v := range list {
			size += len(v)
		}
	}
	return size
}

// writePage sends {offset, limit, count, items}, or {limit, count, items, next} for a listing, or
// {count, items} for given keys, or an array of CloudEvents. It sends events while it encodes. An
// answer whose events cannot be cast for now is a refusal, or ends early, and the connection with
// it.
func (s *Server) writePage(w http.ResponseWriter, r *http.Request, q *pageQuery, page pageRead, cloud *cloudForm) {
	b, _ := buffers.Get().(*[]byte)
	defer putBuffer(b)
	kind, out, end := "application/json", beginPage((*b)[:0], q, len(page.events)), "}\n"
	header := w.Header()
	if cloud != nil {
		kind, out, end = cloudevents.BatchMediaType, (*b)[:0], "\n"
	}
	switch {
	case page.next == "": // letters, digits, - and _
	case cloud != nil: // RFC 8288
		link := "<?next=" + page.next + "&limit=" + strconv.Itoa(q.limit)
		if q.version != 0 {
			link += "&" + optSchemaVersion + "=" + versionText(q.version)
		}
		header.Set("Link", link+`>; rel="next"`)
	default:
		end = `,"next":"` + page.next + `"` + end
	}
	out = append(out, '[')
	header.Set("Cache-Control", "no-cache")
	header.Set("Content-Type", kind)
	ctx, cancel := s.rangeContext(r.Context(), principalOf(r))
	defer cancel()
	a := s.newAnswer(w)
	begun := false
	for i, e := range page.events {
		if i > 0 {
			out = append(out, ',')
		}
		why, err := page.caster.cast(ctx, e)
		if err != nil {
			if begun || ctx.Err() != nil {
				panic(http.ErrAbortHandler)
			}
			fail := s.readFault(r, e.Topic, err)
			header.Del("Link")
			s.refuse(w, fail)
			return
		}
		out = appendRead(out, e, cloud, why)
		page.events[i] = nil
		if len(out) >= answerPiece {
			begun = true
			a.write(out)
			out = out[:0]
		}
	}
	out = append(append(out, ']'), end...)
	a.write(out)
	a.end()
	*b = out
}

// beginPage appends a page up to its count items.
func beginPage(dst []byte, q *pageQuery, count int) []byte {
	dst = append(dst, '{')
	if q.keys == nil && !q.listing {
		dst = append(dst, `"offset":`...)
		dst = strconv.AppendInt(dst, int64(q.offset), 10)
		dst = append(dst, ',')
	}
	if q.keys == nil {
		dst = append(dst, `"limit":`...)
		dst = strconv.AppendInt(dst, int64(q.limit), 10)
		dst = append(dst, ',')
	}
	dst = append(dst, `"count":`...)
	dst = strconv.AppendInt(dst, int64(count), 10)
	return append(dst, `,"items":`...)
}
