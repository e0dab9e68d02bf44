package jetstream

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
)

// publishWait is how long a publish waits for the stream's ack. After it the outcome is unknown.
const publishWait = 10 * time.Second

// dialWait is how long a connection to NATS may take.
const dialWait = 5 * time.Second

// link is one NATS connection of the pool, with one reply inbox for everything that is asked over
// it.
type link struct {
	pool  *pool
	index int
	nc    *nats.Conn
	inbox string // prefix of the reply subjects

	idMu sync.Mutex
	ids  *rand.ChaCha8 // random bits of the ids made for publishes over this link

	mu    sync.Mutex
	asked questions
	down  bool
	up    atomic.Bool

	cluster atomic.Bool // the server is one of several

	echo probe         // of the connection itself
	mute bool          // the server lets this user publish nothing to itself, so echo is not asked
	cuts atomic.Uint64 // how often the connection was lost
}

// echoSubject asks for a message of the hub to itself: the question is its own answer. What the
// server sent over the connection before that answer came before it.
const echoSubject = ""

// echoWait is how long a new connection may take to answer the first echo.
const echoWait = 2 * time.Second

// linkHooks are called for what stands above the links: the first four when a connection breaks and
// comes back, in this order.
type linkHooks struct {
	cut       func(l *link)            // the connection broke; what was asked is not answered yet
	lost      func(l *link)            // what was asked has got errCut; not while the bus closes
	returning func(l *link, now int64) // the connection is back, and the link is not up yet
	back      func(l *link)            // the link is up
	heard     func(l *link)            // the server has answered a probe
	// this hub has tried to change a stream, or the consumer if that is not ""
	changed func(stream, consumer string)
}

// asker waits for a reply. answer is called once: with the reply, or with why none will come. It
// must not block.
type asker interface {
	Answer(m *nats.Msg, err error)
}

// askerFunc is an asker that is a function.
type askerFunc func(m *nats.Msg, err error)

func (f askerFunc) Answer(m *nats.Msg, err error) { f(m, err) }

var (
	errNoReply = errors.New("no reply in time")
	errCut     = errors.New("the connection to NATS was lost")
)

func (p *pool) dial(index int) (*link, error) {
	l := &link{pool: p, index: index, inbox: nats.NewInbox() + "."}
	var seed [32]byte
	if _, err := crand.Read(seed[:]); err != nil {
		return nil, err
	}
	l.ids = rand.NewChaCha8(seed)
	nc, err := p.connection("eventhub "+strconv.Itoa(index),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { l.lost(err) }),
		nats.ReconnectHandler(func(*nats.Conn) { l.back() }),
	)
	if err != nil {
		return nil, err
	}
	l.nc = nc
	replies, err := l.nc.Subscribe(l.inbox+"*", l.reply)
	if err != nil {
		l.nc.Close()
		return nil, err
	}
	// what is asked is bounded, so the replies are
	if err := replies.SetPendingLimits(-1, -1); err != nil {
		l.nc.Close()
		return nil, err
	}
	l.up.Store(true)
	l.cluster.Store(l.nc.ConnectedClusterName() != "")
	ctx, cancel := context.WithTimeout(p.ctx, echoWait)
	defer cancel()
	if _, err := l.request(ctx, echoSubject, nil); err != nil {
		l.mute = true
		p.log.Warn("no echo over a NATS connection: is this user allowed to publish to _INBOX.>? a frozen server is noticed late",
			slog.Int("connection", index), slog.Any("error", err))
	}
	l.echo.reset(p.clock.now())
	return l, nil
}

// newID makes a UUIDv7. Its random bits come from a generator of the link's own, seeded by the
// system: asking the system for each costs as much as the rest of a publish.
func (l *link) newID() (string, error) {
	l.idMu.Lock()
	defer l.idMu.Unlock()
	u, err := uuid.NewV7FromReader(l.ids)
	return u.String(), err
}

// newIDAt makes a UUIDv7 that says that it was made at a given time. A search for the id of a
// delayed event then finds the event where it is stored.
func (l *link) newIDAt(at time.Time) (string, error) {
	l.idMu.Lock()
	defer l.idMu.Unlock()
	u, err := uuid.NewV7FromReader(l.ids)
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(at.UnixMilli()))
	copy(u[:6], ms[2:])
	return u.String(), err
}

