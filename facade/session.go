package facade

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"eventhub/jetstream/panics"
)

const (
	// callTimeout is how long after its arrival a frame may wait for the bus, so that every frame
	// is answered within the 15 s that clients wait.
	callTimeout = 10 * time.Second
	// callShare is how long publishes share one context. The context then ends up to callShare
	// after a frame's deadline. Making a context costs as much as the rest of a publish.
	callShare = 2 * time.Second
	// smallPart is the size in bytes below which a part of a message, except the first, counts as a
	// frame.
	smallPart = 128
	// preAuthFrame is the largest message in bytes that a client without credentials may send.
	preAuthFrame = 64 << 10
	// unauthenticatedGrace is how long an evicted unauthenticated connection has to receive its
	// close code.
	unauthenticatedGrace = 100 * time.Millisecond
	// maxTopicsKnown bounds a session's cache of topics that it may publish to.
	maxTopicsKnown = 256
)

// errMessageTooBig ends a connection whose message could not be skipped.
var errMessageTooBig = errors.New("facade: skip a message: it is too large")

// session is one WebSocket connection. Its reader (run) executes frames one after the other. Frames
// that wait for the bus become operations and run concurrently. Its writer's flusher (end) sends.
// The server's ticker calls tick. Drain and Close may be called by any goroutine.
type session struct {
	srv  *Server
	conn *websocket.Conn
	wire *wire
	out  *writer
	pub  Publisher

	remote string    // address of the client; see remoteOf
	number uint64    // in the order in which connections were made
	since  time.Time // when the connection was made

	// parts limits control frames and small parts of messages. Owned by the reader.
	parts bucket
	// receiving is how many bytes of the server's inbound memory the message that is being received
	// takes. Owned by the reader.
	receiving int
	// text holds the message that is being executed. It is nil when an operation has taken the
	// message. Owned by the reader.
	text *[]byte

	// ctx ends with the connection.
	ctx    context.Context
	cancel context.CancelFunc

	// due is when the server's ticker must end the connection; nil for never.
	due atomic.Pointer[due]

	// who is principal, for the server's ticker, which takes no lock; nil while there is none.
	who atomic.Pointer[Principal]
	// cut is set when the connection has been ended because its token was revoked.
	cut atomic.Bool

	// Owned by the ticker: what it last saw of the wire, and since when nothing has changed.
	seenReads  uint64
	quietSince time.Time
	pinging    atomic.Bool

	// mu is held while a frame is executed, but not while a frame waits for the bus. Drain and the
	// end of the connection therefore happen between two frames.
	mu        sync.Mutex
	ended     bool // frames no longer have an effect
	draining  bool
	principal Principal // nil until AUTH succeeded
	counted   string    // Key of the principal that the connection is counted for, else ""
	subs      map[string]*subscription
	casts     map[string]*cast // by topic; those that are over count as absent
	frame     frame
	key       []byte // scratch for a look-up in subs
	frames    bucket
	settles   bucket
	faults    int // consecutive
	refusals  int // consecutive refusals of AUTH
	topics    map[string]*sessionTopic
	call      context.Context // shared by publishes
	callEnd   context.CancelFunc
	callFrom  time.Time // arrival of the frame that call was made for

	// Frames that wait for the bus, and the goroutines that execute them. run waits for calls.
	pending pipeline
	joining int           // SUBSCRIBEs in progress
	changed chan struct{} // closed at the next change of pending; nil when nobody waits for it
	calls   sync.WaitGroup

	// wantsResets is set when the client's last AUTH named the capability group_reset.
	wantsResets atomic.Bool
	// wantsLosses is the same for the capability events_lost.
	wantsLosses atomic.Bool
	// wantsPause is the same for the capability retry_after.
	wantsPause atomic.Bool
}

// due is a time at which a connection ends, and why.
type due struct {
	at   time.Time
	code websocket.StatusCode // closeAuthTimeout or closeTokenExpired
}

func (s *Server) newSession(conn *websocket.Conn, w *wire, remote string) *session {
	n := &session{srv: s, conn: conn, wire: w, remote: remote, number: s.numbered.Add(1), since: time.Now(), pub: s.cfg.Bus.NewPublisher()}
	n.ctx, n.cancel = context.WithCancel(s.ctx)
	n.out = newWriter(w, s.cfg.Limits.OutboundBytes, s.cfg.Limits.CloseGrace)
	n.quietSince = n.since
	n.awaitAuth()
	return n
}

