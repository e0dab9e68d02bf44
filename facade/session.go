package facade

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

const (
	// callTimeout is how long after its arrival a frame may wait for the bus, so that every frame
	// is answered within the 15 s that clients wait.
	callTimeout = 10 * time.Second
	// callShare is how long publishes share one context, which then ends up to callShare after a
	// frame's deadline: making one costs as much as the rest of a publish.
	callShare = 2 * time.Second
	// smallPart is the size in bytes below which a part of a message counts as a frame, but for the first.
	smallPart = 128
	// preAuthFrame is the largest message in bytes that a client without credentials may send.
	preAuthFrame = 64 << 10
	// unauthenticatedGrace is how long a connection that has to go for another has to be told so.
	unauthenticatedGrace = 100 * time.Millisecond
	// maxTopicsKnown bounds a session's memory of topics that it may publish to.
	maxTopicsKnown = 256
)

// errMessageTooBig ends a connection whose message could not be skipped.
var errMessageTooBig = errors.New("facade: the message is too big to be skipped")

// session is one WebSocket connection. Its reader (run) executes frames one after the other; those
// that wait for the bus become operations, which go on beside it. Its writer's flusher (end) sends.
// The server's ticker calls tick; Drain and Close may come from anywhere.
type session struct {
	srv  *Server
	conn *websocket.Conn
	wire *wire
	out  *writer
	pub  Publisher

	// parts are the control frames and the small parts of messages; the reader's own.
	parts bucket
	// receiving is what of the server's inbound memory the message takes that is being received; the reader's own.
	receiving int
	// text holds the message that is being executed, nil when an operation has taken it; the
	// reader's own.
	text *[]byte

	// ctx ends with the connection.
	ctx    context.Context
	cancel context.CancelFunc

	// due is when the server's ticker has to end the connection; nil for never.
	due atomic.Pointer[due]

	// For the ticker alone: what it last saw of the wire, and since when nothing has changed.
	seenReads  uint64
	quietSince time.Time
	pinging    atomic.Bool

	// mu is held while a frame is executed, but not while one waits for the bus, so that Drain and
	// the connection's end come between two frames.
	mu        sync.Mutex
	ended     bool // frames have no effect any more
	draining  bool
	principal Principal // nil until AUTH succeeded
	counted   string    // the principal's Key while the connection counts among its connections, else ""
	subs      map[string]*subscription
	frame     frame
	key       []byte // of a look-up in subs
	frames    bucket
	settles   bucket
	faults    int // in a row
	refusals  int // of AUTH, in a row
	topics    map[string]*sessionTopic
	call      context.Context // of publishes
	callEnd   context.CancelFunc
	callFrom  time.Time // the arrival of the frame that call was made for

	// Frames that wait for the bus, and the goroutines that carry them out. run waits for these.
	pending pipeline
	joining int           // SUBSCRIBEs that are being carried out
	changed chan struct{} // closed at the next change of pending; nil when nobody waits for it
	calls   sync.WaitGroup

	// wantsResets says that the client's last AUTH named the capability group_reset.
	wantsResets atomic.Bool
}

// due is a moment at which a connection ends.
type due struct {
	at   time.Time
	code websocket.StatusCode // closeAuthTimeout or closeTokenExpired
}

func (s *Server) newSession(conn *websocket.Conn, w *wire) *session {
	n := &session{srv: s, conn: conn, wire: w, pub: s.cfg.Bus.NewPublisher()}
	n.ctx, n.cancel = context.WithCancel(s.ctx)
	n.out = newWriter(w, s.cfg.Limits.OutboundBytes, s.cfg.Limits.CloseGrace)
	n.quietSince = time.Now()
	n.awaitAuth()
	return n
}

// awaitAuth starts the time in which a successful AUTH must come.
func (s *session) awaitAuth() {
	if oldest := s.srv.unauthenticated.add(s); oldest != nil {
		s.limit("unauthenticated")
		oldest.wire.hurry(unauthenticatedGrace) // another needs to be let in
		oldest.out.shut(closeAuthTimeout)
	}
	s.due.Store(&due{at: time.Now().Add(s.srv.cfg.Limits.AuthTimeout), code: closeAuthTimeout})
}

// run reads until the connection ends. flushed is closed when the flusher is done.
func (s *session) run(flushed <-chan struct{}) {
	s.readAll()
	s.out.shut(websocket.StatusAbnormalClosure)
	<-flushed
	s.calls.Wait()
	for _, o := range s.pending { // nobody begins them any more
		s.giveBack(o)
	}
}

// readAll executes messages until the connection ends.
func (s *session) readAll() {
	defer s.survive()
	for s.next() {
	}
}

