package reading

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/internal/conn"
)

const (
	// listingIdle is how long a reader waits for the next page. What it has read ahead is no older.
	listingIdle = time.Second
	// listingTend is how often listings that were left are looked for.
	listingTend = 250 * time.Millisecond
	// listingSilence is how long the server may take to send what a reader asked for.
	listingSilence = 2 * time.Second
)

// listingReader reads the entries of a bucket for a listing through a pull consumer without acks,
// about a page ahead: while a client takes one, the next one comes. The server forgets the consumer
// by itself when the hub dies.
type listingReader struct {
	reads  *Reads
	link   *conn.Link
	stream string
	name   string // of the consumer
	inbox  string
	sub    *nats.Subscription
	came   chan *nats.Msg // has room for all that was asked for

	listing string            // that it reads for
	pos     uint64            // the last entry that was dealt with
	read    []*conn.StoredMsg // came, and was not dealt with
	pulls   int
	asked   int       // messages of the last pull that may still come
	got     int       // of them, those that came
	seen    uint64    // messages in all
	idle    time.Time // since when
}

var errReaderEnded = errors.New("jetstream: the reader of a listing has no more")

// openReader makes the consumer.
func (r *Reads) openReader(ctx context.Context, stream string, pos uint64) (*listingReader, error) {
	reader := &listingReader{reads: r, link: r.Conn.Link(), stream: stream, name: rand.Text(), inbox: nats.NewInbox(), pos: pos}
	reader.came = make(chan *nats.Msg, maxPage+8) // and the messages that end pulls
	var err error
	if reader.sub, err = reader.link.NC.ChanSubscribe(reader.inbox+".*", reader.came); err != nil {
		return nil, err
	}
	// When ctx ends while the server makes the consumer, the consumer would stay behind.
	making, made := context.WithTimeout(context.WithoutCancel(ctx), MakeWait)
	defer made()
	_, err = r.Conn.JS.CreateConsumer(making, stream, natsjs.ConsumerConfig{
		Name: reader.name, AckPolicy: natsjs.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: 10 * time.Second,
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: pos + 1,
	})
	if err != nil {
		_ = reader.sub.Unsubscribe()
		return nil, err
	}
	return reader, nil
}

// entries returns the next entries, most of them if there are as many, or an error where a reader
// of its kind finds none: it does not know where the end is. It then asks for as many more, unless
// they are under way.
func (r *listingReader) entries(ctx context.Context, limit int) ([]*conn.StoredMsg, error) {
	size, n := 0, 0
	for n < limit && size <= listingBytes {
		if n == len(r.read) {
			m, err := r.next(ctx, limit-n)
			if errors.Is(err, errReaderEnded) && n > 0 {
				return r.read[:n], nil
			}
			if err != nil {
				return nil, err
			}
			r.read = append(r.read, m)
		}
		size += r.read[n].Size
		n++
	}
	if r.asked == 0 && len(r.read) == n {
		_ = r.ask(limit) // asked again when it is needed
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

// ask begins a pull.
func (r *listingReader) ask(n int) error {
	n = min(n, maxPage)
	body, err := json.Marshal(map[string]any{"batch": n, "no_wait": true, "max_bytes": listingBytes})
	if err != nil {
		return err
	}
	subject := r.reads.Conn.API + "CONSUMER.MSG.NEXT." + r.stream + "." + r.name
	r.pulls++
	if err := r.link.NC.PublishMsg(&nats.Msg{Subject: subject, Reply: r.answers(), Data: body}); err != nil {
		return err
	}
	r.asked, r.got = n, 0
	return nil
}

// answers is where the last pull is answered. Only what ends one comes under that subject.
func (r *listingReader) answers() string { return r.inbox + "." + strconv.Itoa(r.pulls) }

// next returns the next message, of which so many are wanted.
func (r *listingReader) next(ctx context.Context, want int) (*conn.StoredMsg, error) {
	for {
		if r.asked == 0 {
			if err := r.ask(want); err != nil {
				return nil, err
			}
		}
		m, err := r.wait(ctx)
		if err != nil {
			return nil, err
		}
		p, ok := conn.ParseAckSubject(m.Reply)
		if !ok { // the end of a pull: it is fulfilled, or there is no more, or no more room
			if m.Subject != r.answers() {
				continue // of one before
			}
			r.asked = 0
			if r.got == 0 {
				return nil, errReaderEnded
			}
			continue
		}
		// without acks nothing is sent twice: a hole would stay one
		if r.seen++; p.Order != r.seen {
			return nil, conn.ErrFeedCut
		}
		r.got++
		r.asked--
		return &conn.StoredMsg{Subject: m.Subject, Seq: p.StreamSeq, Header: m.Header, Data: m.Data, Time: time.Unix(0, p.StoredAt), Size: m.Size()}, nil
	}
}

// wait returns the next message that comes.
func (r *listingReader) wait(ctx context.Context) (*nats.Msg, error) {
	select {
	case m := <-r.came:
		return m, nil
	default:
	}
	silence := time.NewTimer(listingSilence)
	defer silence.Stop()
	select {
	case m := <-r.came:
		return m, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-silence.C:
		return nil, conn.ErrIdle
	}
}

// close removes the consumer; what the server is not told it finds out in 10 s.
func (r *listingReader) close(ctx context.Context) {
	_ = r.sub.Unsubscribe() // it fails where the connection is closed, which ends it too
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = r.reads.Conn.JS.DeleteConsumer(ctx, r.stream, r.name)
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
	r, err := s.reads.openReader(ctx, stream, c.pos)
	if err != nil {
		s.release()
		return nil
	}
	r.listing = c.name()
	return r
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
