package main

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"eventhub/ops"
	"eventhub/outbox"
)

const (
	// outboxGreet is how long the start of a hub waits until its outbox is open.
	outboxGreet = 2 * time.Second
	// outboxSay is how often the log repeats that an outbox cannot be used.
	outboxSay = time.Minute
)

// outboxState is whether an outbox can be used, as its last use of each kind has shown: claims may fail while all else works.
type outboxState struct {
	log     *slog.Logger
	metric  *ops.Outbox
	waiting atomic.Bool

	mu     sync.Mutex
	failed map[string]bool // by the kind of use
	said   time.Time       // when the log last said that it cannot be used
}

func (h *hub) newOutboxState(name string) *outboxState {
	return &outboxState{log: h.log.With(slog.String("outbox", name)), metric: h.metrics.Outbox(name), failed: make(map[string]bool)}
}

// note takes the outcome of a use of the outbox, of a kind.
func (s *outboxState) note(ctx context.Context, use string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.failed[use] = true
	} else {
		delete(s.failed, use)
	}
	waits := len(s.failed) > 0
	was := s.waiting.Swap(waits)
	s.metric.Waiting(waits)
	switch {
	case !waits && was:
		s.log.LogAttrs(ctx, slog.LevelInfo, "the database of the outbox can be used")
	case err != nil && (!was || time.Since(s.said) >= outboxSay):
		s.said = time.Now()
		s.log.LogAttrs(ctx, slog.LevelWarn, "the database of the outbox cannot be used, so its records wait; retrying", slog.Any("error", err))
	}
}

// String is what the readiness probe shows.
func (s *outboxState) String() string {
	if s.waiting.Load() {
		return "waiting for its database"
	}
	return ops.PartOK
}

// watchedStore tells of what a drainer does all the time whether the store can be used: while it cannot settle, it does not
// claim.
type watchedStore struct {
	outbox.Store

	state *outboxState
}

// Claim implements outbox.Store.
func (s watchedStore) Claim(ctx context.Context, opts outbox.ClaimOptions) (outbox.Claim, error) {
	c, err := s.Store.Claim(ctx, opts)
	s.note(ctx, "claim", err)
	return c, err
}

// Settle implements outbox.Store.
func (s watchedStore) Settle(ctx context.Context, worker string, st outbox.Settlement) error {
	err := s.Store.Settle(ctx, worker, st)
	s.note(ctx, "settle", err)
	return err
}

// RequeueExpired implements outbox.Store. Drainers call it also while NATS is away.
func (s watchedStore) RequeueExpired(ctx context.Context) (int, error) {
	n, err := s.Store.RequeueExpired(ctx)
	s.note(ctx, "requeue", err)
	return n, err
}

func (s watchedStore) note(ctx context.Context, use string, err error) {
	if !errors.Is(ctx.Err(), context.Canceled) { // the end of the drainer says nothing of the store
		s.state.note(ctx, use, err)
	}
}

// databaseOutbox is the outbox of OUTBOX_DSN. It is opened, and drained from then on, as soon as its database can be used: the
// rest of the hub does not depend on it.
type databaseOutbox struct {
	hub   *hub
	dsn   outboxDSN
	state *outboxState

	cancel context.CancelFunc // ends the tries to open it
	tries  sync.WaitGroup
	box    *drainedOutbox // nil until it is open; read it when tries has ended
}

func newDatabaseOutbox(h *hub, dsn outboxDSN) *databaseOutbox {
	d := &databaseOutbox{hub: h, dsn: dsn, state: h.newOutboxState(outboxOfDSN)}
	d.state.waiting.Store(true)
	d.state.metric.Waiting(true)
	return d
}

// start begins to open the outbox, and waits a moment until it is open. It returns an error when no other try can do better.
func (d *databaseOutbox) start(ctx context.Context) error {
	trying, cancel := context.WithCancel(context.WithoutCancel(ctx)) // close ends it
	d.cancel = cancel
	tried, late := make(chan error), make(chan struct{})
	defer close(late)
	d.tries.Go(func() {
		err := d.open(trying)
		if err != nil && !d.dsn.mayCome(err) {
			select {
			case tried <- err:
				return
			case <-late: // the hub serves by now
			}
		}
		d.state.note(trying, "open", err)
		close(tried)
		if err != nil {
			d.openLater(trying)
		}
	})
	select {
	case err := <-tried:
		return err
	case <-time.After(outboxGreet):
		d.state.log.LogAttrs(ctx, slog.LevelWarn, "the database of the outbox does not answer; the hub starts without it")
		return nil
	case <-ctx.Done():
		return nil // close comes next
	}
}

// openLater tries to open the outbox until it is open or ctx ends.
func (d *databaseOutbox) openLater(ctx context.Context) {
	for wait := backoffFirst; ; wait = min(2*wait, backoffMax) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)): //nolint:gosec // no secret
		}
		err := d.open(ctx)
		if ctx.Err() != nil && err != nil {
			return
		}
		d.state.note(ctx, "open", err)
		if err == nil {
			return
		}
	}
}

// open opens the outbox, makes its table as it should be, and starts to drain it.
func (d *databaseOutbox) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, outboxTry)
	defer cancel()
	flags := d.hub.cmd.outboxServeFlags
	o, err := d.dsn.open(ctx, outboxOptions{table: flags.Table, bus: d.hub.bus, make: flags.Migrate})
	if err != nil {
		return err
	}
	if err := d.hub.prepareOutbox(ctx, o); err != nil {
		return errors.Join(err, o.close())
	}
	d.box, err = d.hub.drain(ctx, o, d.state, 0, outboxObserver{d.state.metric})
	return err
}

// close ends it. Nothing is published any more.
func (d *databaseOutbox) close(ctx context.Context) error {
	d.cancel()
	d.tries.Wait()
	if d.box == nil {
		return nil
	}
	return d.box.close(ctx, d.hub.log)
}

// mayCome says whether an outbox that could not be opened may be opened later, with the configuration as it is. What is reached
// over a network may: whatever it has answered, somebody else can put that right. A file is as it is, unless others use it right
// now or its disk is full.
func (p outboxDSN) mayCome(err error) bool {
	if p.path == "" || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return false
	}
	switch e.Code() & 0xff { // the rest tells them apart further
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR:
		return true
	default:
		return false
	}
}
