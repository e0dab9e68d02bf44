package reading

import (
	"context"
	"errors"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
)

// Bounds of a page of a listing.
const (
	listingTime = 2 * time.Second // after which a page ends, even with nothing on it
	// entries that a page looks at, removed keys included, after which it ends. It then has fewer
	// events than it might have, or none, and the next page goes on.
	listingPassed = 20_000
	// entries written since the listing began that are looked at together
	listingWindow = 10_000
	// of entries that are fetched together; a single one may be larger
	listingBytes = 4 << 20
)

// ListOptions selects a page of a listing, as the ListOptions of the bus.
type ListOptions struct {
	Next  string
	Limit int
	Bytes int
}

// Listing is a page of a listing, as the Listing of the bus.
type Listing struct {
	Events []*event.Event
	Next   string
	Cut    bool
}

// List is Keys.List.
func (r *Reads) List(ctx context.Context, topic string, opts ListOptions) (Listing, error) {
	if opts.Limit < 1 || opts.Limit > maxPage {
		return Listing{}, event.BadOptions("limit is %d: 1 to %d are allowed", opts.Limit, maxPage)
	}
	if opts.Bytes <= 0 {
		opts.Bytes = pageBytes
	}
	l := listing{reads: r, opts: opts}
	t, err := r.Compacted(ctx, topic)
	if err == nil {
		l.topic = t
		err = l.read(ctx)
	}
	if errors.Is(err, event.ErrNotFound) { // no topic, or no bucket
		if opts.Next != "" {
			return Listing{}, errListingOver("the topic's bucket is gone")
		}
		return Listing{}, nil
	}
	if errors.Is(err, errAnew) {
		return Listing{}, errListingOver("the topic's bucket was created again")
	}
	if err != nil {
		return Listing{}, r.Messages.Failed(err)
	}
	return l.page, nil
}

// listing makes one page. The bucket's entries are read in the order in which they were written. An
// entry from before the listing began is the first of its key that comes by. One that was written
// since may be of a key that was given already: the records of the pages tell.
type listing struct {
	reads  *Reads
	topic  *streams.Topic
	opts   ListOptions
	at     listingCursor
	reader *listingReader // reads ahead; nil: direct gets

	page  Listing
	size  int             // of its events
	known map[string]bool // keys of its events, once that matters
	ended bool            // everything was read
}

func (l *listing) read(ctx context.Context) (err error) {
	if err := l.begin(ctx); err != nil {
		return err
	}
	defer func() { l.finish(ctx, err) }()
	passed := 0
	for deadline := time.Now().Add(listingTime); !l.full() && !l.ended && passed < listingPassed && time.Now().Before(deadline); {
		entries, last, err := l.entries(ctx)
		if err != nil {
			return err
		}
		taken, err := l.take(ctx, entries)
		if err != nil {
			return err
		}
		passed += taken
		l.ended = last && taken == len(entries)
		if l.reader != nil {
			l.reader.drop(taken)
		}
	}
	if l.ended {
		return nil
	}
	if err := l.record(ctx); err != nil {
		return err
	}
	l.page.Next = l.at.text()
	return nil
}

// begin finds where the page begins.
func (l *listing) begin(ctx context.Context) error {
	if l.opts.Next != "" {
		var err error
		if l.at, err = parseListingCursor(l.opts.Next, l.topic.Name); err != nil {
			return err
		}
		if l.reader = l.reads.listings.take(&l.at); l.reader != nil {
			return nil
		}
	}
	info, err := l.reads.Conn.FindStream(ctx, l.topic.Bucket.Stream)
	switch {
	case err != nil:
		return err
	case l.opts.Next == "":
		l.at = newListingCursor(l.topic.Name, native.StreamMade(info), info.State.LastSeq)
	case native.StreamMade(info).UnixNano() != l.at.created:
		return errAnew
	case info.State.LastSeq > l.at.pos+uint64(l.opts.Limit): //nolint:gosec // it is positive
		// A listing that goes on goes on further, as a rule.
		l.reader = l.reads.listings.open(ctx, &l.at, l.topic.Bucket.Stream)
	}
	return nil
}

// finish keeps the reader for the next page.
func (l *listing) finish(ctx context.Context, err error) {
	switch {
	case l.reader != nil && err == nil && !l.ended:
		l.reads.listings.put(l.reader)
	case l.reader != nil:
		l.reads.listings.close(ctx, l.reader)
	}
	if err == nil && l.ended && l.at.last != 0 {
		l.reads.listings.finish(l.at.name())
	}
}

func (l *listing) full() bool { return len(l.page.Events) == l.opts.Limit || l.page.Cut }

// entries returns the next entries of the bucket. last says that none were behind them.
func (l *listing) entries(ctx context.Context) (entries []*conn.StoredMsg, last bool, err error) {
	limit := l.opts.Limit - len(l.page.Events) + 1 // one more shows that it goes on
	if l.at.pos >= l.at.present {
		limit = listingWindow
	}
	if l.reader != nil {
		entries, err := l.reader.entries(ctx, limit)
		if err == nil && len(entries) > 0 {
			return entries, false, nil
		}
		if ctx.Err() != nil {
			return nil, false, ctx.Err()
		}
		l.reads.listings.close(ctx, l.reader) // only direct gets tell where the end is
		l.reader = nil
	}
	enough := errors.New("enough")
	size := 0
	r := allRead{messages: l.reads.Messages, stream: l.topic.Bucket.Stream, created: time.Unix(0, l.at.created), from: l.at.pos + 1, few: true, batch: min(limit, conn.MaxDirect)}
	r.f = func(m *conn.StoredMsg) error {
		entries = append(entries, m)
		if size += m.Size; len(entries) == limit || size > listingBytes {
			return enough
		}
		return nil
	}
	_, err = r.run(ctx)
	if errors.Is(err, enough) {
		return entries, false, nil
	}
	return entries, err == nil, err
}

// take puts entries on the page until it is full, and returns how many it has dealt with.
func (l *listing) take(ctx context.Context, entries []*conn.StoredMsg) (taken int, err error) {
	events := make([]*event.Event, len(entries)) // nil: not to be given
	// hashes of keys written since the listing began; true: given already
	late := make(map[uint64]bool)
	for i, m := range entries {
		e, _, ok := l.topic.Entry(m)
		if !ok || e.Tombstone {
			continue
		}
		events[i] = e
		if m.Seq > l.at.present {
			late[l.at.keyHash(e.Key)] = false
		}
	}
	if len(late) > 0 {
		if err := l.given(ctx, late); err != nil {
			return 0, err
		}
	}
	for i, m := range entries {
		if l.full() {
			return i, nil
		}
		e := events[i]
		if e != nil && m.Seq > l.at.present && (late[l.at.keyHash(e.Key)] || l.onPage(e.Key)) {
			e = nil
		}
		if e != nil {
			if l.size += heldBytes(e); l.size > l.opts.Bytes && len(l.page.Events) > 0 {
				l.page.Cut = true
				return i, nil
			}
			l.page.Events = append(l.page.Events, e)
			if l.known != nil {
				l.known[e.Key] = true
			}
		}
		l.at.pos = m.Seq
	}
	return len(entries), nil
}

// onPage reports whether a key is on this page.
func (l *listing) onPage(key string) bool {
	if l.known == nil {
		l.known = make(map[string]bool, len(l.page.Events))
		for _, e := range l.page.Events {
			l.known[e.Key] = true
		}
	}
	return l.known[key]
}