// survive is deferred where frames are carried out. A panic ends this connection only, as one in a
// handler of net/http would.
func (s *session) survive() {
	if p := recover(); p != nil {
		s.srv.log.Error("a frame made the hub panic", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
		s.out.shut(websocket.StatusInternalError)
	}
}

// next reads one message and executes it. It reports false when the connection has ended or ends.
func (s *session) next() bool {
	// A context that can end costs two microseconds a message; closing the connection ends a read as well.
	typ, r, err := s.conn.Reader(context.Background())
	if err != nil {
		s.lost(err)
		return false
	}
	if typ != websocket.MessageText {
		s.out.shut(closeBinaryMessage)
		return false
	}
	b := s.takeBuffer()
	s.text = b
	defer func() {
		if s.text != nil { // no operation has taken it
			s.returnBuffer(b)
		}
	}()
	size, whole, err := s.read(r, b)
	switch {
	case errors.Is(err, errMessageTooBig):
		s.limit("skip")
		s.out.shut(closeMessageTooBig)
		return false
	case err != nil:
		s.lost(err)
		return false
	}
	begun := s.srv.ticks.Load()
	open, waited, parked := s.out.waitBelowLimit()
	if waited {
		s.limit("outbound_bytes")
	}
	if !open {
		return false
	}
	if waited && !parked {
		begun = s.srv.ticks.Load() // the client did not read
	}
	wait, open := s.message(*b, size, whole)
	if took := s.srv.ticks.Load() - begun; took >= awayTicks {
		s.wire.away(time.Now().Add(-time.Duration(took) * tickInterval)) //nolint:gosec // a few seconds
	}
	s.rest(wait, "settle_rate")
	return open
}

// message executes a message of the given size, of which b is the whole or nothing. It returns for how long no more should
// be read, and false when the connection has ended.
func (s *session) message(b []byte, size int, whole bool) (wait time.Duration, open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return 0, false
	}
	if size > s.srv.cfg.Limits.Frame {
		s.limit("frame")
		s.fail(replyTo{}, codePublishFailed, "the message has "+strconv.Itoa(size)+" bytes, at most "+
			strconv.Itoa(s.srv.cfg.Limits.Frame)+" are read; a payload may have "+strconv.Itoa(s.srv.cfg.Bus.MaxPayload()))
		return 0, true
	}
	if !whole {
		s.limit("inbound_bytes")
		s.fail(replyTo{}, codeOverloaded, "The hub receives more large messages than it has room for.")
		return 0, true
	}
	wait = s.execute(b)
	if cap(b) > maxKeptText {
		// Nothing may keep a large message from being collected while the connection is idle.
		s.frame = frame{}
		s.key = nil
	}
	return wait, true
}

// rest lets the reader wait, unless the connection ends: whoever ends it says why, and the next read returns. mu is not
// held meanwhile.
func (s *session) rest(d time.Duration, limit string) {
	if d <= 0 {
		return
	}
	s.limit(limit)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.ctx.Done():
	}
}

// part counts a ping, a pong or a small part of a message, which cost the hub as much as a frame and are no use: who sends more of
// them than it may send frames waits.
func (s *session) part() {
	s.rest(s.parts.spend(s.srv.frames, 1, time.Since(s.srv.started)), "part_rate")
}

// read reads a message into b and returns its size. What is over Limits.Frame, or finds no room, is counted and not kept:
// b is not the whole message then.
func (s *session) read(r io.Reader, b *[]byte) (size int, whole bool, err error) {
	limit, skip := s.srv.cfg.Limits.Frame, s.srv.cfg.Limits.Skip
	if s.principal == nil { // only this goroutine changes it
		limit, skip = preAuthFrame, preAuthFrame
	}
	buf := (*b)[:cap(*b)]
	n := 0
	whole = true
	for {
		if n == len(buf) {
			// One byte more than there may be shows that there are too many.
			if whole = whole && size <= limit && s.grow(&buf, limit+1); !whole {
				n = 0 // skipping: the buffer is scratch
			}
		}
		m, err := r.Read(buf[n:])
		n += m
		size += m
		if 0 < m && m < min(size, smallPart) { // not the first
			s.part()
		}
		if size > skip {
			return size, false, errMessageTooBig
		}
		if errors.Is(err, io.EOF) {
			*b = buf[:n]
			return size, whole, nil
		}
		if err != nil {
			return size, false, err
		}
	}
}

// lost ends the session after the connection did.
func (s *session) lost(err error) {
	c := websocket.CloseStatus(err)
	if c == -1 {
		c = websocket.StatusAbnormalClosure
	}
	s.out.shut(c)
}

