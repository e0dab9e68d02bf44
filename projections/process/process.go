// Package process projects heartbeats to the states of processes: which live, and which have gone
// stale. It is a domain on the runtime of package projections.
package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
	"eventhub/projections"
)

// Group is the group of the process projection on TopicHeartbeat.
const Group = "process-projector"

// Config configures a Projector.
type Config struct {
	// Bus is where heartbeats come from and states go to. Required.
	Bus projections.Bus
	// Logger receives what operators should know. Default: nothing is logged.
	Logger *slog.Logger
	// Observer is told what happens. Default: nobody.
	Observer projections.Observer
	// StaleAfter is how long a process may be silent before it is stale. Default 15 s.
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

// Projector projects heartbeats to the states of processes: one state for each heartbeat, in the
// order of the heartbeats' stream, and one more when a process goes silent. It is a Projection into
// the topic process.state; any number of hubs may run it side by side, be killed and be started
// again: no heartbeat is left out, none is projected twice, and the states of a process never go
// back.
type Projector struct {
	cfg Config
	run *projections.Ordered

	mu sync.Mutex
	// living maps the key of each living process to its last heartbeat, in epoch milliseconds.
	living map[string]int64
	// overflow is set once living has been full.
	overflow bool
}

// New makes a projector. Run starts it.
func New(cfg Config) *Projector {
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
	p := &Projector{cfg: cfg, living: make(map[string]int64)}
	var err error
	p.run, err = projections.NewOrdered(cfg.Bus, projections.Projection{
		Topic: TopicHeartbeat, Group: Group, From: jetstream.FromEarliest, CacheKeys: cfg.MaxProcesses,
		Key: func(e *jetstream.Event) (string, error) {
			h, err := parseHeartbeat(e.Payload)
			return h.processID(), err
		},
		Apply:  applyHeartbeat,
		Logger: cfg.Logger, Observer: cfg.Observer,
	}, projections.NewTopicStore(cfg.Bus, TopicState), p.note)
	if err != nil {
		panic(err) // the above is wrong
	}
	return p
}

// now is the clock of the configuration, or the real one when that panics.
func (p *Projector) now() time.Time {
	t := time.Now()
	panics.Run(p.cfg.Logger, "Now", func() { t = p.cfg.Now() })
	return t
}

// applyHeartbeat is the state that a heartbeat leads to: it says everything.
func applyHeartbeat(_ context.Context, _ []byte, e *jetstream.Event) ([]byte, error) {
	h, err := parseHeartbeat(e.Payload)
	if err != nil {
		return nil, projections.Permanent(err)
	}
	return json.Marshal(State{
		ProcessID: h.processID(), Name: h.Name, Host: h.Host, PID: h.PID, SID: h.SID,
		CPUPct: h.CPUPct, MemMB: h.MemMB, LastSeenTS: e.TS, Status: Alive,
	})
}

// Run projects until ctx ends, and then returns nil with its leases handed back. Failures of the
// bus are logged and tried again; an error is returned only when the bus is closed. Call it once.
func (p *Projector) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var scanner sync.WaitGroup
	defer scanner.Wait()
	scanner.Go(func() {
		if err := p.scan(ctx); err != nil {
			cancel(err)
		}
	})
	err := p.run.Run(ctx)
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		err = cause
	}
	if err == nil {
		return nil
	}
	cancel(nil)
	return fmt.Errorf("process projection: %w", err)
}

// scan looks for silent processes until ctx ends. An error is that the bus is closed.
func (p *Projector) scan(ctx context.Context) error {
	// Those that fell silent while no hub ran are known by their states.
	read := func() error {
		return p.run.Each(ctx, func(key string, s projections.State) error {
			p.note(key, s)
			return nil
		})
	}
	ticker := time.NewTicker(p.cfg.ScanEvery)
	defer ticker.Stop()
	for known := false; ; {
		var err error
		if !known {
			err = read()
			known = err == nil
		} else {
			err = p.markStale(ctx)
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, jetstream.ErrClosed):
			return err
		case err != nil:
			p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "silent processes could not be marked", slog.Any("error", err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// note keeps when a living process was last seen, and forgets any other.
func (p *Projector) note(key string, s projections.State) {
	state := readState(key, s.Value)
	p.mu.Lock()
	defer p.mu.Unlock()
	if state.Status != Alive {
		delete(p.living, key)
		return
	}
	if _, ok := p.living[key]; !ok && len(p.living) >= p.cfg.MaxProcesses {
		if !p.overflow {
			p.overflow = true
			if p.cfg.Observer != nil {
				panics.Run(p.cfg.Logger, "Observer.LimitReached", func() { p.cfg.Observer.LimitReached("process_states") })
			}
			p.cfg.Logger.Warn("more living processes than are kept in memory", slog.String("limit", "process_states"), slog.Int("max", p.cfg.MaxProcesses))
		}
		return
	}
	p.living[key] = state.LastSeenTS
}

// silent are the keys that are kept which were last seen before a moment, and whether those are
// all.
func (p *Projector) silent(before int64) (keys []string, all bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, seen := range p.living {
		if seen < before {
			keys = append(keys, key)
		}
	}
	return keys, !p.overflow
}

// markStale publishes, once each, that processes are stale that were silent for StaleAfter. First
// it projects all heartbeats there are, so that what waits in the stream counts as heard.
func (p *Projector) markStale(ctx context.Context) error {
	return p.run.Sweep(ctx, func(change func(string, projections.Decision) error) error {
		before := p.now().Add(-p.cfg.StaleAfter).UnixMilli()
		expire := func(key string) error {
			if err := change(key, p.expired(key, before)); err != nil {
				return fmt.Errorf("publish the state of a process: %w", err)
			}
			return nil
		}
		keys, all := p.silent(before)
		for _, key := range keys {
			if err := expire(key); err != nil {
				return err
			}
		}
		if all {
			return nil
		}
		return p.run.Each(ctx, func(key string, s projections.State) error {
			if state := readState(key, s.Value); state.Status == Alive && state.LastSeenTS < before {
				return expire(key)
			}
			return nil
		})
	})
}

// expired decides that a process is stale if it lives and was last seen before the given time.
func (p *Projector) expired(key string, before int64) projections.Decision {
	return func(s projections.State) (next []byte, change bool, err error) {
		state := readState(key, s.Value)
		if state.Status != Alive || state.LastSeenTS >= before {
			p.note(key, s)
			return nil, false, nil
		}
		state.Status = Stale
		if next, err = json.Marshal(state); err != nil {
			return nil, false, fmt.Errorf("encode the state of a process: %w", err)
		}
		return next, true, nil
	}
}
