package broadcast_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/facade/broadcast"
	"eventhub/jetstream"
)

const patience = 30 * time.Second

// source gives the events that tests feed, by topic.
type source struct {
	mu      sync.Mutex
	feeds   map[string]chan *jetstream.Event
	place   error         // what Place answers
	hold    chan struct{} // Place waits until it is closed, if it is not nil
	opened  int           // calls of Follow
	present int           // of them that have not returned
	asked   atomic.Int64  // calls of Place
}

func newSource() *source { return &source{feeds: make(map[string]chan *jetstream.Event)} }

func (s *source) feed(topic string) chan *jetstream.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.feeds[topic] == nil {
		s.feeds[topic] = make(chan *jetstream.Event)
	}
	return s.feeds[topic]
}

// follows returns how many topics are followed, and how often one was.
func (s *source) follows() (present, opened int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.present, s.opened
}

func (s *source) Place(ctx context.Context, _, _ string) (jetstream.Place, error) {
	s.asked.Add(1)
	if s.hold != nil {
		select {
		case <-s.hold:
		case <-ctx.Done():
			return jetstream.Place{}, ctx.Err()
		}
	}
	return jetstream.Place{Stream: "s", Made: time.Unix(1, 0), First: 1, Last: 10}, s.place
}

// Follow ends at an event without an id.
func (s *source) Follow(ctx context.Context, topic string, _ jetstream.Place, f func(*jetstream.Event) error) error {
	feed := s.feed(topic)
	s.mu.Lock()
	s.opened++
	s.present++
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.present--
		s.mu.Unlock()
	}()
	for {
		select {
		case e := <-feed:
			if e.ID == "" {
				return errGone
			}
			if err := f(e); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

var errGone = errors.New("the topic is gone")

// socket is a Listener.
type socket struct {
	woken  chan struct{}
	ended  chan error
	client string
}

func newSocket() *socket { return &socket{make(chan struct{}, 1), make(chan error, 1), "me"} }

func (s *socket) Wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

func (s *socket) Client() string { return s.client }

func (s *socket) End(err error) { s.ended <- err }

func newTails(t *testing.T, s *source, change func(*broadcast.Config)) *broadcast.Tails {
	t.Helper()
	cfg := broadcast.Config{
		Source: s, Owes: func(string) time.Duration { return 0 }, Linger: time.Hour, Tails: 100, PrincipalTails: 100, RingFrames: 64, RingBytes: 1 << 20, AllBytes: 1 << 20,
		Frame: func(dst []byte, _ string, _ jetstream.Place, e *jetstream.Event) ([]byte, error) {
			return append(append(dst, e.ID...), ' '), nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	tails := broadcast.New(cfg)
	t.Cleanup(func() {
		tails.Close()
		if n, _ := s.follows(); n != 0 {
			t.Errorf("%d topics are followed after Close", n)
		}
		if f := tails.Figures(); f != (broadcast.Figures{}) {
			t.Errorf("after Close: %+v", f)
		}
	})
	return tails
}

// join enters the Tail of a topic.
func join(t *testing.T, tails *broadcast.Tails, topic, client string) *broadcast.Tail {
	t.Helper()
	tail, err := tails.Join(t.Context(), topic, client, broadcast.Form{})
	if err != nil {
		t.Fatal(err)
	}
	return tail
}

// put feeds the topic t the events from..to. The number of an event is its sequence.
func (s *source) put(t *testing.T, from, to int) {
	t.Helper()
	for i := from; i <= to; i++ {
		select {
		case s.feed("t") <- &jetstream.Event{ID: strconv.Itoa(i), Sequence: uint64(i), Key: "k" + strconv.Itoa(i%3)}:
		case <-time.After(patience):
			t.Fatal("nobody takes the event")
		}
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); {
		if time.Now().After(end) {
			t.Fatal(what)
		}
		time.Sleep(time.Millisecond)
	}
}

func ids(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		b.WriteString(strconv.Itoa(i) + " ")
	}
	return b.String()
}

// readTo reads frames until the event with a number was read.
func readTo(t *testing.T, c *broadcast.Cursor, s *socket, to uint64, read func() (frames []byte, more, ok bool)) string {
	t.Helper()
	var got strings.Builder
	for {
		frames, more, ok := read()
		if !ok {
			t.Fatalf("the ring has dropped what follows %d", c.Last())
		}
		got.Write(frames)
		switch {
		case c.Last() == to:
			return got.String()
		case c.Last() > to:
			t.Fatalf("read up to %d, want %d", c.Last(), to)
		case !more:
			select {
			case <-s.woken:
			case <-time.After(patience):
				t.Fatalf("not woken behind %d", c.Last())
			}
		}
	}
}

// All cursors of a topic get what comes behind them, and are woken for it; the topic is followed
// once.
func TestCursors(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, nil)
	const n = 20
	var cursors [n]*broadcast.Cursor
	var sockets [n]*socket
	for i := range n {
		tail := join(t, tails, "t", "c")
		sockets[i] = newSocket()
		cursors[i] = tail.NewCursor(sockets[i])
		if !cursors[i].Begin() {
			t.Fatal("the tail has ended")
		}
		if got := cursors[i].Last(); got != uint64(10+i) {
			t.Errorf("cursor %d begins behind %d", i, got)
		}
		from.put(t, 11+i, 11+i)
		eventually(t, "the event is there", func() bool { return cursors[i].Head() == uint64(11+i) })
	}
	for i, c := range cursors {
		if got := readTo(t, c, sockets[i], 10+n, func() ([]byte, bool, bool) { return c.Read(1 << 10) }); got != ids(11+i, 10+n) {
			t.Errorf("cursor %d got %q", i, got)
		}
	}
	if _, opened := from.follows(); opened != 1 {
		t.Errorf("followed %d times", opened)
	}
	// Those that end, in any order and twice, are not woken any more.
	for _, i := range []int{0, n - 1, 5, 5, 6} {
		cursors[i].End()
	}
	if got := tails.Figures().Cursors; got != n-4 {
		t.Errorf("%d cursors", got)
	}
	from.put(t, 11+n, 11+n)
	for i, c := range cursors {
		switch i {
		case 0, n - 1, 5, 6:
			continue
		}
		if got := readTo(t, c, sockets[i], 11+n, func() ([]byte, bool, bool) { return c.Read(1 << 10) }); got != ids(11+n, 11+n) {
			t.Errorf("cursor %d got %q", i, got)
		}
	}
}

// A cursor that the ring has overtaken says so, and skips or moves on.
func TestCursorFallsBehind(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, nil) // the ring has 64 frames
	tail := join(t, tails, "t", "c")
	s := newSocket()
	c := tail.NewCursor(s)
	c.Begin()
	from.put(t, 11, 110)
	eventually(t, "all events are there", func() bool { return c.Head() == 110 })
	if !c.Covers(46) || c.Covers(45) || c.MoveTo(45) || c.Last() != 10 {
		t.Errorf("46 is covered: %v, 45: %v", c.Covers(46), c.Covers(45))
	}
	if _, ok := c.Back(65); ok {
		t.Error("the ring has 65 events")
	}
	if seq, ok := c.Back(64); !ok || seq != 46 {
		t.Errorf("the last 64 events are behind %d, %v", seq, ok)
	}
	if _, _, ok := c.Read(1); ok {
		t.Error("read what the ring has dropped")
	}
	dst := []byte("kept")
	if frames, _, ok := c.ReadNewest(dst, 1); ok || string(frames) != "kept" {
		t.Errorf("read %q, %v", frames, ok)
	}
	if missed, first, last := c.Skip(); missed != 100 || first != 10 || last != 110 {
		t.Errorf("skipped %d events, from %d to %d", missed, first, last)
	}
	if !c.MoveTo(100) {
		t.Fatal("the ring has dropped 101")
	}
	if got := readTo(t, c, s, 110, func() ([]byte, bool, bool) { return c.Read(1) }); got != ids(101, 110) {
		t.Errorf("got %q", got)
	}
	c.MoveTo(100)
	if got := readTo(t, c, s, 110, func() ([]byte, bool, bool) { return c.ReadNewest(nil, 1<<10) }); got != ids(108, 110) {
		t.Errorf("got %q of three keys", got)
	}
}

// A cursor may be ahead of the Tail: it passes what comes up to there, also when the ring has
// dropped that.
func TestCursorAhead(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, nil) // the ring has 64 frames
	tail := join(t, tails, "t", "c")
	for name, read := range map[string]func(c *broadcast.Cursor) ([]byte, bool, bool){
		"all":    func(c *broadcast.Cursor) ([]byte, bool, bool) { return c.Read(1 << 10) },
		"newest": func(c *broadcast.Cursor) ([]byte, bool, bool) { return c.ReadNewest(nil, 1<<10) },
	} {
		s := newSocket()
		c := tail.NewCursor(s)
		c.Begin()
		head := c.Head()
		if !c.MoveTo(head+5) || c.Last() != head+5 {
			t.Fatalf("%s: moved to %d", name, c.Last())
		}
		read := func() ([]byte, bool, bool) { return read(c) }
		for n := head + 1; n <= head+5; n++ {
			from.put(t, int(n), int(n))
			eventually(t, "the event is there", func() bool { return c.Head() == n })
			if frames, more, ok := read(); len(frames) > 0 || more || !ok || c.Last() != head+5 {
				t.Errorf("%s: read %q behind %d", name, frames, c.Last())
			}
		}
		from.put(t, int(head+6), int(head+6))
		if got := readTo(t, c, s, head+6, read); got != ids(int(head+6), int(head+6)) {
			t.Errorf("%s: got %q", name, got)
		}
		// what the ring has dropped of it is not missed
		head = c.Head()
		c.MoveTo(head + 5)
		from.put(t, int(head+1), int(head+100))
		eventually(t, "all events are there", func() bool { return c.Head() == head+100 })
		if _, _, ok := read(); ok {
			t.Errorf("%s: read what the ring has dropped", name)
		}
		if missed, first, last := c.Skip(); missed != 95 || first != head+5 || last != head+100 {
			t.Errorf("%s: skipped %d events, from %d to %d", name, missed, first, last)
		}
		c.MoveTo(head + 110)
		from.put(t, int(head+101), int(head+112))
		if got := readTo(t, c, s, head+112, read); got != ids(int(head+111), int(head+112)) {
			t.Errorf("%s: got %q", name, got)
		}
		c.End()
	}
}

