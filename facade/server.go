package facade

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"eventhub/facade/broadcast"
	"eventhub/facade/presence"
	"eventhub/jetstream/pacedlog"
	"eventhub/jetstream/quota"
)

// tickInterval is how often the server looks for connections whose time is over.
const tickInterval = 250 * time.Millisecond

// Server serves WebSocket and HTTP clients of one bus. Its methods may be called concurrently.
//
// Drain (finish) and Close (discard) end a Server. Both return when the connections have ended.
// Neither stops a listener or waits for HTTP requests: http.Server.Shutdown does that, and should
// be called after Drain.
type Server struct {
	cfg Config
	log *slog.Logger
	// often has the lines that clients or an outage can repeat.
	often *pacedlog.Log

	// ctx ends with Close.
	ctx    context.Context
	cancel context.CancelFunc
	// streaming ends when the server begins to drain or closes: answers that go on for long end.
	streaming    context.Context
	endStreaming context.CancelFunc

	// Rates and quotas; see Limits.
	frames, settles      pace
	byTopic, byPrincipal *quota.Set // publishes; nil without a limit
	posted               *quota.Set // bytes that principals post to the outbox; nil without a limit
	connections          headcount
	requesters           *share // HTTP requests being served
	holders              *holders
	joins                *quota.Places // SUBSCRIBEs that are being carried out
	settling             *quota.Set    // settlements over HTTP; nil without a limit
	streams, pulls       *share        // consumers over HTTP
	tails                *broadcast.Tails
	casting              castCounts
	board                *presence.Board
	unhear               func() // ends what other hubs tell the board
	bearers              *bearers
	headers              *headerNames // of HTTP requests, that become part of events

	// inbound is the memory of messages that are being received, over all connections and beyond
	// preAuthFrame each. Without it, clients that begin large messages and never end them would
	// fill the hub.
	inbound budget
	pages   *share // bytes of pages of latest records until the client has taken them
	guesses *guesses
	reading *quota.Places // pages that are being read
	// exporting are the replays and exports that are being read and sent.
	exporting *quota.Places

	// A test may shorten the constants of the same names.
	castPatience, pullCasts time.Duration

	started  time.Time     // token buckets count time from here
	name     string        // names this Server in the ids of its connections
	numbered atomic.Uint64 // connections so far
	ticks    atomic.Uint64 // a clock for the hot path, in tickInterval
	requests atomic.Int64  // HTTP requests being served

	unauthenticated *unauthenticated
	returns         returns

	// wg counts every goroutine of the server and its sessions.
	wg sync.WaitGroup

	mu       sync.Mutex
	draining bool
	closed   bool
	opening  int // connections being upgraded
	sessions map[*session]struct{}
	// consumers are members of groups over HTTP, whose leases may outlive their requests.
	consumers map[*consumer]struct{}
	idle      chan struct{} // closed when draining and no session and no consumer is left
}

// New makes a Server. The caller mounts WebSocket and HTTP on listeners of its own, and calls
// Close. It returns an error when cfg is invalid.
func New(cfg Config) (*Server, error) {
	cfg, err := cfg.validate()
	if err != nil {
		return nil, err
	}
	headers, err := newHeaderNames(cfg.Headers)
	if err != nil {
		return nil, fmt.Errorf("facade: Config.Headers: %w", err)
	}
	l := cfg.Limits
	s := &Server{
		headers: headers, cfg: cfg, log: cfg.Logger, often: pacedlog.New(cfg.Logger), started: time.Now(),
		frames: newPace(l.FrameRate, l.FrameBurst), settles: newPace(l.SettleRate, l.SettleBurst),
		connections: headcount{byKey: make(map[string]int)}, bearers: newBearers(l.Bearers), castPatience: castPatience, pullCasts: pullCasts,
		unauthenticated: newUnauthenticated(cfg.Limits.Unauthenticated),
		sessions:        make(map[*session]struct{}), consumers: make(map[*consumer]struct{}), idle: make(chan struct{}),
	}
	s.name = newServerName()
	s.inbound.max = int64(l.InboundBytes)
	s.pages = newShare(l.PageTotal, l.PrincipalPageTotal)
	s.reading = quota.NewPlaces(l.Pages, l.PrincipalPages)
	s.exporting = quota.NewPlaces(l.Exports, l.PrincipalExports)
	s.guesses = newGuesses(s)
	s.requesters = newShare(l.Requests, l.PrincipalRequests)
	s.joins = quota.NewPlaces(l.Joins, l.PrincipalJoins)
	s.streams, s.pulls = newShare(l.Streams, l.PrincipalStreams), newShare(l.Pulls, l.PrincipalPulls)
	s.settling = s.newQuota(l.SettleRate, l.SettleBurst)
	s.holders = newHolders(&l, cfg.Observer.LimitReached)
	s.byTopic, s.byPrincipal = s.newQuota(l.TopicRate, l.TopicBurst), s.newQuota(l.PrincipalRate, l.PrincipalBurst)
	s.posted = s.newQuota(l.OutboxRate, l.OutboxBurst)
	s.casting.reads = s.newQuota(l.CatchUpRate, l.CatchUpBurst)
	s.tails = broadcast.New(broadcast.Config{
		Source: castSource{cfg.Bus, s.often}, Frame: frameStored, Owes: cfg.Computing.Owes, Linger: castLinger, Tails: l.Tails, PrincipalTails: orAll(l.PrincipalTails, l.Tails),
		Versions: castVersions, PrincipalVersions: principalVersions,
		RingFrames: l.RingFrames, RingBytes: l.RingBytes, AllBytes: l.RingTotal,
	})
	if err := s.newBoard(); err != nil {
		s.tails.Close()
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.streaming, s.endStreaming = context.WithCancel(s.ctx)
	s.wg.Go(s.tick)
	return s, nil
}

// WebSocket returns the handler that upgrades requests on any path.
func (s *Server) WebSocket() http.Handler { return http.HandlerFunc(s.upgrade) }

// upgrade returns as soon as the session runs. net/http then releases what it holds for a request,
// and an idle connection keeps two small goroutines.
func (s *Server) upgrade(w http.ResponseWriter, r *http.Request) {
	if !s.cfg.originAllowed(r.Header.Get("Origin")) {
		s.refuse(w, &fault{code: codeForbidden, msg: "This origin may not connect."})
		return
	}
	if r.ContentLength != 0 {
		s.refuse(w, &fault{code: codeBadOptions, msg: "A request that opens a WebSocket has no body."})
		return
	}
	if fail := s.reserve(); fail != nil {
		s.refuse(w, fail)
		return
	}
	under := newWire(s.cfg.Limits.WriteStall)
	var n *session
	conn, err := websocket.Accept(&wireHijacker{ResponseWriter: w, wire: under}, r, &websocket.AcceptOptions{
		InsecureSkipVerify: true, // the origin was checked above
		CompressionMode:    websocket.CompressionDisabled,
		OnPingReceived: func(context.Context, []byte) bool { // by the session's reader
			n.part()
			return !under.crowded()
		},
		OnPongReceived: func(context.Context, []byte) { n.part() },
	})
	if err != nil {
		s.log.DebugContext(r.Context(), "failed to upgrade a connection", slog.Any("error", err))
		s.begin(nil) //nolint:contextcheck // starts no session
		return
	}
	conn.SetReadLimit(-1) // session.read applies its own limits
	n = s.newSession(conn, under, s.remoteOf(r))
	if !s.begin(n) { //nolint:contextcheck // a session outlives the request
		n.out.shut(closeDraining)
	}
}

// reserve counts a connection that is being upgraded, until begin.
func (s *Server) reserve() *fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.draining || s.closed:
		return &fault{code: codeOverloaded, msg: "The hub is shutting down."}
	case len(s.sessions)+s.opening >= s.cfg.Limits.Connections:
		s.cfg.Observer.LimitReached("connections")
		return &fault{code: codeOverloaded, msg: "The hub has reached its limit of connections."}
	}
	s.opening++
	s.wg.Add(1)
	return nil
}

