package conn

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

// PublishWait is how long a publish waits for the stream's ack. After it the outcome is unknown.
const PublishWait = 10 * time.Second

// dialWait is how long a connection to NATS may take.
const dialWait = 5 * time.Second

// Link is one NATS connection of the pool, with one reply inbox for everything that is asked over
// it.
type Link struct {
	Pool  *Pool
	Index int
	NC    *nats.Conn
	inbox string // prefix of the reply subjects

	idMu sync.Mutex
	ids  *rand.ChaCha8 // random bits of the ids made for publishes over this link

	mu    sync.Mutex
	asked questions
	down  bool
	Up    atomic.Bool

	Cluster atomic.Bool // the server is one of several

	Echo Probe         // of the connection itself
	mute bool          // the server lets this user publish nothing to itself, so echo is not asked
	Cuts atomic.Uint64 // how often the connection was lost
}

// echoSubject asks for a message of the hub to itself: the question is its own answer. What the
// server sent over the connection before that answer came before it.
const echoSubject = ""

// echoWait is how long a new connection may take to answer the first echo.
const echoWait = 2 * time.Second

// Hooks are called for what stands above the links: the first four when a connection breaks and
// comes back, in this order.
type Hooks struct {
	Cut       func(l *Link)            // the connection broke; what was asked is not answered yet
	Lost      func(l *Link)            // what was asked has got ErrCut; not while the bus closes
	Returning func(l *Link, now int64) // the connection is back, and the link is not up yet
	Back      func(l *Link)            // the link is up
	Heard     func(l *Link)            // the server has answered a probe
	// this hub has tried to change a stream, or the consumer if that is not ""
	Changed func(stream, consumer string)
}

// Asker waits for a reply. answer is called once: with the reply, or with why none will come. It
// must not block.
type Asker interface {
	Answer(m *nats.Msg, err error)
}

// AskerFunc is an asker that is a function.
type AskerFunc func(m *nats.Msg, err error)

// Answer calls f.
func (f AskerFunc) Answer(m *nats.Msg, err error) { f(m, err) }

var (
	// ErrNoReply is returned for a question that waited for too long. Its outcome is unknown.
	ErrNoReply = errors.New("no reply in time")
	// ErrCut is returned for a question whose connection broke. Its outcome is unknown.
	ErrCut = errors.New("the connection to NATS was lost")
)

func (p *Pool) dial(index int) (*Link, error) {
	l := &Link{Pool: p, Index: index, inbox: nats.NewInbox() + "."}
	var seed [32]byte
	if _, err := crand.Read(seed[:]); err != nil {
		return nil, err
	}
	l.ids = rand.NewChaCha8(seed)
	nc, err := p.Connection("eventhub "+strconv.Itoa(index),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) { l.lost(err) }),
		nats.ReconnectHandler(func(*nats.Conn) { l.back() }),
	)
	if err != nil {
		return nil, err
	}
	l.NC = nc
	replies, err := l.NC.Subscribe(l.inbox+"*", l.reply)
	if err != nil {
		l.NC.Close()
		return nil, err
	}
	// what is asked is bounded, so the replies are
	if err := replies.SetPendingLimits(-1, -1); err != nil {
		l.NC.Close()
		return nil, err
	}
	l.Up.Store(true)
	l.Cluster.Store(l.NC.ConnectedClusterName() != "")
	ctx, cancel := context.WithTimeout(p.Ctx, echoWait)
	defer cancel()
	if _, err := l.Request(ctx, echoSubject, nil); err != nil {
		l.mute = true
		p.log.Warn("no echo over a NATS connection: is this user allowed to publish to _INBOX.>? a frozen server is noticed late",
			slog.Int("connection", index), slog.Any("error", err))
	}
	l.Echo.Reset(p.Clock.Now())
	return l, nil
}

// NewID makes a UUIDv7. Its random bits come from a generator of the link's own, seeded by the
// system: asking the system for each costs as much as the rest of a publish.
func (l *Link) NewID() (string, error) {
	l.idMu.Lock()
	defer l.idMu.Unlock()
	u, err := uuid.NewV7FromReader(l.ids)
	return u.String(), err
}

// NewIDAt makes a UUIDv7 that says that it was made at a given time. A search for the id of a
// delayed event then finds the event where it is stored.
func (l *Link) NewIDAt(at time.Time) (string, error) {
	l.idMu.Lock()
	defer l.idMu.Unlock()
	u, err := uuid.NewV7FromReader(l.ids)
	var ms [8]byte
	binary.BigEndian.PutUint64(ms[:], uint64(at.UnixMilli()))
	copy(u[:6], ms[2:])
	return u.String(), err
}