// Many who ask at once where a topic is share questions that begin after they asked.
func TestNow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		from := newSource()
		tails := newTails(t, from, nil)
		tail := join(t, tails, "t", "c")
		hold := make(chan struct{})
		from.hold = hold
		ask := func() {
			if place, err := tail.Now(t.Context()); err != nil || place.Last != 10 {
				t.Errorf("%+v, %v", place, err)
			}
		}
		var asking sync.WaitGroup
		asking.Go(ask)
		synctest.Wait()
		for range 100 {
			asking.Go(ask)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := tail.Now(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
		synctest.Wait()
		close(hold)
		asking.Wait()
		if asked := from.asked.Load(); asked != 3 { // the first is of the Tail
			t.Errorf("the store was asked %d times", asked)
		}
		tails.Close()
		if _, err := tail.Now(t.Context()); !errors.Is(err, broadcast.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	})
}

// Readers that run beside the writer are woken for every frame.
func TestCursorsMissNoWake(t *testing.T) {
	t.Parallel()
	const n, events = 8, 3_000
	from := newSource()
	tails := newTails(t, from, func(cfg *broadcast.Config) { cfg.RingFrames = 4096 })
	var reading sync.WaitGroup
	for range n {
		tail := join(t, tails, "t", "c")
		s := newSocket()
		c := tail.NewCursor(s)
		c.Begin()
		reading.Go(func() {
			defer tail.Leave()
			defer c.End()
			end := time.After(patience)
			for c.Last() < 10+events {
				_, more, ok := c.Read(64)
				if !ok {
					t.Error("the ring has dropped what follows")
					return
				}
				if more || c.Last() == 10+events {
					continue
				}
				select {
				case <-s.woken:
				case <-end:
					t.Errorf("not woken behind %d", c.Last())
					return
				}
			}
		})
	}
	from.put(t, 11, 10+events)
	reading.Wait()
}