// awaitAuth starts the time within which a successful AUTH must come.
func (s *session) awaitAuth() {
	if oldest := s.srv.unauthenticated.add(s); oldest != nil {
		s.limit("unauthenticated")
		oldest.wire.hurry(unauthenticatedGrace) // its place is needed
		oldest.out.shut(closeAuthTimeout)
	}
	s.due.Store(&due{at: time.Now().Add(s.srv.cfg.Limits.AuthTimeout), code: closeAuthTimeout})
}

// run reads until the connection ends. flushed is closed when the flusher has ended.
func (s *session) run(flushed <-chan struct{}) {
	s.readAll()
	s.out.shut(websocket.StatusAbnormalClosure)
	<-flushed
	s.calls.Wait()
	for _, o := range s.pending { // these never begin
		s.giveBack(o)
	}
}

// readAll executes messages until the connection ends.
func (s *session) readAll() {
	defer s.survive()
	for s.next() {
	}
}

// survive is deferred wherever frames are executed. A panic ends only this connection, as a panic
// in a handler of net/http does.
func (s *session) survive() {
	if p := recover(); p != nil {
		panics.Note(s.srv.often.By("func"), "frame", p)
		s.out.shut(websocket.StatusInternalError)
	}
}

// next reads one message and executes it. It returns false when the connection has ended or is
// about to end.
func (s *session) next() bool {
	// A cancellable context costs two microseconds a message. Closing the connection ends a read as
	// well.
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

// message executes a message of the given size. b is the whole message if whole is set. It returns
// how long the reader must wait before it reads on, and false when the connection has ended.
func (s *session) message(b []byte, size int, whole bool) (wait time.Duration, open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return 0, false
	}
	if size > s.srv.cfg.Limits.Frame {
		s.limit("frame")
		s.failWith(replyTo{}, &fault{code: codePublishFailed, tooLarge: true, msg: "the message has " + strconv.Itoa(size) + " bytes, at most " +
			strconv.Itoa(s.srv.cfg.Limits.Frame) + " are read; a payload may have " + strconv.Itoa(s.srv.cfg.Bus.MaxPayload())})
		return 0, true
	}
	if !whole {
		s.limit("inbound_bytes")
		s.fail(replyTo{}, codeOverloaded, "The hub has reached its limit of memory for incomplete messages.")
		return 0, true
	}
	wait = s.execute(b)
	if cap(b) > maxKeptText {
		// An idle connection must not keep a large message in memory.
		s.frame = frame{}
		s.key = nil
	}
	return wait, true
}

// rest makes the reader wait, unless the connection ends. Whoever ends the connection sets the
// reason, and the next read returns. mu is not held meanwhile.
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

// part counts a ping, a pong or a small part of a message. These cost the hub as much as a frame
// and are of no use, so a client that sends more of them than it may send frames is made to wait.
func (s *session) part() {
	s.rest(s.parts.spend(s.srv.frames, 1, time.Since(s.srv.started)), "part_rate")
}

