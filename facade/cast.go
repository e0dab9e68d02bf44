package facade

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade/broadcast"
	"eventhub/facade/textmsg"
	"eventhub/jetstream"
	"eventhub/jetstream/jsonscan"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
)

const (
	// castLinger is how long a topic is followed after its last socket has left.
	castLinger = 30 * time.Second
	// castPiece is how many bytes of stored events go to the writer at a time.
	castPiece = 64 << 10
	// castPause is how long a broadcast waits for a server that does not have the newest events
	// yet.
	castPause = 20 * time.Millisecond
	// castPatience is how long a pos may be ahead of what this hub has seen.
	castPatience = 5 * time.Second
)

// Why a broadcast could not begin where the client asked.
const (
	reasonTruncated = "truncated"
	reasonChanged   = "stream_changed"
	reasonTooFar    = "too_far"
)

// castSource reads topics for broadcasts.
type castSource struct {
	bus   Bus
	often *pacedlog.Log
}

func (c castSource) Place(ctx context.Context, topic, client string) (jetstream.Place, error) {
	return c.bus.History(topic).Place(ctx, client)
}

func (c castSource) Follow(ctx context.Context, topic string, after jetstream.Place, f func(*jetstream.Event) error) error {
	h := c.bus.History(topic)
	err := h.Tail(ctx, after.Stream, after.Last, func(e *jetstream.Event) error {
		if e == nil {
			// The stream may have been created again before it was followed.
			now, err := h.Place(ctx, "")
			if err != nil {
				return err
			}
			if !now.Made.Equal(after.Made) {
				return jetstream.ErrDropped
			}
		}
		return f(e)
	})
	if ctx.Err() == nil && !errors.Is(err, jetstream.ErrNotFound) {
		c.often.Log(ctx, slog.LevelWarn, "a topic cannot be broadcast any more; its clients are told", topic, slog.String("topic", topic), slog.Any("error", err))
	}
	return err
}

// appendCast appends the EVENT frame of a broadcast, framed for a WebSocket.
func appendCast(dst []byte, topic string, at jetstream.Place, e *jetstream.Event) []byte {
	start := len(dst)
	dst = append(textmsg.Begin(dst), `{"op":"EVENT","topic":`...)
	dst = jsonscan.AppendString(dst, topic)
	dst = append(dst, `,"event":`...)
	dst = e.AppendRecord(dst)
	dst = append(dst, `,"ctx":{`...)
	if e.Tombstone {
		dst = append(dst, `"tombstone":true,`...)
	}
	dst = append(dst, `"pos":"`...)
	dst = appendPos(dst, at.Made.UnixNano(), e.Sequence)
	return textmsg.End(append(dst, `"}}`...), start)
}

// frameStored is appendCast as a broadcast.Frame.
func frameStored(dst []byte, topic string, at jetstream.Place, e *jetstream.Event) ([]byte, error) {
	return appendCast(dst, topic, at, e), nil
}

// receiver is the connection that a broadcast is sent on. Its methods may be called concurrently,
// and only send and waitBelow block.
type receiver interface {
	// post queues framed messages. It copies them.
	post(framed []byte)
	// waitBelow waits until fewer than n bytes are queued. It returns false when the connection has
	// ended.
	waitBelow(n int) bool
	// wake has the flusher call flush of a broadcast, after it has sent what is queued.
	wake(c *cast)
	// send sends framed messages. The flusher calls it.
	send(frames []byte) error
	// shut ends the connection.
	shut(code websocket.StatusCode)
	// gone tells the client that the topic is gone, or cannot be read.
	gone(topic string)
	// call starts a goroutine that the end of the connection waits for.
	call(f func())
}

// castSocket is the receiver of a WebSocket.
type castSocket struct{ *session }

func (s castSocket) post(framed []byte)             { s.out.message(framed) }
func (s castSocket) waitBelow(n int) bool           { return s.out.waitBelow(n) }
func (s castSocket) wake(c *cast)                   { s.out.wake(c) }
func (s castSocket) shut(code websocket.StatusCode) { s.out.shut(code) }
func (s castSocket) gone(topic string)              { s.tell(codeNotSubscribed, topic) }

func (s castSocket) send(frames []byte) error {
	_, err := s.out.wire.send(frames)
	return err
}

func (s castSocket) call(f func()) {
	s.calls.Go(func() {
		defer s.survive()
		f()
	})
}

