// Package broadcast hands every event of a topic to many sockets. A Tails has one Tail for each
// topic that sockets follow. The Tail reads the topic once, frames each event once, and keeps the
// newest frames in a ring. A socket has a Cursor into the ring, and takes frames from there as fast
// as it can send them: memory depends on the rings, not on the sockets.
//
// Tails decides nothing about clients: rights, options and what a slow socket gets are the
// caller's.
package broadcast

import (
	"context"
	"errors"
	"sync"
	"time"

	"eventhub/jetstream"
)

// Source reads topics. jetstream.History has these methods, except for its topic.
type Source interface {
	// Place is where a topic is. It creates a topic that does not exist, for a client.
	Place(ctx context.Context, topic, client string) (jetstream.Place, error)
	// Follow calls f with the events of a topic behind a place until ctx ends or f returns an
	// error. f(nil) comes when f has received what was there at first.
	Follow(ctx context.Context, topic string, after jetstream.Place, f func(*jetstream.Event) error) error
}

// Frame appends an event to dst as sockets get it. Its error ends the Tail.
type Frame func(dst []byte, topic string, at jetstream.Place, e *jetstream.Event) ([]byte, error)

// Form is how sockets get the events of a topic. The zero value is as they are stored.
type Form struct {
	// Version tells forms of a topic apart.
	Version int
	// Frame is used for a Version other than 0, instead of Config.Frame. ctx ends with the Tail.
	// payer chooses the client of those who listen that owes the least (Config.Owes), but for one.
	Frame func(ctx context.Context, dst []byte, topic string, at jetstream.Place, e *jetstream.Event, payer func(not string) string) ([]byte, error)
}

// Config configures a Tails. All fields are required.
type Config struct {
	Source Source
	// Frame appends an event to dst as all sockets get it.
	Frame Frame
	// Owes is how long a client has to wait until something may be computed for it.
	Owes func(client string) time.Duration
	// Linger is how long a Tail is kept after its last Cursor has ended.
	Linger time.Duration
	// Tails is the most topics that are followed, and PrincipalTails the most that one client is
	// the first to follow.
	Tails, PrincipalTails int
	// Versions is the most versions in which one topic is followed, besides as it is stored, and
	// PrincipalVersions the most that one client is the first to follow.
	Versions, PrincipalVersions int
	// RingFrames and RingBytes bound the frames of one topic, and AllBytes the bytes of all rings
	// with their lists of frames. A ring always holds the newest frame.
	RingFrames, RingBytes, AllBytes int
}

// Errors of Tails.Join.
var (
	// ErrTails says that the hub follows Config.Tails topics.
	ErrTails = errors.New("broadcast: too many topics are followed")
	// ErrPrincipalTails says that the client follows Config.PrincipalTails topics alone.
	ErrPrincipalTails = errors.New("broadcast: this client follows too many topics")
	// ErrVersions says that the topic is followed in Config.Versions versions.
	ErrVersions = errors.New("broadcast: the topic is followed in too many versions")
	// ErrPrincipalVersions says that the client follows the topic in Config.PrincipalVersions
	// versions alone.
	ErrPrincipalVersions = errors.New("broadcast: this client follows the topic in too many versions")
	// ErrClosed says that the Tails is closed.
	ErrClosed = errors.New("broadcast: closed")
)

// Listener is a socket. Its methods are called by the goroutines of a Tail: they must not block,
// and must not call the Cursor.
type Listener interface {
	// Client names whose socket it is.
	Client() string
	// Wake says that the Cursor has something to read.
	Wake()
	// End says that nothing follows, because the topic is gone or cannot be read. It is called at
	// most once.
	End(err error)
}

// Tails follows topics. Its methods may be called concurrently.
type Tails struct {
	cfg    Config
	memory memory
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	tails   map[tailName]*Tail
	byFirst map[string]int // tails by the client that came first
}

// tailName names a Tail.
type tailName struct {
	topic   string
	version int
}

// New makes a Tails. The caller calls Close.
func New(cfg Config) *Tails {
	t := &Tails{cfg: cfg, tails: make(map[tailName]*Tail), byFirst: make(map[string]int)}
	t.memory.left = cfg.AllBytes
	t.ctx, t.cancel = context.WithCancel(context.Background())
	return t
}

// Close ends all Tails and waits for their goroutines. It may be called again.
func (t *Tails) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.cancel()
	t.wg.Wait()
}