// begin starts the session of a connection that reserve counted. A nil session means that the
// upgrade failed. begin returns false when the server has begun to drain or close since: the
// session is started all the same, and the caller must shut it.
func (s *Server) begin(n *session) bool {
	defer s.wg.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opening--
	if n == nil {
		s.endedLocked()
		return true
	}
	s.sessions[n] = struct{}{}
	s.cfg.Observer.ConnectionOpened()
	flushed := make(chan struct{})
	s.wg.Go(func() {
		defer close(flushed)
		n.end()
	})
	s.wg.Go(func() {
		n.run(flushed)
		s.unauthenticated.remove(n)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.sessions, n)
		s.endedLocked()
	})
	return !s.draining && !s.closed
}

func (s *Server) endedLocked() {
	if s.draining && len(s.sessions)+len(s.consumers)+s.opening == 0 {
		select {
		case <-s.idle:
		default:
			close(s.idle)
		}
	}
}

// tick is the server's one timer: connections have no timers of their own.
func (s *Server) tick() {
	t := time.NewTicker(tickInterval)
	defer t.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case now := <-t.C:
			s.ticks.Add(1)
			s.often.Sweep()
			s.mu.Lock()
			for n := range s.sessions {
				n.tick(now)
			}
			s.mu.Unlock()
		}
	}
}

// Drain ends the Server in order. It refuses new connections and requests, stops the delivery of
// events, waits for the publishes in flight, and gives clients Config.DrainGrace to settle the
// events that they hold. It then hands the rest back without counting a failed attempt, and closes
// every connection with the code "draining", upon which clients reconnect. Drain returns when all
// connections have ended, or ctx's error when ctx ended first; Close then ends the rest.
func (s *Server) Drain(ctx context.Context) error {
	s.mu.Lock()
	s.draining = true
	s.returns.begin(len(s.sessions)+len(s.consumers), s.cfg.Limits.ReturnRate)
	s.endStreaming()
	s.endedLocked()
	var wg sync.WaitGroup
	for n := range s.sessions {
		wg.Go(func() { n.drain(ctx, s.cfg.DrainGrace) })
	}
	for c := range s.consumers {
		wg.Go(func() { c.drain(ctx, s.cfg.DrainGrace) })
	}
	s.mu.Unlock()
	wg.Wait()
	select {
	case <-s.idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close ends every connection with the code "draining" and returns when all goroutines of the
// server have ended. Leases are given back without counting a failed attempt. Close may be called
// twice, and after Drain.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	if !s.draining { // Drain counted more of them
		s.returns.begin(len(s.sessions)+len(s.consumers), s.cfg.Limits.ReturnRate)
	}
	s.draining = true
	s.cancel()
	for n := range s.sessions {
		s.wg.Go(n.discard)
	}
	for c := range s.consumers {
		s.wg.Go(func() { c.drain(s.ctx, 0) }) // s.ctx has ended: leases are not waited for
	}
	s.mu.Unlock()
	s.wg.Wait()
	s.tails.Close()
	s.unhear()
	s.board.Close()
	s.often.End()
	return nil
}

// refuse answers an HTTP request with an error.
func (s *Server) refuse(w http.ResponseWriter, f *fault) {
	s.cfg.Observer.ErrorSent(string(f.code))
	writeFault(w, f)
}