// cast is a broadcast to one socket. Until it has caught up with the Tail of its topic, its own
// goroutine reads stored events and queues them. Then the flusher of the connection takes frames
// from the ring, until the socket falls behind the ring.
type cast struct {
	srv    *Server
	to     receiver
	topic  string
	client string // the principal that is charged
	opts   castOptions
	caster *caster
	tail   *broadcast.Tail
	cursor *broadcast.Cursor
	ctx    context.Context // ends with the broadcast
	cancel context.CancelFunc

	presence atomic.Pointer[[]byte] // the PRESENCE frame to send next
	shown    bool                   // the topic has presence

	// snapping is set while a snapshot is queued: a client cannot go on from within it.
	snapping atomic.Bool

	over atomic.Bool // nothing more is sent
	live atomic.Bool // the flusher owns cursor
	// Owned by the flusher.
	ready bool      // the broadcast was live when the flusher took what was queued
	due   time.Time // when opts.interval lets the next flush be

	woken bool // it waits for the flusher of a WebSocket; guarded by writer.mu

	mu     sync.Mutex
	timer  *time.Timer // wakes the flusher when it is due
	seated bool        // the client counts as present, under name
	name   string
	behind sync.WaitGroup // the goroutine that catches up
}

// castStart is where a broadcast begins.
type castStart struct {
	from   uint64 // behind this sequence
	pos    uint64 // where the client is, which may be before from
	missed uint64 // events between pos and from
	gap    bool   // the client is told of them
	reason string // why it could not begin where the client asked; "": it could
}

// Broadcasts is the state of the broadcasts of a Server.
type Broadcasts struct {
	// Topics are broadcast, to Sockets, and RingBytes is the memory of what is kept of them.
	Topics, Sockets, RingBytes int
	// Gaps is how many GAP frames were sent so far, Missed how many events they say were left out,
	// and CaughtUp how many events were read from the store.
	Gaps, Missed, CaughtUp uint64
}

// Broadcasts returns the state of the broadcasts.
func (s *Server) Broadcasts() Broadcasts {
	f := s.tails.Figures()
	return Broadcasts{
		Topics: f.Topics, Sockets: f.Cursors, RingBytes: f.Bytes,
		Gaps: s.casting.gaps.Load(), Missed: s.casting.missed.Load(), CaughtUp: s.casting.caughtUp.Load(),
	}
}

// castCounts counts what broadcasts do, and holds the quota of what principals read from streams.
type castCounts struct {
	gaps, missed, caughtUp atomic.Uint64
	reads                  *quota.Set
}

// broadcast begins a SUBSCRIBE of a broadcast, unless it is refused at once.
func (s *session) broadcast(o *operation) (ended bool) {
	f := &o.frame
	topic := string(f.topic)
	for name, c := range s.casts {
		if c.over.Load() {
			delete(s.casts, name)
		}
	}
	if s.casts[topic] != nil {
		s.fail(o.to, codeAlreadySubscribed, topic)
		return true
	}
	if err := jetstream.ValidTopic(topic); err != nil {
		fail := busFault(err, codeBadTopic, "The topic is not well formed.")
		s.fail(o.to, fail.code, fail.msg)
		return true
	}
	fail := s.mayFollow(topic, f.cast)
	switch {
	case fail != nil:
		s.fail(o.to, fail.code, fail.msg)
		return true
	case f.cast.presence && !s.srv.cfg.Bus.Rule(topic).Presence:
		s.fail(o.to, codeBadOptions, "topic "+topic+" has no presence; its rule needs presence: true")
		return true
	case o.late():
		s.failLate(o.to, opSubscribe)
		return true
	case len(s.subs)+len(s.casts)+s.joining >= s.srv.cfg.Limits.Subscriptions:
		s.limit("subscriptions")
		s.fail(o.to, codeOverloaded, "This connection has reached its limit of "+
			strconv.Itoa(s.srv.cfg.Limits.Subscriptions)+" subscriptions.")
		return true
	}
	s.joining++
	c := &cast{srv: s.srv, to: castSocket{s}, topic: topic, client: s.principal.Key(), opts: *f.cast, shown: s.srv.cfg.Bus.Rule(topic).Presence}
	s.carryOut(o, func(ctx context.Context) { s.joinBroadcast(ctx, o, c) })
	return false
}

