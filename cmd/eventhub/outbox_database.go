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
	// outboxGreet is how long the start of a hub waits for its outbox to open.
	outboxGreet = 2 * time.Second
	// outboxSay is the interval between log lines about an unavailable outbox.
	outboxSay = time.Minute
)

// outboxState tracks whether an outbox is available. It keeps the last result of each kind of use,
// because claims may fail while other uses succeed.
type outboxState struct {
	log     *slog.Logger
	metric  *ops.Outbox
	waiting atomic.Bool

	mu     sync.Mutex
	failed map[string]bool // keyed by kind of use
	said   time.Time       // time of the last log line about the failure
}

func (h *hub) newOutboxState(name string) *outboxState {
	return &outboxState{log: h.log.With(slog.String("outbox", name)), metric: h.metrics.Outbox(name), failed: make(map[string]bool)}
}

// note records the result of one kind of use.
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
		s.log.LogAttrs(ctx, slog.LevelInfo, "outbox database is available")
	case err != nil && (!was || time.Since(s.said) >= outboxSay):
		s.said = time.Now()
		s.log.LogAttrs(ctx, slog.LevelWarn, "outbox database is unavailable; retrying", slog.Any("error", err))
	}
}

// String returns the state as the readiness probe shows it.
func (s *outboxState) String() string {
	if s.waiting.Load() {
		return "waiting for its database"
	}
	return ops.PartOK
}

// watchedStore reports the results of a drainer's regular store calls to state. It watches several
// calls, because a drainer that fails to settle stops claiming.
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
func (s watchedStore) Settle(ctx context.Context, worker string, st outbox.Settlement) (outbox.Unsettled, error) {
	left, err := s.Store.Settle(ctx, worker, st)
	s.note(ctx, "settle", err)
	return left, err
}

// RequeueExpired implements outbox.Store. Drainers call it even while NATS is unavailable.
func (s watchedStore) RequeueExpired(ctx context.Context) (int, error) {
	n, err := s.Store.RequeueExpired(ctx)
	s.note(ctx, "requeue", err)
	return n, err
}

func (s watchedStore) note(ctx context.Context, use string, err error) {
	if !errors.Is(ctx.Err(), context.Canceled) { // a stopping drainer says nothing about the store
		s.state.note(ctx, use, err)
	}
}

// databaseOutbox is the outbox of OUTBOX_DSN. It is opened and drained as soon as its database is
// available. The rest of the hub does not depend on it.
type databaseOutbox struct {
	hub   *hub
	dsn   outboxDSN
	state *outboxState

	cancel context.CancelFunc // ends the attempts to open the outbox
	tries  sync.WaitGroup
	box    *drainedOutbox               // nil until opened; read only after tries has ended
	opened atomic.Pointer[openedOutbox] // for operators; nil until opened
}

func newDatabaseOutbox(h *hub, dsn outboxDSN) *databaseOutbox {
	d := &databaseOutbox{hub: h, dsn: dsn, state: h.newOutboxState(outboxOfDSN)}
	d.state.waiting.Store(true)
	d.state.metric.Waiting(true)
	return d
}

// start begins to open the outbox and waits up to outboxGreet for it. It returns an error only if
// retries cannot succeed.
func (d *databaseOutbox) start(ctx context.Context) error {
	trying, cancel := context.WithCancel(context.WithoutCancel(ctx)) // ended by close
	d.cancel = cancel
	tried, late := make(chan error), make(chan struct{})
	defer close(late)
	d.tries.Go(func() {
		err := d.open(trying)
		if err != nil && !d.dsn.mayCome(err) {
			select {
			case tried <- err:
				return
			case <-late: // the hub is already serving
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
		d.state.log.LogAttrs(ctx, slog.LevelWarn, "outbox database does not answer; starting without it")
		return nil
	case <-ctx.Done():
		return nil // close follows
	}
}

// openLater retries opening the outbox until it succeeds or ctx ends.
func (d *databaseOutbox) openLater(ctx context.Context) {
	for wait := backoffFirst; ; wait = min(2*wait, backoffMax) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)): //nolint:gosec // not security-relevant
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

// open opens the outbox, migrates its table if configured, and starts to drain it.
func (d *databaseOutbox) open(whole context.Context) error {
	ctx, cancel := context.WithTimeout(whole, outboxTry)
	defer cancel()
	flags := d.hub.cmd.outboxServeFlags
	o, err := d.dsn.open(ctx, outboxOptions{table: flags.Table, bus: d.hub.bus, make: flags.Migrate})
	if err != nil {
		return err
	}
	if flags.Migrate && o.outdated(ctx) {
		ctx, cancel = context.WithTimeout(whole, outboxUpgrade)
		defer cancel()
	}
	if err := d.hub.prepareOutbox(ctx, o); err != nil {
		return errors.Join(err, o.close())
	}
	d.box, err = d.hub.drain(ctx, o, d.state, outbox.Config{Bus: outbox.JetStream(d.hub.bus), Observer: outboxObserver{d.state.metric}})
	if err == nil {
		d.opened.Store(o)
	}
	return err
}

// close stops draining and closes the outbox.
func (d *databaseOutbox) close(ctx context.Context) error {
	d.cancel()
	d.tries.Wait()
	if d.box == nil {
		return nil
	}
	return d.box.close(ctx, d.hub.log)
}

// mayCome reports whether opening the outbox may succeed later with the same configuration. An
// outbox on a network may always become available. A file may only if it is busy or its disk failed
// or is full.
func (p outboxDSN) mayCome(err error) bool {
	if p.path == "" || errors.Is(err, context.DeadlineExceeded) {
		return true
	}
	e, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return false
	}
	switch e.Code() & 0xff { // the low byte is the primary error code
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR:
		return true
	default:
		return false
	}
}
