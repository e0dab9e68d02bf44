package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"eventhub/jetstream"
)

// GroupProcess is the group of the process projection on TopicHeartbeat.
const GroupProcess = "process-projector"

const (
	// heartbeatsInFlight is the most heartbeats leased to one projector.
	heartbeatsInFlight = 256
	// heartbeatLease is how long a heartbeat may go without a sign of life from its projector.
	heartbeatLease = 30 * time.Second
	// Failures that may pass are tried again after retryFirst, doubled each time up to retryMost.
	retryFirst = 50 * time.Millisecond
	retryMost  = 5 * time.Second
	// stopTimeout bounds the handing back of leases at the end.
	stopTimeout = 5 * time.Second
)

// ProcessConfig configures a Process.
type ProcessConfig struct {
	// Bus is where heartbeats come from and states go to. Required.
	Bus Bus
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// StaleAfter is how long a process may be silent before it is stale. Default 15 s.
	StaleAfter time.Duration
	// ScanEvery is how often silent processes are looked for. Default 5 s.
	ScanEvery time.Duration
	// MaxProcesses ("process_states") is the most living processes kept in memory. Default 100,000.
	// The states of those beyond are read from the bus each time they are needed: slower, and otherwise the same.
	MaxProcesses int
	// Now is the clock. Default time.Now.
	Now func() time.Time
}

// Process projects heartbeats to the states of processes: one state for each heartbeat, in the order of the heartbeats'
// stream, and one more when a process goes silent.
//
// Any number of hubs may run it side by side, be killed and be started again: no heartbeat is left out, none is
// projected twice, and the states of a process never go back. This rests on two rules and on nothing kept in memory:
//
//   - A state replaces exactly the one that its writer knew (compare-and-set), and names the heartbeat that it was made
//     from. A writer that comes second reads what is there and sees whether its heartbeat is in it.
//   - Each projector goes through the heartbeats in the order of their stream. Deliveries are no such order: members
//     share a group's events, and those that a killed hub held come late. A delivery therefore says that there is
//     something to do; where it leaves a gap to what was projected last, the projector reads the stream in between.
type Process struct {
	cfg ProcessConfig

	// mu is held by whoever projects: there is one writer in a Process.
	mu sync.Mutex
	// All heartbeats up to position are projected, by whichever hub. storedAt is when the one at position was stored,
	// in epoch nanoseconds.
	position source
	storedAt int64
	// living holds the newest known state of each living process, by key.
	living map[string]record
	// overflow is set once living was full.
	overflow bool
}

// NewProcess makes a projector. Run starts it.
func NewProcess(cfg ProcessConfig) *Process {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.StaleAfter <= 0 {
		cfg.StaleAfter = 15 * time.Second
	}
	if cfg.ScanEvery <= 0 {
		cfg.ScanEvery = 5 * time.Second
	}
	if cfg.MaxProcesses <= 0 {
		cfg.MaxProcesses = 100_000
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Process{cfg: cfg, living: make(map[string]record)}
}

// Run projects until ctx ends, and then returns nil with its leases handed back. Failures of the bus are logged and tried
// again; an error is returned only when the bus is closed. Call it once.
func (p *Process) Run(ctx context.Context) error {
	for _, step := range []func(context.Context) error{p.load, p.catchUp} {
		if err := p.insist(ctx, step); err != nil {
			return p.end(ctx, err)
		}
	}
	var sub *jetstream.Subscription
	err := p.insist(ctx, func(ctx context.Context) (err error) {
		sub, err = p.cfg.Bus.Consume(ctx, TopicHeartbeat, GroupProcess, jetstream.SubscribeOptions{
			From:        jetstream.FromEarliest,
			MaxInFlight: heartbeatsInFlight,
			AckTimeout:  heartbeatLease,
		}, 1, p.handle)
		return err
	})
	if err != nil {
		return p.end(ctx, err)
	}
	sub.Start()
	defer func() {
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := sub.Stop(stop); err != nil && !errors.Is(err, jetstream.ErrClosed) {
			p.warn(ctx, "the projector's leases were not handed back", err)
		}
	}()

	ticker := time.NewTicker(p.cfg.ScanEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if err := p.markStale(ctx); err != nil && ctx.Err() == nil {
				if errors.Is(err, jetstream.ErrClosed) {
					return fmt.Errorf("process projection: %w", err)
				}
				p.warn(ctx, "silent processes could not be marked", err)
			}
		}
	}
}

// end is what Run returns for an error: none when it was asked to end.
func (p *Process) end(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // being asked to end is no failure
	}
	return fmt.Errorf("process projection: %w", err)
}

// insist tries f until it succeeds, fails for good, or ctx ends.
func (p *Process) insist(ctx context.Context, f func(context.Context) error) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		err := f(ctx)
		if err == nil || isRefused(err) || errors.Is(err, jetstream.ErrClosed) || ctx.Err() != nil {
			return err
		}
		p.warn(ctx, "projecting failed and is tried again", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// isRefused reports whether the bus will never take what it was given.
func isRefused(err error) bool {
	refused, ok := errors.AsType[*jetstream.Error](err)
	return ok && (refused.Code == jetstream.CodeBadOptions || refused.Code == jetstream.CodeBadTopic)
}

func (p *Process) warn(ctx context.Context, msg string, err error) {
	//nolint:sloglint // callers pass constants
	p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("cause", err.Error()))
}

// handle is called for each delivered heartbeat. It returns nil, which acknowledges the heartbeat, once the state is
// confirmed; an error, which leads to a dead letter in the end, only for what can never be projected.
func (p *Process) handle(ctx context.Context, d *jetstream.Delivery) error {
	if _, err := parseHeartbeat(d.Event.Payload); err != nil {
		p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a heartbeat was refused", slog.String("id", d.Event.ID),
			slog.Int("attempt", d.Attempt), slog.String("cause", err.Error()))
		return err
	}
	defer hold(d)()
	return p.insist(ctx, func(ctx context.Context) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.reach(ctx, &d.Event)
	})
}

// hold prolongs the lease until release is called: however long the projecting takes, the heartbeat is in good hands.
func hold(d *jetstream.Delivery) (release func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(heartbeatLease / 3)
		defer ticker.Stop()
		for {
			select {
			case <-stop:
				return
			case <-ticker.C:
				_ = d.Extend(0) // a lease that has ended ends the handler's context too
			}
		}
	})
	return func() {
		close(stop)
		wg.Wait()
	}
}