// mayFollow returns why a broadcast cannot be made, or nil. mu is held.
func (s *session) mayFollow(topic string, opts *castOptions) *fault {
	switch {
	case s.principal == nil:
		return &fault{code: codeUnauthorized, msg: unauthorized}
	case s.draining || s.ended:
		return &fault{code: codeOverloaded, msg: "The hub is shutting down; connect again."}
	}
	return s.srv.mayBroadcast(s.principal, topic, opts)
}

// mayBroadcast asks the policy.
func (s *Server) mayBroadcast(p Principal, topic string, opts *castOptions) *fault {
	switch {
	case !s.allows(p, ActionSubscribe, topic, ""):
		return &fault{code: codeForbidden, msg: "The policy does not allow to subscribe to " + topic + " without a group."}
	case opts.presence && !s.allows(p, ActionPresence, topic, ""):
		return &fault{code: codeForbidden, msg: "The policy does not allow to see who is present at " + topic + "."}
	}
	return nil
}

// joinBroadcast is the part of a SUBSCRIBE of a broadcast that waits for the bus.
func (s *session) joinBroadcast(ctx context.Context, o *operation, c *cast) {
	// A broadcast that starts at the end must not have what the client published before.
	err := s.pub.Flush(ctx)
	s.mu.Lock()
	o.flushed = true
	if err == nil {
		s.advance()
	}
	s.mu.Unlock()
	var start castStart
	if err == nil {
		start, err = c.join(ctx, s.ctx)
	}
	fail := s.adoptBroadcast(c, err)
	switch {
	case err != nil:
		s.failBus(o.to, c.topic, err, codeSubscribeFailed, "The broadcast could not be begun.")
		return
	case fail != nil:
		c.stop()
		s.fail(o.to, fail.code, fail.msg)
		return
	}
	made := c.tail.Place().Made.UnixNano()
	s.out.okAt(o.to, string(appendPos(nil, made, start.from)), start.reason)
	if sent := s.out.sent(o.to); sent != nil {
		select {
		case <-sent:
		case <-s.ctx.Done():
		}
	}
	c.begin(start)
}

// adoptBroadcast adds a broadcast to the session, unless the session has ended or its policy has
// changed.
func (s *session) adoptBroadcast(c *cast, err error) *fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.joining--
	if err != nil {
		return nil
	}
	if fail := s.mayFollow(c.topic, &c.opts); fail != nil {
		return fail
	}
	c.seat(s.principal.Name())
	if s.casts == nil {
		s.casts = make(map[string]*cast)
	}
	s.casts[c.topic] = c
	return nil
}

// unbroadcast ends a broadcast. No event of it is sent after the OK.
func (s *session) unbroadcast(o *operation) (ended bool) {
	topic := string(o.frame.topic)
	c := s.casts[topic]
	delete(s.casts, topic)
	if c == nil || !c.stop() {
		s.fail(o.to, codeNotSubscribed, topic)
		return true
	}
	s.carryOut(o, func(context.Context) {
		c.behind.Wait()
		s.out.ok(o.to, "")
	})
	return false
}

// endBroadcasts ends broadcasts that the policy does not allow any more; all of them without a
// principal. mu is held.
func (s *session) endBroadcasts(p Principal) {
	for topic, c := range s.casts {
		if p != nil && s.srv.allows(p, ActionSubscribe, topic, "") && (!c.opts.presence || s.srv.allows(p, ActionPresence, topic, "")) {
			c.seat(p.Name())
			continue
		}
		delete(s.casts, topic)
		if c.stop() && p != nil {
			s.tell(codeForbidden, "The new policy does not allow "+topic+"; the broadcast has ended.")
		}
	}
}

