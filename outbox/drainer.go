package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// Waits of a drainer.
const (
	// What failed for a reason of the store or of NATS is tried again after againFirst, doubled
	// each time up to againMax.
	againFirst = 100 * time.Millisecond
	againMax   = 5 * time.Second
	// searchWait is between claims that found nothing but did not look everywhere.
	searchWait = 20 * time.Millisecond
	// Between claims that found nothing is pollFirst, or one pollPart-th of the time since there was something.
	pollFirst = 10 * time.Millisecond
	pollPart  = 4
	// sleepAfter is how long nothing must have come before the store is asked to tell of more. It is longer than most
	// transactions: one that added a record before the store was asked, and commits afterwards, tells nobody, and is found by
	// polling.
	sleepAfter = 100 * time.Millisecond
	// saveWait is how long what became of records waits for that of others, while there are others under way.
	saveWait = 5 * time.Millisecond
	// storeWait bounds a call of the store, whose host may be gone without a word.
	storeWait = time.Minute
	// readyWait bounds the question whether the bus is there.
	readyWait = time.Second
)

// Drainer publishes the records of a store. Any number may work on one store.
type Drainer struct {
	cfg   Config
	log   *slog.Logger
	began time.Time // what its times count from, by the monotonic clock
	clock natsClock

	wake   chan struct{} // records may have been added
	look   chan struct{} // look once: the store tells of records from now on
	asleep chan struct{} // there is nothing to do: the store shall tell of records

	mu      sync.Mutex // guards what follows
	started bool
	stop    chan struct{} // closed when Stop begins
	kill    context.CancelFunc
	done    chan struct{} // closed when all has ended
}

// NewDrainer makes a Drainer, which does nothing until Start or Drain.
func NewDrainer(cfg Config) (*Drainer, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("outbox: drainer: %w", err)
	}
	return &Drainer{
		cfg: cfg, log: cfg.Logger.With(slog.String("worker", cfg.Worker)), began: time.Now(),
		wake: make(chan struct{}, 1), look: make(chan struct{}, 1), asleep: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}, nil
}

// Wake tells the drainer that records may have been added, so that it need not poll for them. It does not block.
func (d *Drainer) Wake() { tell(d.wake) }

// tell sends to a channel that has room for one, unless it is full: who receives knows already.
func tell(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Start begins to drain, until Stop. A Drainer is started once.
func (d *Drainer) Start() {
	ctx, err := d.begin(context.Background())
	if err != nil {
		return
	}
	go func() {
		defer close(d.done)
		var helpers sync.WaitGroup
		background, cancel := context.WithCancel(ctx)
		helpers.Go(func() { d.listen(background) })
		helpers.Go(func() { d.tellStats(background) })
		_, _ = d.run(ctx, false) // its error is that it was told to end
		cancel()
		helpers.Wait()
		d.kill()
	}()
}

var errStarted = errors.New("outbox: drainer: it was started before")

func (d *Drainer) begin(ctx context.Context) (context.Context, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.started {
		return nil, errStarted
	}
	d.started = true
	ctx, d.kill = context.WithCancel(ctx)
	return ctx, nil
}

// Stop claims no more, publishes what is claimed, and returns when all of it is settled. When ctx ends first, it gives up what
// is left, which others have after the lease, and returns the error of ctx. It may be called twice, and without Start.
func (d *Drainer) Stop(ctx context.Context) error {
	d.mu.Lock()
	select {
	case <-d.stop:
	default:
		close(d.stop)
	}
	if !d.started {
		d.started = true
		close(d.done)
	}
	kill := d.kill
	d.mu.Unlock()
	select {
	case <-d.done:
		return nil
	case <-ctx.Done():
	}
	kill()
	<-d.done
	return ctx.Err()
}

// Drained says what Drain did.
type Drained struct {
	Published, Failed, Parked int
}

// Drain publishes what can be published now, and returns when there is no more: what waits for another try, or for another
// drainer's lease, or for a topic that takes nothing now, stays. When ctx ends, or the store or the bus has failed for
// Config.Patience, it gives up and returns the error. It is for a Drainer that is not started, and can be called once.
func (d *Drainer) Drain(ctx context.Context) (Drained, error) {
	ctx, err := d.begin(ctx)
	if err != nil {
		return Drained{}, err
	}
	defer close(d.done)
	defer d.kill()
	return d.run(ctx, true)
}

// listen lets the store wake the drainer.
func (d *Drainer) listen(ctx context.Context) {
	for wait := againFirst; ; wait = min(2*wait, againMax) {
		heard := false
		err := d.cfg.Store.Listen(ctx, Sleeper{Asleep: d.asleep, Listening: func() { heard = true; tell(d.look) }, Wake: d.Wake})
		if errors.Is(err, errPooler) {
			d.log.WarnContext(ctx, "the store does not tell of new records; only polling for them", slog.Any("error", err))
		}
		if errors.Is(err, ErrCannotListen) || ctx.Err() != nil {
			return
		}
		if heard {
			wait = againFirst
		}
		d.log.WarnContext(ctx, "the store does not tell of new records: they are polled for", slog.Any("error", err))
		if !pause(ctx, jitter(wait)) {
			return
		}
	}
}

func (d *Drainer) tellStats(ctx context.Context) {
	if d.cfg.Observer == (nobody{}) {
		return
	}
	for pause(ctx, d.cfg.StatsEvery) {
		sctx, cancel := context.WithTimeout(ctx, storeWait)
		st, err := d.cfg.Store.Stats(sctx)
		cancel()
		if err != nil {
			d.log.WarnContext(ctx, "no statistics of the outbox", slog.Any("error", err))
			continue
		}
		d.cfg.Observer.Backlog(st)
	}
}

// pause waits, and reports whether ctx lives on.
func pause(ctx context.Context, wait time.Duration) bool {
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// jitter is d, or up to a half less.
func jitter(d time.Duration) time.Duration { return d - rand.N(d/2+1) } //nolint:gosec // no secret