// The end of a topic ends its cursors, and the next Join follows it anew.
func TestTailEnds(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, nil)
	tail := join(t, tails, "t", "c")
	s, late := newSocket(), newSocket()
	c := tail.NewCursor(s)
	c.Begin()
	from.put(t, 11, 20)
	from.feed("t") <- new(jetstream.Event)
	select {
	case err := <-s.ended:
		if !errors.Is(err, errGone) {
			t.Errorf("got %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the listener is not told")
	}
	if tail.NewCursor(late).Begin() {
		t.Error("a cursor begins in a tail that has ended")
	}
	c.End()
	tail.Leave()
	again := join(t, tails, "t", "c")
	defer again.Leave()
	if _, opened := from.follows(); again == tail || opened > 2 {
		t.Errorf("followed %d times", opened)
	}
	eventually(t, "the memory is given back", func() bool { return tails.Figures() == broadcast.Figures{Topics: 1} })
}

// A Tail stays for a while after its last user, and makes room for another topic before that.
func TestTailLingers(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, func(cfg *broadcast.Config) { cfg.Tails, cfg.PrincipalTails = 3, 2 })
	a, b := join(t, tails, "a", "c"), join(t, tails, "b", "c")
	if _, err := tails.Join(t.Context(), "x", "c", broadcast.Form{}); !errors.Is(err, broadcast.ErrPrincipalTails) {
		t.Errorf("got %v", err)
	}
	a.Leave()
	if again := join(t, tails, "a", "c"); again != a {
		t.Error("the topic is followed anew")
	}
	a.Leave()
	x := join(t, tails, "x", "c") // in place of a
	join(t, tails, "y", "d")
	if _, err := tails.Join(t.Context(), "z", "d", broadcast.Form{}); !errors.Is(err, broadcast.ErrTails) {
		t.Errorf("got %v", err)
	}
	b.Leave()
	join(t, tails, "z", "d") // in place of b
	if tails.Figures().Topics != 3 || x == a {
		t.Errorf("got %+v", tails.Figures())
	}
	short := newTails(t, newSource(), func(cfg *broadcast.Config) { cfg.Linger = time.Millisecond })
	join(t, short, "a", "c").Leave()
	eventually(t, "the topic is followed for ever", func() bool { return short.Figures().Topics == 0 })
}

