package broadcast

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
)

// askTimeout is how long the store may take to say where a topic is.
const askTimeout = 5 * time.Second

// Tail follows one topic. Its methods may be called concurrently.
type Tail struct {
	tailName

	all    *Tails
	frame  Frame
	client string
	ctx    context.Context
	cancel context.CancelFunc

	// ready is closed when place and ring are set, or failed.
	ready  chan struct{}
	failed error
	place  jetstream.Place
	ring   *ring
	news   chan struct{} // holds an element while there are frames that nobody was told of

	// Guarded by all.mu.
	users int
	idle  *time.Timer // ends the Tail; nil while it is used

	mu      sync.Mutex
	ended   bool
	cursors []*Cursor

	asks   sync.Mutex // comes before all.mu
	asked  *question  // the next one to the store, which has not begun
	asking bool       // a goroutine asks
}

// question is a question to the store where the topic is, for all who wait for done.
type question struct {
	done  chan struct{}
	place jetstream.Place
	err   error
}

// Now returns where the topic is: its last event is at least as new as each one that was stored
// before the call. The Tail may not have come there yet. Calls at the same time share questions to
// the store.
func (t *Tail) Now(ctx context.Context) (jetstream.Place, error) {
	q := t.question()
	if q == nil {
		return jetstream.Place{}, ErrClosed
	}
	select {
	case <-q.done:
		return q.place, q.err
	case <-ctx.Done():
		return jetstream.Place{}, ctx.Err()
	}
}

// question returns a question that has not begun yet; nil when the Tails is closed.
func (t *Tail) question() *question {
	t.asks.Lock()
	defer t.asks.Unlock()
	if t.asked == nil {
		if !t.asking && !t.all.start(t.ask) {
			return nil
		}
		t.asked, t.asking = &question{done: make(chan struct{})}, true
	}
	return t.asked
}

// ask asks the store while there are questions.
func (t *Tail) ask() {
	next := func() *question {
		t.asks.Lock()
		defer t.asks.Unlock()
		q := t.asked
		t.asked, t.asking = nil, q != nil
		return q
	}
	for q := next(); q != nil; q = next() {
		ctx, cancel := context.WithTimeout(t.all.ctx, askTimeout)
		q.place, q.err = t.all.cfg.Source.Place(ctx, t.topic, "")
		cancel()
		close(q.done)
	}
}

// Place is where the topic was when the Tail began: it names the stream.
func (t *Tail) Place() jetstream.Place { return t.place }

// Leave ends the use of a Tail that Join returned.
func (t *Tail) Leave() {
	all := t.all
	all.mu.Lock()
	defer all.mu.Unlock()
	t.users--
	if t.users > 0 || all.tails[t.tailName] != t {
		return
	}
	t.idle = time.AfterFunc(all.cfg.Linger, func() {
		all.mu.Lock()
		defer all.mu.Unlock()
		if t.users == 0 {
			all.removeLocked(t)
		}
	})
}

// run follows the topic until nobody uses the Tail, or the topic is gone.
func (t *Tail) run() {
	err := t.follow()
	unused := t.ctx.Err() != nil // removeLocked cancels it in any case
	all := t.all
	all.mu.Lock()
	all.removeLocked(t)
	all.mu.Unlock()
	select {
	case <-t.ready:
	default:
		if t.failed = err; unused {
			t.failed = errOver
		}
		close(t.ready)
		return
	}
	if unused {
		err = ErrClosed
	}
	t.ring.end()
	t.mu.Lock()
	t.ended = true
	cursors := t.cursors
	t.cursors = nil
	t.mu.Unlock()
	for _, c := range cursors {
		c.listener.End(err)
	}
}

func (t *Tail) follow() error {
	cfg := &t.all.cfg
	place, err := cfg.Source.Place(t.ctx, t.topic, t.client)
	if err != nil {
		return err
	}
	t.place = place
	t.ring = newRing(cfg.RingFrames, cfg.RingBytes, &t.all.memory, place.Last)
	ctx, cancel := context.WithCancel(t.ctx)
	var waking sync.WaitGroup
	waking.Go(func() { t.wake(ctx) })
	defer waking.Wait()
	defer cancel()
	close(t.ready)
	var scratch []byte
	return cfg.Source.Follow(t.ctx, t.topic, place, func(e *jetstream.Event) error {
		if e == nil {
			return nil
		}
		var err error
		if scratch, err = t.frame(scratch[:0], t.topic, place, e); err != nil {
			return err
		}
		t.ring.append(scratch, e.Sequence, e.Key)
		if cap(scratch) > lastChunk {
			scratch = nil
		}
		select {
		case t.news <- struct{}{}:
		default:
		}
		return nil
	})
}

// payer returns the client of those who listen that owes the least, but for one, unless that is the
// only one. Without anybody, it is the client that came first.
func (t *Tail) payer(not string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	client, least := t.client, time.Duration(math.MaxInt64)
	for _, c := range t.cursors {
		name := c.listener.Client()
		if name == not {
			continue
		}
		if owes := t.all.cfg.Owes(name); owes < least {
			client, least = name, owes
		}
		if least == 0 {
			break
		}
	}
	if least == math.MaxInt64 && not != "" && len(t.cursors) > 0 {
		return not
	}
	return client
}