// Ask sends a message whose reply goes to who, unless Ask returns an error. It waits for
// PublishWait. m is not kept.
func (l *Link) Ask(m *nats.Msg, now int64, who Asker) error {
	return l.AskUntil(m, now+int64(PublishWait), who)
}

// AskUntil is Ask with a deadline, which is noticed within a second.
func (l *Link) AskUntil(m *nats.Msg, deadline int64, who Asker) error {
	l.mu.Lock()
	if l.down {
		l.mu.Unlock()
		return ErrCut
	}
	n := l.asked.add(who, deadline)
	l.mu.Unlock()
	var buf [64]byte
	m.Reply = string(strconv.AppendUint(append(buf[:0], l.inbox...), n, 36))
	if m.Subject == echoSubject {
		m.Subject = m.Reply
	}
	if err := l.NC.PublishMsg(m); err != nil {
		if l.take(n) != nil {
			return err
		}
		return nil // lost answered it already
	}
	return nil
}

func (l *Link) take(n uint64) Asker {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked.take(n)
}

func (l *Link) reply(m *nats.Msg) {
	n, err := strconv.ParseUint(m.Subject[len(l.inbox):], 36, 64)
	if err != nil {
		return
	}
	if who := l.take(n); who != nil {
		if code := errorCode(m); code != 0 {
			l.Pool.obs.JetStreamError(code)
		}
		who.Answer(m, nil)
	}
}

// Request is Ask for callers that can wait.
func (l *Link) Request(ctx context.Context, subject string, data []byte) (*nats.Msg, error) {
	return l.RequestMsg(ctx, &nats.Msg{Subject: subject, Data: data})
}

// RequestMsg is Request for a message with a header.
func (l *Link) RequestMsg(ctx context.Context, m *nats.Msg) (*nats.Msg, error) {
	type result struct {
		m   *nats.Msg
		err error
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	ch := make(chan result, 1)
	who := AskerFunc(func(m *nats.Msg, err error) { ch <- result{m, err} })
	if err := l.Ask(m, l.Pool.Clock.Now(), who); err != nil {
		return nil, err
	}
	select {
	case r := <-ch:
		return r.m, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Sweep answers the questions that wait too long.
func (l *Link) Sweep(now int64) {
	l.mu.Lock()
	late := l.asked.takeUntil(now)
	l.mu.Unlock()
	for _, who := range late {
		l.Pool.obs.JetStreamError(event.NoReply)
		who.Answer(nil, ErrNoReply)
	}
}

// drain waits until everything that was asked is answered, while that can still happen.
func (l *Link) drain(ctx context.Context) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for l.Up.Load() {
		l.mu.Lock()
		left := l.asked.waiting()
		l.mu.Unlock()
		if left == 0 {
			_ = l.NC.FlushWithContext(ctx) // acks have no answer
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
func (l *Link) lost(err error) {
	l.Up.Store(false)
	l.Cuts.Add(1)
	l.Pool.Hooks.Cut(l)
	l.mu.Lock()
	l.down = true
	asked := l.asked.takeUntil(math.MaxInt64)
	l.mu.Unlock()
	for _, who := range asked {
		who.Answer(nil, ErrCut)
	}
	if l.Pool.Closing() {
		return
	}
	l.Pool.obs.Gauge(event.GaugeConnected, 0)
	l.Pool.log.Warn("connection to NATS lost", slog.Int("connection", l.Index), slog.Any("error", err))
	l.Pool.Hooks.Lost(l)
}

// back is called when the connection is there again.
func (l *Link) back() {
	l.mu.Lock()
	l.down = false
	l.mu.Unlock()
	l.Cluster.Store(l.NC.ConnectedClusterName() != "")
	now := l.Pool.Clock.Now()
	l.Echo.Reset(now)
	l.Pool.Hooks.Returning(l, now)
	l.Up.Store(true)
	if l.Pool.Connected() {
		l.Pool.obs.Gauge(event.GaugeConnected, 1)
	}
	l.Pool.log.Info("connection to NATS is back", slog.Int("connection", l.Index))
	l.Pool.Hooks.Back(l)
}

// NoResponders reports the server's answer to a request that nobody listens for.
func NoResponders(m *nats.Msg) bool {
	return len(m.Data) == 0 && m.Header.Get("Status") == "503"
}

// Clustered reports whether the server that the link is connected to is one of several.
func (l *Link) Clustered() bool { return l.Cluster.Load() }