// read reads a message into b and returns its size. Bytes over Limits.Frame, or for which there is
// no memory, are counted and dropped; b is then not the whole message.
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
			// A buffer of one byte more than the limit reveals a message that is too large.
			if whole = whole && size <= limit && s.grow(&buf, limit+1); !whole {
				n = 0 // skipping: the buffer is scratch
			}
		}
		m, err := r.Read(buf[n:])
		n += m
		size += m
		if 0 < m && m < min(size, smallPart) { // not the first part
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

// lost ends the session after its connection was lost.
func (s *session) lost(err error) {
	c := websocket.CloseStatus(err)
	if c == -1 {
		c = websocket.StatusAbnormalClosure
	}
	s.out.shut(c)
}

// end is the flusher. It sends until the connection is to be closed, gives the leases back, and
// closes the connection.
func (s *session) end() {
	c := s.out.run()
	if c == closeSlowConsumer {
		s.limit("write_stall")
	}
	// This also ends whatever the reader waits for, so that release gets mu.
	if p := s.who.Load(); p != nil {
		s.srv.log.LogAttrs(s.ctx, slog.LevelDebug, "client disconnected", s.attrs(*p), slog.Int("code", int(c)))
	}
	s.cancel()
	s.release()
	var err error
	if reason, ours := closings[c]; ours || slices.Contains(otherCloses, c) {
		name := reason.name
		if c == closeDraining && s.wantsPause.Load() {
			name += " retry_after_ms=" + strconv.FormatInt(s.srv.returns.pause().Milliseconds(), 10)
		}
		err = s.conn.Close(c, name)
	} else {
		err = s.conn.CloseNow()
	}
	if err != nil {
		s.srv.log.Debug("failed to complete the closing handshake", slog.Any("error", err))
	}
	s.srv.cfg.Observer.ConnectionClosed(int(c))
}

// release ends all subscriptions of a client that is gone. Events that the client was given count
// as failed attempts.
func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if s.callEnd != nil {
		s.callEnd()
	}
	s.srv.connections.remove(s.counted)
	s.counted = ""
	s.endBroadcasts(nil)
	s.endSubs(s.subs, Subscription.Disconnect)
}

// discard ends the session because the server closes. The client is not at fault, so no event
// counts as a failed attempt.
func (s *session) discard() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.endSubs(s.subs, func(sub Subscription, ctx context.Context) error {
		now, cancel := context.WithCancel(ctx)
		cancel() // Drain does not wait for leases
		return sub.Drain(now)
	})
	s.out.shut(closeDraining)
}

// drain gives the client the time grace to settle what it holds, gives the rest back, and closes
// the connection.
func (s *session) drain(ctx context.Context, grace time.Duration) {
	s.mu.Lock()
	s.draining = true
	subs := make([]*subscription, 0, len(s.subs))
	for _, sub := range s.subs {
		subs = append(subs, sub)
	}
	s.mu.Unlock()

	// Frames are executed meanwhile, the client's acks among them.
	settle, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var wg sync.WaitGroup
	for _, sub := range subs {
		wg.Go(func() {
			defer sub.end()
			_ = sub.bus.Drain(settle)
		})
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
		s.srv.often.Log(ctx, slog.LevelWarn, "failed to confirm all publishes before closing a connection", s.client(),
			slog.String("client", s.client()), slog.Any("error", err))
	}
	s.out.shut(closeDraining)
}

// tick checks the connection's deadlines. The server's ticker calls it. It never blocks.
func (s *session) tick(now time.Time) {
	if d := s.due.Load(); d != nil && !now.Before(d.at) && s.due.CompareAndSwap(d, nil) {
		s.expire(d)
		return
	}
	if p := s.who.Load(); p != nil && revoked(*p) && !s.cut.Swap(true) {
		s.tell(codeTokenExpired, tokenRevoked)
		s.out.shut(closeTokenExpired)
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

// ping pings the peer and ends the connection unless the peer shows a sign of life.
func (s *session) ping() {
	defer s.pinging.Store(false)
	reads := s.wire.reads.Load()
	ctx, cancel := context.WithTimeout(s.ctx, s.srv.cfg.Limits.PongTimeout)
	defer cancel()
	if err := s.conn.Ping(ctx); err == nil {
		return
	}
	// The peer is not at fault in three cases: it sends other bytes, the kernel has not taken what
	// precedes the ping (the write stall covers that), or nobody here reads the pong.
	if s.wire.waiting.Load() && s.wire.reads.Load() == reads && !s.wire.busy() {
		s.out.shut(closePeerSilent)
	}
}

// publishContext returns the context of publishes on the hot path. It ends at the frame's deadline
// or up to callShare later, or with the connection.
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
	s.out.err(to, c, msg, false)
}

func (s *session) failWith(to replyTo, fail *fault) {
	s.srv.cfg.Observer.ErrorSent(string(fail.code))
	s.out.err(to, fail.code, fail.msg, fail.final())
}

// tell sends an error that answers no frame.
func (s *session) tell(c code, msg string) {
	s.srv.cfg.Observer.ErrorSent(string(c))
	s.out.notice(c, msg)
}

func (s *session) limit(name string) { s.srv.cfg.Observer.LimitReached(name) }
