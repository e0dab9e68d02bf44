package reading

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
)

// Bounds of pages.
const (
	maxPage   = 1_000       // events of one page
	pageBytes = 32 << 20    // of the events of one page
	exactPage = 10_000      // offset and limit together, up to which removed keys do not count
	maxProbes = 64          // questions for one position in a bucket
	pageWait  = time.Second // for a replica that is behind
	// removed keys that a page passes over; beyond, the page is refused
	pagePassed = 20_000
	// entries beyond a page that are read rather than asking for its position once more
	pageSlack = 500
)

func notCompacted(topic string) error {
	return &event.Error{Code: event.CodeBadTopic, Msg: fmt.Sprintf("topic %s is not compacted: give it compaction in the topics file", topic), Err: event.ErrNotCompacted}
}

// Compacted is readable for topics with a bucket.
func (r *Reads) Compacted(ctx context.Context, topic string) (*streams.Topic, error) {
	t, err := r.Streams.Readable(ctx, topic)
	if err != nil {
		return nil, err
	}
	if t.Bucket == nil {
		return nil, notCompacted(topic)
	}
	return t, nil
}

// Page is Keys.Page.
func (r *Reads) Page(ctx context.Context, topic string, offset, limit int) ([]*event.Event, error) {
	if offset < 0 {
		return nil, event.BadOptions("offset is %d: it is 0 or more", offset)
	}
	if limit < 1 || limit > maxPage {
		return nil, event.BadOptions("limit is %d: 1 to %d are allowed", limit, maxPage)
	}
	t, err := r.Compacted(ctx, topic)
	var page []*event.Event
	if err == nil {
		page, err = r.latestPage(ctx, t, offset, limit)
	}
	if errors.Is(err, event.ErrNotFound) {
		return nil, nil // no topic, or no bucket
	}
	if err != nil {
		return nil, r.Messages.Failed(err)
	}
	return page, nil
}

// ErrBehind is returned where a replica has nothing yet of what the leader has told of.
var ErrBehind = errors.New("jetstream: a replica does not have the entries of a page yet")