// join enters the Tail of the topic, and finds where the broadcast begins. The broadcast ends with
// the connection.
func (c *cast) join(ctx, connection context.Context) (start castStart, err error) {
	srv := c.srv
	if !srv.joins.Enter(ctx, c.client, math.MaxInt, func() { srv.cfg.Observer.LimitReached("joins") }) {
		return start, &jetstream.Error{Code: string(codeOverloaded), Msg: "Too many subscriptions are being made: try again later."}
	}
	defer srv.joins.Leave(c.client)
	if c.caster, err = srv.casterOf(ctx, c.topic, c.opts.version, c.client); err != nil {
		return start, err
	}
	c.tail, err = srv.tails.Join(ctx, c.topic, c.client, c.form())
	switch {
	case errors.Is(err, broadcast.ErrTails):
		srv.cfg.Observer.LimitReached("tails")
		return start, &jetstream.Error{Code: string(codeOverloaded), Msg: "The hub has reached its limit of topics that are broadcast."}
	case errors.Is(err, broadcast.ErrPrincipalTails):
		srv.cfg.Observer.LimitReached("principal_tails")
		return start, &jetstream.Error{Code: string(codeRateLimited), Msg: "This client has reached its limit of topics that are broadcast."}
	case errors.Is(err, broadcast.ErrVersions):
		srv.cfg.Observer.LimitReached("tail_versions")
		return start, &jetstream.Error{Code: string(codeOverloaded), Msg: "The hub broadcasts this topic in " + strconv.Itoa(castVersions) + " other versions, which is its limit."}
	case errors.Is(err, broadcast.ErrPrincipalVersions):
		srv.cfg.Observer.LimitReached("principal_tail_versions")
		return start, &jetstream.Error{Code: string(codeRateLimited), Msg: "This client has this topic broadcast in " + strconv.Itoa(principalVersions) + " other versions, which is its limit."}
	case errors.Is(err, broadcast.ErrClosed):
		return start, &jetstream.Error{Code: string(codeOverloaded), Msg: "The hub is shutting down; connect again."}
	case err != nil:
		return start, err
	}
	c.ctx, c.cancel = context.WithCancel(connection)
	c.cursor = c.tail.NewCursor(c)
	start, err = c.find(ctx)
	if err != nil {
		c.stop()
	}
	return start, err
}

// form is how the events of the broadcast are framed.
func (c *cast) form() broadcast.Form {
	if c.caster == nil {
		return broadcast.Form{}
	}
	k, srv := c.caster, c.srv // the Tail outlives the broadcast
	return broadcast.Form{Version: c.opts.version, Frame: func(ctx context.Context, dst []byte, topic string, at jetstream.Place, e *jetstream.Event, payer func(not string) string) ([]byte, error) {
		return srv.frameCast(ctx, dst, k, topic, at, e, payer)
	}}
}

// frameCast frames an event, and counts one that could not be cast.
func (s *Server) frameCast(ctx context.Context, dst []byte, k *caster, topic string, at jetstream.Place, e *jetstream.Event, payer func(not string) string) ([]byte, error) {
	if k == nil {
		return frameStored(dst, topic, at, e)
	}
	dst, uncast, err := k.appendTo(ctx, dst, topic, at, e, payer)
	if uncast {
		s.casting.gaps.Add(1)
		s.casting.missed.Add(1)
	}
	return dst, err
}

// find finds where the broadcast begins.
func (c *cast) find(ctx context.Context) (start castStart, err error) {
	history := c.srv.cfg.Bus.History(c.topic)
	head := c.cursor.Last()
	start = castStart{from: head, pos: head}
	switch {
	case c.opts.history > 0:
		if from, ok := c.cursor.Back(c.opts.history); ok {
			start.from, start.pos = from, from
			return start, nil
		}
		now, err := history.Place(ctx, "")
		if err != nil {
			return start, err
		}
		now.Last = head
		start.from, err = history.Back(ctx, now, c.opts.history)
		start.pos = start.from
		return start, err
	case c.opts.pos != nil:
		return c.findPos(ctx, history)
	case c.opts.after != nil:
		r, err := history.Range(ctx, jetstream.ReadOptions{From: *c.opts.after, CountFor: c.client})
		if err != nil {
			return start, err
		}
		first, _ := r.Bounds()
		if start.from = first - 1; r.Truncated {
			start.reason = reasonTruncated
		}
		start.pos = start.from
		if head, err = c.headAt(ctx, start.from); err != nil {
			return start, err
		}
		return c.near(start, head), nil
	case c.opts.snapshot: // is there one?
		_, err := c.srv.cfg.Bus.Keys(c.topic).Snapshot(ctx, func(*jetstream.Event) error { return errCastOver })
		if err != nil && !errors.Is(err, errCastOver) {
			return start, err
		}
	default: // behind all that was stored before, which the Tail may not have yet
		now, err := c.tail.Now(ctx)
		if err != nil {
			return start, err
		}
		if now.Made.Equal(c.tail.Place().Made) { // else the Tail is about to end
			start.from = max(head, now.Last)
			start.pos = start.from
		}
	}
	return start, nil
}