// end is the flusher: it sends until the connection is to be closed, gives the leases back, and closes it.
func (s *session) end() {
	c := s.out.run()
	if c == closeSlowConsumer {
		s.limit("write_stall")
	}
	// This also ends what the reader may wait for, so that release gets mu.
	s.cancel()
	s.release()
	var err error
	if reason, ours := closings[c]; ours || c == websocket.StatusInternalError {
		err = s.conn.Close(c, reason.name)
	} else {
		err = s.conn.CloseNow()
	}
	if err != nil {
		s.srv.log.Debug("closing handshake failed", slog.Any("error", err))
	}
	s.srv.cfg.Observer.ConnectionClosed(int(c))
}

// release ends all subscriptions of a client that is gone. What it had been given counts as a failed attempt.
func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if s.callEnd != nil {
		s.callEnd()
	}
	s.srv.connections.remove(s.counted)
	s.counted = ""
	s.endSubs(s.subs, Subscription.Disconnect)
}

// discard ends the session because the server closes. That is no fault of the client's.
func (s *session) discard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.endSubs(s.subs, func(sub Subscription, ctx context.Context) error {
		now, cancel := context.WithCancel(ctx)
		cancel() // leases are not waited for
		return sub.Drain(now)
	})
	s.out.shut(closeDraining)
}

// drain lets the client settle what it holds, gives the rest back, and closes the connection.
func (s *session) drain(ctx context.Context, grace time.Duration) {
	s.mu.Lock()
	s.draining = true
	subs := make([]*subscription, 0, len(s.subs))
	for _, sub := range s.subs {
		subs = append(subs, sub)
	}
	s.mu.Unlock()

	// Frames go on meanwhile: the client's acks are among them.
	settle, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var wg sync.WaitGroup
	for _, sub := range subs {
		wg.Go(func() { _ = sub.bus.Drain(settle) })
	}
	wg.Wait()

	s.mu.Lock()
	defer s.mu.Unlock()
	until := time.Now().Add(callTimeout)
	if end, ok := ctx.Deadline(); ok && end.Before(until) {
		until = end
	}
	s.await(until, func() bool { return len(s.pending) == 0 })
	s.ended = true
	clear(s.subs)
	flush, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := s.pub.Flush(flush); err != nil {
		s.srv.log.WarnContext(ctx, "publishes in flight were not confirmed before the end", slog.Any("error", err))
	}
	s.out.shut(closeDraining)
}

// tick is called by the server's ticker. It never blocks.
func (s *session) tick(now time.Time) {
	if d := s.due.Load(); d != nil && !now.Before(d.at) && s.due.CompareAndSwap(d, nil) {
		s.expire(d)
		return
	}
	if n := s.wire.reads.Load(); n != s.seenReads {
		s.seenReads = n
		s.quietSince = now
		return
	}
	if now.Sub(s.quietSince) >= s.srv.cfg.Limits.PingInterval && s.pinging.CompareAndSwap(false, true) {
		s.quietSince = now
		s.srv.wg.Go(s.ping)
	}
}

func (s *session) expire(d *due) {
	if d.code == closeTokenExpired {
		s.tell(codeTokenExpired, "The token has expired.")
	}
	s.out.shut(d.code)
}

// ping ends the connection unless the peer gives a sign of life.
func (s *session) ping() {
	defer s.pinging.Store(false)
	reads := s.wire.reads.Load()
	ctx, cancel := context.WithTimeout(s.ctx, s.srv.cfg.Limits.PongTimeout)
	defer cancel()
	if err := s.conn.Ping(ctx); err == nil {
		return
	}
	// The peer is not to blame while it sends other bytes, while what it has to read before the ping is more than the
	// kernel takes (that is for the write stall to judge), or while nobody here reads its pong.
	if s.wire.waiting.Load() && s.wire.reads.Load() == reads && !s.wire.busy() {
		s.out.shut(closePeerSilent)
	}
}

// publishContext is for calls on the hot path. It ends at the frame's deadline or up to callShare
// later, or with the connection.
func (s *session) publishContext() context.Context {
	since := s.wire.arrived.Sub(s.callFrom)
	if s.call == nil || since < 0 || since >= callShare {
		if s.callEnd != nil {
			s.callEnd()
		}
		s.callFrom = s.wire.arrived
		s.call, s.callEnd = context.WithDeadline(s.ctx, s.callFrom.Add(callTimeout+callShare))
	}
	return s.call
}

// fail answers a frame with an error.
func (s *session) fail(to replyTo, c code, msg string) {
	s.srv.cfg.Observer.ErrorSent(string(c))
	s.out.err(to, c, msg)
}

// tell sends an error that answers no frame.
func (s *session) tell(c code, msg string) {
	s.srv.cfg.Observer.ErrorSent(string(c))
	s.out.notice(c, msg)
}

func (s *session) limit(name string) { s.srv.cfg.Observer.LimitReached(name) }