// ask sends a message whose reply goes to who, unless ask returns an error. It waits for
// publishWait. m is not kept.
func (l *link) ask(m *nats.Msg, now int64, who asker) error {
	return l.askUntil(m, now+int64(publishWait), who)
}

// askUntil is ask with a deadline, which is noticed within a second.
func (l *link) askUntil(m *nats.Msg, deadline int64, who asker) error {
	l.mu.Lock()
	if l.down {
		l.mu.Unlock()
		return errCut
	}
	n := l.asked.add(who, deadline)
	l.mu.Unlock()
	var buf [64]byte
	m.Reply = string(strconv.AppendUint(append(buf[:0], l.inbox...), n, 36))
	if m.Subject == echoSubject {
		m.Subject = m.Reply
	}
	if err := l.nc.PublishMsg(m); err != nil {
		if l.take(n) != nil {
			return err
		}
		return nil // lost answered it already
	}
	return nil
}

func (l *link) take(n uint64) asker {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked.take(n)
}

func (l *link) reply(m *nats.Msg) {
	n, err := strconv.ParseUint(m.Subject[len(l.inbox):], 36, 64)
	if err != nil {
		return
	}
	if who := l.take(n); who != nil {
		if code := errorCode(m); code != 0 {
			l.pool.obs.JetStreamError(code)
		}
		who.Answer(m, nil)
	}
}

// request is ask for callers that can wait.
func (l *link) request(ctx context.Context, subject string, data []byte) (*nats.Msg, error) {
	return l.requestMsg(ctx, &nats.Msg{Subject: subject, Data: data})
}

func (l *link) requestMsg(ctx context.Context, m *nats.Msg) (*nats.Msg, error) {
	type result struct {
		m   *nats.Msg
		err error
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ch := make(chan result, 1)
	who := askerFunc(func(m *nats.Msg, err error) { ch <- result{m, err} })
	if err := l.ask(m, l.pool.clock.now(), who); err != nil {
		return nil, err
	}
	select {
	case r := <-ch:
		return r.m, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// sweep answers the questions that wait too long.
func (l *link) sweep(now int64) {
	l.mu.Lock()
	late := l.asked.takeUntil(now)
	l.mu.Unlock()
	for _, who := range late {
		l.pool.obs.JetStreamError(event.NoReply)
		who.Answer(nil, errNoReply)
	}
}

// drain waits until everything that was asked is answered, while that can still happen.
func (l *link) drain(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for l.up.Load() {
		l.mu.Lock()
		left := l.asked.waiting()
		l.mu.Unlock()
		if left == 0 {
			_ = l.nc.FlushWithContext(ctx) // acks have no answer
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// lost is called when the connection breaks: what was asked will not be answered, and what was
// leased over it may be given to others from now on.
func (l *link) lost(err error) {
	l.up.Store(false)
	l.cuts.Add(1)
	l.pool.hooks.cut(l)
	l.mu.Lock()
	l.down = true
	asked := l.asked.takeUntil(math.MaxInt64)
	l.mu.Unlock()
	for _, who := range asked {
		who.Answer(nil, errCut)
	}
	if l.pool.closing() {
		return
	}
	l.pool.obs.Gauge(event.GaugeConnected, 0)
	l.pool.log.Warn("connection to NATS lost", slog.Int("connection", l.index), slog.Any("error", err))
	l.pool.hooks.lost(l)
}

// back is called when the connection is there again.
func (l *link) back() {
	l.mu.Lock()
	l.down = false
	l.mu.Unlock()
	l.cluster.Store(l.nc.ConnectedClusterName() != "")
	now := l.pool.clock.now()
	l.echo.reset(now)
	l.pool.hooks.returning(l, now)
	l.up.Store(true)
	if l.pool.connected() {
		l.pool.obs.Gauge(event.GaugeConnected, 1)
	}
	l.pool.log.Info("connection to NATS is back", slog.Int("connection", l.index))
	l.pool.hooks.back(l)
}

// noResponders reports the server's answer to a request that nobody listens for.
func noResponders(m *nats.Msg) bool {
	return len(m.Data) == 0 && m.Header.Get("Status") == "503"
}

// clustered reports whether the server that the link is connected to is one of several.
func (l *link) clustered() bool { return l.cluster.Load() }