// headAt waits until the Tail is at a sequence, which another hub or another server has seen. It
// returns where the Tail is.
func (c *cast) headAt(ctx context.Context, seq uint64) (head uint64, err error) {
	for head = c.cursor.Head(); head < seq; head = c.cursor.Head() {
		select {
		case <-time.After(castPause):
		case <-ctx.Done():
			return head, ctx.Err()
		}
	}
	return head, nil
}

// soon is headAt for castPatience.
func (c *cast) soon(ctx context.Context, seq uint64) (head uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.srv.castPatience)
	defer cancel()
	return c.headAt(ctx, seq)
}

// findPos finds where a broadcast goes on that the client had before.
func (c *cast) findPos(ctx context.Context, history History) (castStart, error) {
	pos, tail := c.opts.pos, c.tail.Place()
	start := castStart{from: pos.seq, pos: pos.seq}
	if pos.made != tail.Made.UnixNano() {
		head := c.cursor.Last()
		return castStart{from: head, pos: head, reason: reasonChanged}, nil
	}
	head, err := c.soon(ctx, pos.seq)
	if err != nil && ctx.Err() == nil { // it was restored from an older copy
		return castStart{from: head, pos: head, reason: reasonChanged}, nil
	}
	if err != nil {
		return start, err
	}
	if c.cursor.Covers(pos.seq) {
		return start, nil
	}
	now, err := history.Place(ctx, "")
	if err != nil {
		return start, err
	}
	if now.First > pos.seq+1 {
		start.from, start.gap, start.reason = now.First-1, true, reasonTruncated
		if !now.Family { // which of them were of the topic nobody knows
			start.missed = start.from - pos.seq
		}
	}
	return c.near(start, head), nil
}

// near moves a start that is too far from the end to the end.
func (c *cast) near(start castStart, head uint64) castStart {
	if head < start.from || head-start.from <= uint64(c.srv.cfg.Limits.CatchUp) { //nolint:gosec // not negative
		return start
	}
	start.gap, start.reason = true, reasonTooFar
	start.missed, start.from = head-start.pos, head
	if c.tail.Place().Family {
		start.missed = 0
	}
	return start
}

// begin starts the delivery. The OK is on its way.
func (c *cast) begin(start castStart) {
	if start.gap {
		c.to.post(c.gap(nil, start.pos, start.from, start.missed))
	}
	if !c.cursor.Begin() {
		c.End(broadcast.ErrClosed)
		return
	}
	if c.over.Load() { // stop may not have seen that the cursor began
		c.cursor.End()
		return
	}
	if c.opts.presence {
		c.attend()
	}
	if !c.opts.snapshot && c.cursor.MoveTo(start.from) {
		c.goLive()
		return
	}
	c.fallBehind(start.from, c.opts.snapshot)
}

// goLive hands the cursor to the flusher.
func (c *cast) goLive() {
	c.live.Store(true)
	c.to.wake(c)
}

// Wake implements broadcast.Listener.
func (c *cast) Wake() { c.to.wake(c) }

// Client implements broadcast.Listener.
func (c *cast) Client() string { return c.client }

// End implements broadcast.Listener: the topic is gone, or cannot be read.
func (c *cast) End(error) {
	if c.stop() {
		c.to.gone(c.topic)
	}
}

// stop ends the broadcast, and reports whether this call did. The flusher may be sending a last
// piece.
func (c *cast) stop() bool {
	c.mu.Lock()
	ended := c.over.Swap(true)
	if c.timer != nil {
		c.timer.Stop()
	}
	c.unseatLocked()
	if c.opts.presence {
		c.srv.board.Unlisten(c.topic, c)
	}
	c.mu.Unlock()
	if ended {
		return false
	}
	c.cancel()
	c.cursor.End()
	c.tail.Leave()
	return true
}

// fallBehind starts the goroutine that catches up, from behind a sequence.
func (c *cast) fallBehind(from uint64, snapshot bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over.Load() {
		return
	}
	c.behind.Add(1)
	c.to.call(func() {
		defer c.behind.Done()
		c.catchUp(from, snapshot)
	})
}