// latestPage begins a page anew when the replica that was asked is behind. An empty page would say
// that there are no more keys.
func (r *Reads) latestPage(ctx context.Context, t *streams.Topic, offset, limit int) ([]*event.Event, error) {
	for deadline := time.Now().Add(pageWait); ; {
		p := pageRead{reads: r, topic: t}
		page, err := p.read(ctx, offset, limit)
		if !errors.Is(err, ErrBehind) || time.Now().After(deadline) {
			return page, err
		}
		if err := r.Conn.Pause(ctx, 20*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// pageRead reads a page of a bucket. The server reads forward only, so the page's beginning is
// found first, by counting.
type pageRead struct {
	reads *Reads
	topic *streams.Topic

	first, last, entries uint64 // of the bucket's stream, at first
}

func (p *pageRead) read(ctx context.Context, offset, limit int) ([]*event.Event, error) {
	info, err := p.reads.Conn.FindStream(ctx, p.topic.Bucket.Stream)
	if err != nil {
		return nil, err
	}
	p.first, p.last, p.entries = info.State.FirstSeq, info.State.LastSeq, info.State.Msgs
	skip, behind := offset, uint64(0) // live events to be left out, and entries
	if offset+limit > exactPage {
		skip, behind = 0, uint64(offset) //nolint:gosec // not negative
	}
	if behind >= p.entries {
		return nil, nil
	}
	most := uint64(offset + limit + pagePassed)       //nolint:gosec // not negative
	for need := uint64(offset + limit); ; need *= 2 { //nolint:gosec // not negative
		need = min(need, p.entries, most)
		start, count, err := p.findStart(ctx, need)
		if err != nil {
			return nil, err
		}
		read := p.events
		if skip+limit > maxPage {
			read = p.fewEvents
		}
		page, all, err := read(ctx, start, count-behind, skip, limit)
		if err != nil {
			return nil, err
		}
		if all || need == p.entries {
			slices.Reverse(page)
			return page, nil
		}
		if need == most {
			p.reads.Obs.LimitReached("page_passed")
			return nil, &event.Error{Code: event.CodeOverloaded, Msg: fmt.Sprintf("over %d of the newest keys of topic %s were removed, and a page passes over no more: list the keys, which passes over all (next, without offset)", pagePassed, p.topic.Name)}
		}
		// Too many removed keys were among them: look further back.
	}
}

// events reads n entries, and returns the newest limit of those that are live, the oldest first,
// but for the skip newest. It reports whether there were as many.
func (p *pageRead) events(ctx context.Context, start, n uint64, skip, limit int) ([]*event.Event, bool, error) {
	need := skip + limit
	live := make([]*event.Event, 0, 2*need)
	size := 0
	err := p.each(ctx, start, n, false, func(m *conn.StoredMsg) error {
		if e, _, ok := p.topic.Entry(m); ok && !e.Tombstone {
			if len(live) == cap(live) {
				live = live[:copy(live, live[need:])]
			}
			live = append(live, e)
			size += heldBytes(e)
		}
		if size > pageBytes {
			return ErrStop
		}
		return nil
	})
	if size > pageBytes {
		clear(live)
		return p.fewEvents(ctx, start, n, skip, limit)
	}
	live = live[max(0, len(live)-need):]
	return live[:max(0, len(live)-skip)], len(live) == need, err
}

// fewEvents is events for when many are skipped, or large: it looks at headers first, and then
// fetches the events it needs.
func (p *pageRead) fewEvents(ctx context.Context, start, n uint64, skip, limit int) ([]*event.Event, bool, error) {
	need := skip + limit
	var live []uint64
	err := p.each(ctx, start, n, true, func(m *conn.StoredMsg) error {
		if e, _, ok := p.topic.Entry(m); ok && !e.Tombstone {
			live = append(live, m.Seq)
		}
		return nil
	})
	live = live[max(0, len(live)-need):]
	all := len(live) == need
	if live = live[:max(0, len(live)-skip)]; err != nil || len(live) == 0 {
		return nil, all, err
	}
	from, to := live[0], live[len(live)-1]
	page := make([]*event.Event, 0, limit)
	size := 0
	err = p.each(ctx, from, to-from+1, false, func(m *conn.StoredMsg) error {
		if m.Seq > to {
			return ErrStop
		}
		if e, _, ok := p.topic.Entry(m); ok && !e.Tombstone {
			page = append(page, e)
			size += heldBytes(e)
		}
		for size > pageBytes && len(page) > 1 { // the newest stay
			size -= heldBytes(page[0])
			page[0] = nil
			page = page[1:]
		}
		if m.Seq == to {
			return ErrStop
		}
		return nil
	})
	return page, all, err
}

// heldBytes is about what an event takes in memory, in bytes.
func heldBytes(e *event.Event) int {
	n := 200 + len(e.Payload) + len(e.Key) + len(e.ID)
	for name, value := range e.Headers {
		n += len(name) + len(value)
	}
	return n
}

// findStart finds a sequence from which on there are need entries, or some more, and how many.
func (p *pageRead) findStart(ctx context.Context, need uint64) (start, count uint64, err error) {
	if need == p.entries {
		return p.first, p.entries, nil
	}
	if p.last-p.first+1 == p.entries { // no holes
		return p.last + 1 - need, need, nil
	}
	// From lo on there are at least need entries, loCount of them; from hi on there are fewer.
	lo, hi := p.first, p.last+1
	loCount, hiCount := p.entries, uint64(0)
	for i := 0; hi-lo > 1 && loCount > need+pageSlack && i < maxProbes; i++ {
		mid := lo + (hi-lo)/2
		// every third step halves, so that no distribution of holes makes the search long
		if i%3 != 2 {
			share := float64(loCount-need-pageSlack/2) / float64(loCount-hiCount)
			mid = min(max(lo+uint64(share*float64(hi-lo)), lo+1), hi-1)
		}
		at, n, err := p.count(ctx, mid)
		if err != nil {
			return 0, 0, err
		}
		if n >= need {
			lo, loCount = max(at, mid), n
		} else {
			hi, hiCount = mid, n
		}
	}
	return lo, loCount, nil
}

// count is how many entries there are from seq on, and the sequence of the first of them.
func (p *pageRead) count(ctx context.Context, seq uint64) (first, n uint64, err error) {
	_, err = p.reads.Conn.Direct(ctx, p.topic.Bucket.Stream, &conn.DirectQuery{Seq: seq, Batch: 1}, func(m *conn.StoredMsg, pending uint64) error {
		first, n = m.Seq, pending+1
		return nil
	})
	return first, n, err
}

// each calls f for n entries from start on. Each direct get costs the server a count, a consumer
// one in all.
func (p *pageRead) each(ctx context.Context, start, n uint64, headersOnly bool, f func(*conn.StoredMsg) error) error {
	stream := p.topic.Bucket.Stream
	if headersOnly || n > 2*conn.MaxDirect {
		return p.reads.Messages.Through(ctx, stream, Query{From: start, HeadersOnly: headersOnly, Max: int(n)}, f) //nolint:gosec // entries of a bucket
	}
	for n > 0 {
		q := &conn.DirectQuery{Seq: start, Batch: int(min(n, conn.MaxDirect))}
		end, err := p.reads.Conn.Direct(ctx, stream, q, func(m *conn.StoredMsg, _ uint64) error {
			start = m.Seq + 1
			n--
			return f(m)
		})
		if errors.Is(err, ErrStop) {
			return nil
		}
		if err == nil && end.Got == 0 {
			err = ErrBehind
		}
		if err != nil || end.Pending == 0 {
			return err
		}
	}
	return nil
}