// start runs f in a goroutine that Close waits for, unless t is closed.
func (t *Tails) start(f func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.wg.Go(f)
	return true
}

// Join returns the Tail of a topic in a form once it follows the topic, for a client. Tails of the
// same topic and version are one, with the Frame of the first. The caller calls Leave of the Tail.
func (t *Tails) Join(ctx context.Context, topic, client string, form Form) (*Tail, error) {
	for {
		tail, err := t.enter(topic, client, form)
		if err != nil {
			return nil, err
		}
		select {
		case <-tail.ready:
		case <-ctx.Done():
			tail.Leave()
			return nil, ctx.Err()
		}
		if tail.failed == nil {
			return tail, nil
		}
		tail.Leave()
		if !errors.Is(tail.failed, errOver) {
			return nil, tail.failed
		}
	}
}

// errOver says that a Tail ended between two looks.
var errOver = errors.New("broadcast: the tail has ended")

func (t *Tails) enter(topic, client string, form Form) (*Tail, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, ErrClosed
	}
	name := tailName{topic, form.Version}
	if tail := t.tails[name]; tail != nil {
		tail.users++
		if tail.idle != nil {
			tail.idle.Stop()
			tail.idle = nil
		}
		return tail, nil
	}
	mine := func(o *Tail) bool { return o.client == client }
	switch {
	case len(t.tails) >= t.cfg.Tails && !t.dropIdleLocked(func(*Tail) bool { return true }):
		return nil, ErrTails
	case t.byFirst[client] >= t.cfg.PrincipalTails && !t.dropIdleLocked(mine):
		return nil, ErrPrincipalTails
	}
	if form.Version != 0 {
		cast := func(o *Tail) bool { return o.topic == topic && o.version != 0 }
		castForMe := func(o *Tail) bool { return cast(o) && mine(o) }
		switch {
		case t.countLocked(cast) >= t.cfg.Versions && !t.dropIdleLocked(cast):
			return nil, ErrVersions
		case t.countLocked(castForMe) >= t.cfg.PrincipalVersions && !t.dropIdleLocked(castForMe):
			return nil, ErrPrincipalVersions
		}
	}
	tail := &Tail{
		all: t, tailName: name, frame: t.cfg.Frame, client: client, users: 1, ready: make(chan struct{}), news: make(chan struct{}, 1),
	}
	if form.Version != 0 {
		tail.frame = func(dst []byte, topic string, at jetstream.Place, e *jetstream.Event) ([]byte, error) {
			return form.Frame(tail.ctx, dst, topic, at, e, tail.payer)
		}
	}
	tail.ctx, tail.cancel = context.WithCancel(t.ctx)
	t.tails[name] = tail
	t.byFirst[client]++
	t.wg.Go(tail.run)
	return tail, nil
}

// countLocked returns how many Tails are of a kind.
func (t *Tails) countLocked(kind func(*Tail) bool) (n int) {
	for _, tail := range t.tails {
		if kind(tail) {
			n++
		}
	}
	return n
}

// dropIdleLocked makes room by ending a Tail of a kind that has no Cursor.
func (t *Tails) dropIdleLocked(kind func(*Tail) bool) bool {
	for _, tail := range t.tails {
		if tail.users == 0 && kind(tail) {
			t.removeLocked(tail)
			return true
		}
	}
	return false
}

// removeLocked ends a Tail.
func (t *Tails) removeLocked(tail *Tail) {
	if t.tails[tail.tailName] != tail {
		return
	}
	delete(t.tails, tail.tailName)
	if t.byFirst[tail.client]--; t.byFirst[tail.client] == 0 {
		delete(t.byFirst, tail.client)
	}
	if tail.idle != nil {
		tail.idle.Stop()
	}
	tail.cancel()
}

// Figures are the state of a Tails.
type Figures struct {
	Topics, Cursors int // a topic counts once for each form
	Bytes           int // of all rings
}

// Figures returns the present state.
func (t *Tails) Figures() Figures {
	t.mu.Lock()
	defer t.mu.Unlock()
	f := Figures{Topics: len(t.tails)}
	for _, tail := range t.tails {
		tail.mu.Lock()
		f.Cursors += len(tail.cursors)
		tail.mu.Unlock()
	}
	t.memory.mu.Lock()
	f.Bytes = t.cfg.AllBytes - t.memory.left
	t.memory.mu.Unlock()
	return f
}
