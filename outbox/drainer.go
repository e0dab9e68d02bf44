package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"eventhub/jetstream/pacedlog"
)

// Timing of a drainer.
const (
	// Failures of the store or of NATS are retried after againFirst; the delay doubles with each
	// further failure, up to againMax.
	againFirst = 100 * time.Millisecond
	againMax   = 5 * time.Second
	// searchWait is the delay after a claim that found nothing but did not search every lane.
	searchWait = 20 * time.Millisecond
	// After a claim that found nothing, the drainer waits for the time since its last work divided
	// by pollPart, and at least pollFirst.
	pollFirst = 10 * time.Millisecond
	pollPart  = 4
	// sleepAfter is how long the drainer must have been idle before it asks the store for wake-ups.
	// It is longer than most transactions: a transaction that inserted its record before the
	// request and commits after it sends no notification, so only polling finds that record.
	sleepAfter = 100 * time.Millisecond
	// saveWait is how long publish results wait to be saved together with the results of other jobs
	// in progress.
	saveWait = 5 * time.Millisecond
	// storeWait is the timeout of a store call, in case the store's host disappears silently.
	storeWait = time.Minute
	// readyWait is the timeout of a check whether the bus is available.
	readyWait = time.Second
)

// Drainer publishes the records of a store. Any number of drainers may share one store. Its methods
// may be called concurrently.
type Drainer struct {
	cfg   Config
	log   *slog.Logger
	often *pacedlog.Log // lines that an outage or a record can repeat
	began time.Time     // the zero of the drainer's monotonic clock
	clock natsClock
	// stallAfter is the constant, except in tests
	stallAfter time.Duration

	wake   chan struct{} // records may have been added
	look   chan struct{} // claim once: the store has just begun to send wake-ups
	asleep chan struct{} // the drainer is idle and asks the store for wake-ups

	mu      sync.Mutex // guards the fields below
	started bool
	stop    chan struct{} // closed when Stop begins
	kill    context.CancelFunc
	done    chan struct{} // closed when every goroutine has ended
}

// NewDrainer returns a Drainer that does nothing until Start or Drain is called.
func NewDrainer(cfg Config) (*Drainer, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("outbox: drainer: %w", err)
	}
	log := cfg.Logger.With(slog.String("worker", cfg.Worker))
	return &Drainer{
		cfg: cfg, log: log, often: pacedlog.New(log), began: time.Now(), stallAfter: stallAfter,
		wake: make(chan struct{}, 1), look: make(chan struct{}, 1), asleep: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}, nil
}

// Wake tells the drainer that records may have been added, which saves the wait for the next poll.
// It does not block.
func (d *Drainer) Wake() { tell(d.wake) }

// tell signals on a channel with a buffer of one. When a signal is already pending, tell does
// nothing.
func tell(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// Start runs the drainer in the background until Stop. A second call has no effect.
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
		_, _ = d.run(ctx, false) // the error only says that ctx was cancelled
		cancel()
		helpers.Wait()
		d.kill()
	}()
}

var errStarted = errors.New("outbox: drainer: already started")

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

// Stop ends claiming, publishes the records already claimed, and returns when all of them are
// settled. When ctx ends first, Stop gives up and returns the error of ctx; the remaining records
// become available to other drainers when their leases end. Stop may be called more than once, and
// without Start.
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

// Drained counts the results of Drain, in records.
type Drained struct {
	Published, Failed, Parked int
}

// Drain publishes everything that can be published now and returns when nothing more can. Records
// remain if they wait for a retry, are leased by another drainer, or belong to a topic that
// currently rejects events. Drain gives up and returns an error when ctx ends, or when the store or
// the bus has failed for Config.Patience. It must not be combined with Start and can be called only
// once.
func (d *Drainer) Drain(ctx context.Context) (Drained, error) {
	ctx, err := d.begin(ctx)
	if err != nil {
		return Drained{}, err
	}
	defer close(d.done)
	defer d.kill()
	return d.run(ctx, true)
}

// listen runs Store.Listen, which wakes the drainer, and retries it with back-off.
func (d *Drainer) listen(ctx context.Context) {
	for wait := againFirst; ; wait = min(2*wait, againMax) {
		heard := false
		err := d.cfg.Store.Listen(ctx, Sleeper{Asleep: d.asleep, Listening: func() { heard = true; tell(d.look) }, Wake: d.Wake})
		if errors.Is(err, errPooler) {
			d.log.WarnContext(ctx, "store cannot send notifications of new records; polling instead", slog.Any("error", err))
		}
		if errors.Is(err, ErrCannotListen) || ctx.Err() != nil {
			return
		}
		if heard {
			wait = againFirst
		}
		d.often.Log(ctx, slog.LevelWarn, "failed to listen for new records; polling and retrying", "", slog.Any("error", err))
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
			d.log.WarnContext(ctx, "failed to read outbox statistics", slog.Any("error", err))
			continue
		}
		d.cfg.Observer.Backlog(st)
	}
}

// pause waits and reports whether ctx is still active.
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

// jitter shortens d by a random amount of up to half.
func jitter(d time.Duration) time.Duration { return d - rand.N(d/2+1) } //nolint:gosec // not security-relevant