// wake wakes the sockets. Frames that come meanwhile wait for the next round, so the more there is
// to do, the more frames go out in one write.
func (t *Tail) wake(ctx context.Context) {
	var round []*Cursor
	for {
		select {
		case <-t.news:
		case <-ctx.Done():
			return
		}
		t.mu.Lock()
		round = append(round[:0], t.cursors...)
		t.mu.Unlock()
		for _, c := range round {
			if c.asleep.CompareAndSwap(true, false) {
				c.listener.Wake()
			}
		}
		clear(round)
	}
}

// Cursor is where a socket is in a Tail. One goroutine at a time uses it.
type Cursor struct {
	tail     *Tail
	listener Listener
	index    int // in tail.cursors; guarded by tail.mu
	// asleep is set while the reader has had everything.
	asleep atomic.Bool

	next uint64 // the frame to read next
	last uint64 // the sequence of the last event that was read or passed
	// ahead is how far last is ahead of the newest event that the Tail had at MoveTo; 0 once the
	// Tail has come to last.
	ahead uint64
}

// NewCursor makes a Cursor behind the newest event. The listener is woken at the next one.
func (t *Tail) NewCursor(l Listener) *Cursor {
	c := &Cursor{tail: t, listener: l}
	c.next, c.last = t.ring.place()
	c.asleep.Store(true)
	return c
}

// Begin has the listener woken. It returns false when the Tail has ended, and the listener was not
// told.
func (c *Cursor) Begin() bool {
	t := c.tail
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended {
		return false
	}
	c.index = len(t.cursors)
	t.cursors = append(t.cursors, c)
	return true
}

// End ends the use of a Cursor. The listener may be woken once more. End may be called again, and
// concurrently with other methods.
func (c *Cursor) End() {
	t := c.tail
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.index >= len(t.cursors) || t.cursors[c.index] != c {
		return
	}
	end := len(t.cursors) - 1
	t.cursors[c.index] = t.cursors[end]
	t.cursors[c.index].index = c.index
	t.cursors[end] = nil
	t.cursors = t.cursors[:end]
}

// Last returns the sequence of the last event that was read or passed.
func (c *Cursor) Last() uint64 { return c.last }

// Head returns the sequence of the newest event.
func (c *Cursor) Head() uint64 {
	_, head := c.tail.ring.place()
	return head
}

// Read returns frames that come next, at most about limit bytes of them, or one. They lie side by
// side in memory that is shared, and must not be changed. more says that there are further ones;
// otherwise, the listener is woken when there are. ok is false when the ring has dropped the next
// frame: the caller calls Skip or MoveTo.
func (c *Cursor) Read(limit int) (frames []byte, more, ok bool) {
	if !c.pass() {
		return nil, false, false
	}
	b, ok := c.tail.ring.read(c.next, limit)
	return c.took(b, ok)
}

// ReadNewest is Read without the frames that a newer one of the same key follows. It appends the
// frames to dst, also when there are none.
func (c *Cursor) ReadNewest(dst []byte, limit int) (frames []byte, more, ok bool) {
	if !c.pass() {
		return dst, false, false
	}
	b, ok := c.tail.ring.conflated(c.next, limit, dst)
	if !ok {
		b.frames = dst
	}
	return c.took(b, ok)
}

// pass moves a Cursor that is ahead of the newest event behind the frames that it is ahead of. ok
// is false when the ring has dropped what follows them.
func (c *Cursor) pass() (ok bool) {
	if c.ahead == 0 {
		return true
	}
	_, head := c.tail.ring.place()
	next, ok := c.tail.ring.behind(c.last)
	if !ok {
		return false
	}
	if c.next = next; head >= c.last {
		c.ahead = 0
	}
	return true
}

func (c *Cursor) took(b batch, ok bool) (frames []byte, more, fits bool) {
	if !ok {
		return b.frames, false, false
	}
	c.next, c.last = b.next, max(c.last, b.last)
	if !b.more {
		c.asleep.Store(true)
		if next, _ := c.tail.ring.place(); next != c.next && c.asleep.CompareAndSwap(true, false) {
			b.more = true // it came meanwhile, and the listener may not be woken
		}
	}
	return b.frames, b.more, true
}

// Skip moves the Cursor behind the newest event. It returns the number of frames that are passed,
// and the sequences of the event before the first and of the last of them.
func (c *Cursor) Skip() (missed, from, to uint64) {
	next, head := c.tail.ring.place()
	missed, from = next-c.next, c.last
	missed -= min(missed, c.ahead) // those were passed before
	c.next, c.last, c.ahead = next, head, 0
	return missed, from, head
}

// MoveTo moves the Cursor behind the event with a sequence, which may be newer than the newest
// event of the Tail. It returns false when the ring has dropped the event that follows.
func (c *Cursor) MoveTo(seq uint64) bool {
	_, head := c.tail.ring.place()
	n, ok := c.tail.ring.behind(seq)
	if ok {
		c.next, c.last, c.ahead = n, seq, seq-min(seq, head)
	}
	return ok
}

// Back returns the sequence before the last n events, if the ring has them all.
func (c *Cursor) Back(n int) (seq uint64, ok bool) { return c.tail.ring.back(n) }

// Covers reports whether the ring has all events behind the one with a sequence.
func (c *Cursor) Covers(seq uint64) bool {
	_, ok := c.tail.ring.behind(seq)
	return ok
}