// flush sends what comes next. The flusher of the connection calls it.
func (c *cast) flush() error {
	if c.over.Load() {
		return nil
	}
	if c.presence.Load() != nil {
		if err := c.to.send(*c.presence.Swap(nil)); err != nil {
			return err
		}
	}
	if !c.ready || !c.live.Load() {
		return nil
	}
	if wait := time.Until(c.due); c.opts.interval > 0 && wait > 0 {
		c.rest(wait)
		return nil
	}
	var frames []byte
	var more, fits bool
	if c.opts.conflate {
		buf, _ := castBuffers.Get().(*[]byte) // nothing else is put there
		defer putCastBuffer(buf)
		*buf, more, fits = c.cursor.ReadNewest((*buf)[:0], castPiece)
		frames = *buf
	} else {
		frames, more, fits = c.cursor.Read(flushSize)
	}
	if !fits {
		return c.overrun()
	}
	if len(frames) > 0 {
		if err := c.to.send(frames); err != nil {
			return err
		}
		if c.opts.interval > 0 {
			c.due = time.Now().Add(c.opts.interval)
		}
	}
	if more {
		c.to.wake(c) // replies have their turn first
	}
	return nil
}

// castBuffers has buffers for conflated frames, which differ from socket to socket. A broadcast
// holds one only while it sends.
var castBuffers = sync.Pool{New: func() any { return new([]byte) }}

func putCastBuffer(buf *[]byte) {
	if cap(*buf) <= 2*castPiece {
		castBuffers.Put(buf)
	}
}

// rest has the flusher come back later.
func (c *cast) rest(wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over.Load() {
		return
	}
	if c.timer == nil {
		c.timer = time.AfterFunc(wait, c.Wake)
		return
	}
	c.timer.Reset(wait)
}

// overrun is for a socket that is so slow that the ring has dropped what comes next.
func (c *cast) overrun() error {
	c.srv.cfg.Observer.LimitReached("ring")
	switch c.opts.slow {
	case slowClose:
		c.to.shut(closeSlowConsumer)
		return nil
	case slowCatchUp:
		from := c.cursor.Last()
		c.ready = false // what is read from the stream goes out first
		c.live.Store(false)
		c.fallBehind(from, false)
		return nil
	}
	missed, from, to := c.cursor.Skip()
	err := c.to.send(c.gap(nil, from, to, missed))
	c.to.wake(c)
	return err
}

// gap frames a GAP.
func (c *cast) gap(dst []byte, from, to, missed uint64) []byte {
	counts := &c.srv.casting
	counts.gaps.Add(1)
	counts.missed.Add(missed)
	start := len(dst)
	dst = appendGap(textmsg.Begin(dst), c.topic, c.tail.Place().Made.UnixNano(), from, to, missed)
	return textmsg.End(append(dst, '}'), start)
}

// appendGap appends a GAP frame without its end.
func appendGap(dst []byte, topic string, made int64, from, to, missed uint64) []byte {
	dst = append(dst, `{"op":"GAP","topic":`...)
	dst = jsonscan.AppendString(dst, topic)
	dst = append(dst, `,"from":"`...)
	dst = appendPos(dst, made, from)
	dst = append(dst, `","to":"`...)
	dst = appendPos(dst, made, to)
	dst = append(dst, `","missed":`...)
	return strconv.AppendUint(dst, missed, 10)
}

// snapped frames a SNAPSHOT, which says that the snapshot has ended.
func (c *cast) snapped(upTo uint64) []byte {
	dst := append(textmsg.Begin(nil), `{"op":"SNAPSHOT","topic":`...)
	dst = jsonscan.AppendString(dst, c.topic)
	dst = append(dst, `,"pos":"`...)
	dst = appendPos(dst, c.tail.Place().Made.UnixNano(), upTo)
	return textmsg.End(append(dst, `"}`...), 0)
}

// catchUp queues stored events behind a sequence until the ring has the next one.
func (c *cast) catchUp(from uint64, snapshot bool) {
	srv := c.srv
	if !srv.exporting.Enter(c.ctx, c.client, math.MaxInt, func() { srv.cfg.Observer.LimitReached("exports") }) {
		return // the broadcast has ended
	}
	defer srv.exporting.Leave(c.client)
	var err error
	if snapshot {
		if from, err = c.sendSnapshot(); err == nil {
			if c.opts.ends {
				c.to.post(c.snapped(from))
			}
			start := c.near(castStart{from: from, pos: from}, c.cursor.Head())
			if from = start.from; start.gap {
				c.to.post(c.gap(nil, start.pos, start.from, start.missed))
			}
		}
	}
	for err == nil && !c.cursor.MoveTo(from) {
		from, err = c.sendStored(from)
	}
	switch {
	case c.ctx.Err() != nil:
	case err != nil:
		srv.often.Log(c.ctx, slog.LevelWarn, "failed to read stored events for a broadcast; the client is told", c.client,
			slog.String("topic", c.topic), slog.String("client", c.client), slog.Any("error", err))
		c.End(err)
	default:
		c.goLive()
	}
}

