package projections

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"eventhub/jetstream"
)

// GroupProcess is the group of the process projection on TopicHeartbeat.
const GroupProcess = "process-projector"

// ProcessConfig configures a Process.
type ProcessConfig struct {
	// Bus is the source of heartbeats and the target of states. Required.
	Bus Bus
	// Logger receives operational events. By default, nothing is logged.
	Logger *slog.Logger
	// Observer receives metrics. Optional.
	Observer Observer
	// StaleAfter is the time without a heartbeat after which a process is stale. Defaults to 15
	// seconds.
	StaleAfter time.Duration
	// ScanEvery is the interval between searches for silent processes. Defaults to 5 seconds.
	ScanEvery time.Duration
	// MaxProcesses ("process_states") is the maximum number of living processes held in memory. The
	// states of further processes are read from the bus at every access, which is slower but has no
	// other effect. Defaults to 100,000.
	MaxProcesses int
	// Now returns the current time. Defaults to time.Now.
	Now func() time.Time
}

// Process projects heartbeats to states of processes. It publishes one state per heartbeat, in
// stream order, and a further state when a process goes silent. It is a Projection into the topic
// process.state. Any number of hubs may run it concurrently, and each may be killed and restarted
// at any time: no heartbeat is lost or projected twice, and the state of a process never reverts.
type Process struct {
	cfg     ProcessConfig
	applier *applier
	ordered *ordered

	mu sync.Mutex
	// living maps the key of each living process to its last heartbeat, in epoch milliseconds.
	living map[string]int64
	// overflow is set once living has been full.
	overflow bool
}

// NewProcess returns a projector that does nothing until Run is called.
func NewProcess(cfg ProcessConfig) *Process {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Observer = guardObserver(cfg.Observer, cfg.Logger)
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
	} else {
		cfg.Now = guardClock(cfg.Now, cfg.Logger)
	}
	p := &Process{cfg: cfg, living: make(map[string]int64)}
	projection := &Projection{
		Topic: TopicHeartbeat, Group: GroupProcess, From: jetstream.FromEarliest, CacheKeys: cfg.MaxProcesses,
		Key: func(e *jetstream.Event) (string, error) {
			h, err := parseHeartbeat(e.Payload)
			return h.processID(), err
		},
		Apply:  applyHeartbeat,
		Logger: cfg.Logger, Observer: cfg.Observer,
	}
	if err := projection.validate(); err != nil {
		panic(err) // a bug: the projection above is fixed
	}
	store := NewTopicStore(cfg.Bus, TopicProcessState)
	store.now = cfg.Now
	p.applier = newApplier(cfg.Bus, projection, store)
	p.applier.saved = p.note
	p.ordered = &ordered{a: p.applier, floor: 1}
	return p
}

// applyHeartbeat returns the state after a heartbeat, which depends on the heartbeat alone.
func applyHeartbeat(_ context.Context, _ []byte, e *jetstream.Event) ([]byte, error) {
	h, err := parseHeartbeat(e.Payload)
	if err != nil {
		return nil, Permanent(err)
	}
	return json.Marshal(ProcessState{
		ProcessID: h.processID(), Name: h.Name, Host: h.Host, PID: h.PID, SID: h.SID,
		CPUPct: h.CPUPct, MemMB: h.MemMB, LastSeenTS: e.TS, Status: Alive,
	})
}

// Run projects until ctx ends, then returns its leases and returns nil. Failures of the bus are
// logged and retried. Run returns an error only if the bus is closed. It may be called only once.
func (p *Process) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var scanner sync.WaitGroup
	defer scanner.Wait()
	scanner.Go(func() {
		if err := p.scan(ctx); err != nil {
			cancel(err)
		}
	})
	err := p.ordered.run(ctx, GroupProcess, jetstream.FromEarliest)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		err = cause
	} else if ctx.Err() != nil {
		return nil
	}
	cancel(nil)
	return fmt.Errorf("process projection: %w", err)
}

// scan looks for silent processes until ctx ends. It returns an error only if the bus is closed.
func (p *Process) scan(ctx context.Context) error {
	// Processes that fell silent while no hub ran are found by their stored states.
	err := insist(ctx, p.cfg.Logger, "read the states of processes", func(ctx context.Context) error {
		return p.applier.store.Each(ctx, func(key string, s State) error {
			p.note(key, s)
			return nil
		})
	})
	ticker := time.NewTicker(p.cfg.ScanEvery)
	defer ticker.Stop()
	for err == nil || !errors.Is(err, jetstream.ErrClosed) {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		if err = p.markStale(ctx); err != nil && ctx.Err() == nil {
			p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to mark silent processes as stale", slog.Any("error", err))
		}
	}
	return err
}

// note records the last heartbeat of a living process and forgets any other process.
func (p *Process) note(key string, s State) {
	state := readProcessState(key, s.Value)
	p.mu.Lock()
	defer p.mu.Unlock()
	if state.Status != Alive {
		delete(p.living, key)
		return
	}
	if _, ok := p.living[key]; !ok && len(p.living) >= p.cfg.MaxProcesses {
		if !p.overflow {
			p.overflow = true
			p.cfg.Observer.LimitReached("process_states")
			p.cfg.Logger.Warn("more living processes than fit in memory", slog.String("limit", "process_states"), slog.Int("max", p.cfg.MaxProcesses))
		}
		return
	}
	p.living[key] = state.LastSeenTS
}

// silent returns the keys in memory whose last heartbeat was before the given time. all reports
// whether memory holds every living process.
func (p *Process) silent(before int64) (keys []string, all bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, seen := range p.living {
		if seen < before {
			keys = append(keys, key)
		}
	}
	return keys, !p.overflow
}

// markStale publishes the status stale, once each, for processes that were silent for StaleAfter.
// It first projects every stored heartbeat, so that heartbeats still waiting in the stream count.
func (p *Process) markStale(ctx context.Context) error {
	if err := p.ordered.tail(ctx); err != nil {
		return err
	}
	p.ordered.mu.Lock()
	defer p.ordered.mu.Unlock()
	before := p.cfg.Now().Add(-p.cfg.StaleAfter).UnixMilli()
	keys, all := p.silent(before)
	for _, key := range keys {
		if err := p.expire(ctx, key, before); err != nil {
			return err
		}
	}
	if all {
		return nil
	}
	return p.applier.store.Each(ctx, func(key string, s State) error {
		if state := readProcessState(key, s.Value); state.Status == Alive && state.LastSeenTS < before {
			return p.expire(ctx, key, before)
		}
		return nil
	})
}

// expire publishes that a process is stale if it is alive and its last heartbeat was before the
// given time. The caller holds p.ordered.mu.
func (p *Process) expire(ctx context.Context, key string, before int64) error {
	c, err := p.applier.load(ctx, key)
	for err == nil {
		state := readProcessState(key, c.state.Value)
		if state.Status != Alive || state.LastSeenTS >= before {
			p.note(key, c.state)
			return nil
		}
		state.Status = Stale
		next := State{From: c.state.From}
		if next.Value, err = json.Marshal(state); err != nil {
			return fmt.Errorf("encode the state of a process: %w", err)
		}
		saved, serr := p.applier.store.Save(ctx, key, c.state, next, nil)
		if serr == nil {
			p.applier.remember(key, cached{saved, c.span})
			return nil
		}
		if !errors.Is(serr, ErrConflict) {
			return fmt.Errorf("publish the state of a process: %w", serr)
		}
		// Another hub has published a newer state of the process.
		c, err = p.applier.reload(ctx, key)
	}
	return err
}
