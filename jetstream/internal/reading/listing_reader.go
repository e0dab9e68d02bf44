package reading

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"eventhub/jetstream/internal/conn"
)

const (
	// listingIdle is how long a reader waits for the next page. What it has read ahead is no older.
	listingIdle = time.Second
	// listingTend is how often listings that were left are looked for.
	listingTend = 250 * time.Millisecond
)

// listingReader reads the entries of a bucket for a listing about a page ahead: while a client
// takes one, the next one comes.
type listingReader struct {
	*pull

	listing string            // that it reads for
	pos     uint64            // the last entry that was dealt with
	read    []*conn.StoredMsg // came, and was not dealt with
	idle    time.Time         // since when
}

// entries returns the next entries, most of them if there are as many, or an error where the
// consumer has none: it does not know where the end is.
func (r *listingReader) entries(ctx context.Context, limit int) ([]*conn.StoredMsg, error) {
	size, n := 0, 0
	for n < limit && size <= listingBytes {
		if n == len(r.read) {
			came, err := r.window(ctx, make([]*conn.StoredMsg, 0, min(limit-n, r.batch)))
			if errors.Is(err, errPulled) && n > 0 {
				return r.read[:n], nil
			}
			if err != nil {
				return nil, err
			}
			r.read = append(r.read, came...)
		}
		size += r.read[n].Size
		n++
	}
	if len(r.read) == n {
		_ = r.ask() // asked again when it is needed
	}
	return r.read[:n], nil
}

// drop says that so many of the entries were dealt with.
func (r *listingReader) drop(n int) {
	if n > 0 {
		r.pos = r.read[n-1].Seq
	}
	clear(r.read[:n])
	r.read = r.read[n:]
}

// listings are the readers that wait for the next page of their listing, and the listings that have
// ended.
type listings struct {
	reads *Reads

	mu       sync.Mutex
	readers  int               // that are open, idle or not: at most Limits.ListingReaders
	idle     []*listingReader  // the longest first
	finished []finishedListing // the earliest first; at most listingsFinished
}

// finishedListing is one whose records are to be removed.
type finishedListing struct {
	name string
	at   time.Time
}

// take returns the listing's reader, if it is where the cursor is.
func (s *listings) take(c *listingCursor) *listingReader {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := c.name()
	i := slices.IndexFunc(s.idle, func(r *listingReader) bool { return r.listing == name && r.pos == c.pos })
	if i < 0 {
		return nil
	}
	r := s.idle[i]
	s.idle = slices.Delete(s.idle, i, i+1)
	return r
}

// put keeps a reader until the next page.
func (s *listings) put(r *listingReader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.idle = time.Now()
	s.idle = append(s.idle, r)
}

// open makes a reader, in place of one that waits if there are too many. It returns nil when it
// cannot: listings do without.
func (s *listings) open(ctx context.Context, c *listingCursor, stream string) *listingReader {
	for !s.reserve() {
		s.reads.Obs.LimitReached("listing_readers")
		oldest := s.overdue(time.Now(), 1)
		if len(oldest) == 0 {
			return nil
		}
		s.close(ctx, oldest[0])
	}
	p, err := s.reads.Messages.openPull(ctx, stream, &Query{From: c.pos + 1, Batch: maxPage})
	if err != nil {
		s.release()
		return nil
	}
	return &listingReader{pull: p, listing: c.name(), pos: c.pos}
}

// reserve counts one more reader, unless there are too many.
func (s *listings) reserve() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.readers >= s.reads.Limits.ListingReaders {
		return false
	}
	s.readers++
	return true
}

func (s *listings) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readers--
}

// close ends a reader that was taken.
func (s *listings) close(ctx context.Context, r *listingReader) {
	r.close(ctx)
	s.release()
}

// TendListings ends readers that have waited for too long, and removes the records of listings that
// have ended, until the bus closes.
func (r *Reads) TendListings() {
	s := r.listings
	tick := time.NewTicker(listingTend)
	defer tick.Stop()
	for {
		var now time.Time
		select {
		case <-r.Conn.Ctx.Done():
			for _, reader := range s.overdue(time.Now(), math.MaxInt) {
				_ = reader.sub.Unsubscribe() // the server finds out the rest
			}
			return
		case now = <-tick.C:
		}
		for _, reader := range s.overdue(now.Add(-listingIdle), math.MaxInt) {
			s.close(r.Conn.Ctx, reader)
		}
		r.ForgetListings(now.Add(-listingGrace))
	}
}

// overdue takes out readers that wait since a moment or longer, most at most.
func (s *listings) overdue(since time.Time, limit int) []*listingReader {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < min(len(s.idle), limit) && !s.idle[n].idle.After(since) {
		n++
	}
	readers := slices.Clone(s.idle[:n])
	s.idle = slices.Delete(s.idle, 0, n)
	return readers
}