// A topic that cannot be followed gives its error to all who wait, and keeps no place.
func TestJoinFails(t *testing.T) {
	t.Parallel()
	from := newSource()
	from.place, from.hold = errGone, make(chan struct{})
	tails := newTails(t, from, func(cfg *broadcast.Config) { cfg.Tails = 1 })
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tails.Join(late, "t", "c", broadcast.Form{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	var joining sync.WaitGroup
	for range 5 {
		joining.Go(func() {
			if _, err := tails.Join(t.Context(), "t", "c", broadcast.Form{}); !errors.Is(err, errGone) {
				t.Errorf("got %v", err)
			}
		})
	}
	close(from.hold)
	joining.Wait()
	if f := tails.Figures(); f.Topics != 0 {
		t.Errorf("got %+v", f)
	}
}

// Close ends cursors and those who wait for a topic.
func TestTailsClose(t *testing.T) {
	t.Parallel()
	from := newSource()
	tails := newTails(t, from, nil)
	tail := join(t, tails, "t", "c")
	s := newSocket()
	tail.NewCursor(s).Begin()
	stuck := newSource()
	stuck.hold = make(chan struct{})
	waiting := newTails(t, stuck, nil)
	var joining sync.WaitGroup
	joining.Go(func() {
		if _, err := waiting.Join(t.Context(), "t", "c", broadcast.Form{}); !errors.Is(err, broadcast.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
	eventually(t, "the topic is waited for", func() bool { return waiting.Figures().Topics == 1 })
	waiting.Close()
	joining.Wait()
	tails.Close()
	if err := <-s.ended; !errors.Is(err, broadcast.ErrClosed) {
		t.Errorf("got %v", err)
	}
	if _, err := tails.Join(t.Context(), "t", "c", broadcast.Form{}); !errors.Is(err, broadcast.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
