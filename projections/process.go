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
	// Bus is where heartbeats come from and states go to. Required.
	Bus Bus
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// Observer is told what happens. Default: nobody.
	Observer Observer
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
// stream, and one more when a process goes silent. It is a Projection into the topic process.state; any number of hubs may
// run it side by side, be killed and be started again: no heartbeat is left out, none is projected twice, and the states of
// a process never go back.
type Process struct {
	cfg     ProcessConfig
	applier *applier
	ordered *ordered

	mu sync.Mutex
	// living says when each living process was last seen, in epoch milliseconds, by key.
	living map[string]int64
	// overflow is set once living was full.
	overflow bool
}

// NewProcess makes a projector. Run starts it.
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
		panic(err) // the above is wrong
	}
	store := NewTopicStore(cfg.Bus, TopicProcessState)
	store.now = cfg.Now
	p.applier = newApplier(cfg.Bus, projection, store)
	p.applier.saved = p.note
	p.ordered = &ordered{a: p.applier, floor: 1}
	return p
}

// applyHeartbeat is the state that a heartbeat leads to: it says everything.
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

// Run projects until ctx ends, and then returns nil with its leases handed back. Failures of the bus are logged and tried
// again; an error is returned only when the bus is closed. Call it once.
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

// scan looks for silent processes until ctx ends. An error is that the bus is closed.
func (p *Process) scan(ctx context.Context) error {
	// Those that fell silent while no hub ran are known by their states.
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
			p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "silent processes could not be marked", slog.Any("error", err))
		}
	}
	return err
}

// note keeps when a living process was last seen, and forgets any other.
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
			p.cfg.Logger.Warn("more living processes than are kept in memory", slog.String("limit", "process_states"), slog.Int("max", p.cfg.MaxProcesses))
		}
		return
	}
	p.living[key] = state.LastSeenTS
}

// silent are the keys that are kept which were last seen before a moment, and whether those are all.
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

// markStale publishes, once each, that processes are stale that were silent for StaleAfter. First it projects all
// heartbeats there are, so that what waits in the stream counts as heard.
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

// expire publishes that a process is stale if it lives and was last seen before the given time. p.ordered.mu is held.
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
		// Another hub has a newer state of it: a heartbeat, or that it is stale.
		c, err = p.applier.reload(ctx, key)
	}
	return err
}