// castQueue queues frames for the writer, a piece at a time.
type castQueue struct {
	*cast
	frames []byte
	events int // in frames
}

// errCastOver says that the connection or the broadcast has ended.
var errCastOver = errors.New("facade: the broadcast has ended")

func (q *castQueue) add(e *jetstream.Event) error {
	q.srv.casting.caughtUp.Add(1)
	var err error
	if q.frames, err = q.srv.frameCast(q.ctx, q.frames, q.caster, q.topic, q.tail.Place(), e, nil); err != nil {
		return err
	}
	q.events++
	if len(q.frames) < castPiece {
		return nil
	}
	return q.flush()
}

func (q *castQueue) flush() error {
	if !q.to.waitBelow(2*castPiece) || q.over.Load() {
		return errCastOver
	}
	q.to.post(q.frames)
	if q.frames = q.frames[:0]; cap(q.frames) > 2*flushSize {
		q.frames = nil
	}
	return q.slow()
}

// slow waits until the principal may read on.
func (q *castQueue) slow() error {
	wait, back := q.srv.casting.reads.Reserve(q.client, q.events)
	if q.events = 0; wait <= 0 {
		return nil
	}
	q.srv.cfg.Observer.LimitReached("catch_up_rate")
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-q.ctx.Done():
		back()
		return errCastOver
	}
}

// sendSnapshot queues the newest event of each key, and returns the sequence up to which that is
// the state.
func (c *cast) sendSnapshot() (upTo uint64, err error) {
	q := castQueue{cast: c}
	c.snapping.Store(true)
	defer c.snapping.Store(false)
	upTo, err = c.srv.cfg.Bus.Keys(c.topic).Snapshot(c.ctx, func(e *jetstream.Event) error {
		if e.Tombstone {
			return nil
		}
		return q.add(e)
	})
	if err == nil {
		err = q.flush()
	}
	if err != nil {
		return 0, err
	}
	// The bucket may have what the Tail has not seen yet, or be of a stream before.
	if _, err := c.soon(c.ctx, upTo); err != nil {
		return 0, c.ctx.Err()
	}
	return upTo, nil
}

// sendStored queues the events of the stream behind a sequence, up to where the Tail is. It returns
// the sequence of the last event that was passed.
func (c *cast) sendStored(from uint64) (uint64, error) {
	head, at := c.cursor.Head(), c.tail.Place()
	begin := jetstream.FromEarliest
	if from > 0 {
		begin = jetstream.FromAfterID(at.Stream + "@" + strconv.FormatUint(from, 10))
	}
	r, err := c.srv.cfg.Bus.History(c.topic).Range(c.ctx, jetstream.ReadOptions{From: begin})
	if err != nil {
		return from, err
	}
	first, last := r.Bounds()
	if last <= from { // the leader does not have it yet
		select {
		case <-time.After(castPause):
			return from, nil
		case <-c.ctx.Done():
			return from, c.ctx.Err()
		}
	}
	q := castQueue{cast: c}
	if from == 0 { // it begins with the oldest event that is left
		from = first - 1
	}
	if r.Truncated && first > from+1 {
		missed := first - 1 - from
		if at.Family {
			missed = 0
		}
		q.frames = c.gap(q.frames, from, first-1, missed)
		from = first - 1
	}
	read := 0
	for e, err := range r.Events(c.ctx) {
		if errors.Is(err, jetstream.ErrDropped) {
			return from, q.flush() // the next range says what is missing
		}
		if err != nil {
			return from, err
		}
		if e.Sequence > head {
			last = head
			break
		}
		if err := q.add(e); err != nil {
			return from, err
		}
		from = e.Sequence
		read++
	}
	c.srv.cfg.Observer.EventsRead(read)
	return max(from, min(head, last)), q.flush()
}
