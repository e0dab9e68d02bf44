// Package process projects heartbeats to the states of processes: which live, and which have gone
// stale. It is a domain on the runtime of package projections.
package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	// Tracer makes spans of heartbeats that are applied. Default: none.
	Tracer projections.Tracer
	// StaleAfter is how long a process may be silent before it is stale. Default 15 s.
	StaleAfter time.Duration
	// ScanEvery is the interval between searches for silent processes. Defaults to 5 seconds.
	ScanEvery time.Duration
	// MaxProcesses ("process_states") is the maximum number of living processes held in memory. The
	// states of further processes are read from the bus, which is slower. All of them are read to
	// find the silent ones among them, for at most a tenth of the time, so these become stale
	// later. Defaults to 100,000.
	MaxProcesses int
	// Now returns the current time. Defaults to time.Now.
	Now func() time.Time
}

// Projector projects heartbeats to the states of processes: one state for each heartbeat of a
// process, in the order of the heartbeats' stream, and one more when the process goes silent. It is
// a Projection into the topic process.state; any number of hubs may run it side by side, be killed
// and be started again: no heartbeat is left out, none is projected twice, and the states of a
// process never go back. Only while process.state has as many keys as its rule allows, heartbeats
// of processes that it does not have are dropped.
type Projector struct {
	cfg Config
	run *projections.Ordered

	mu sync.Mutex
	// living maps the key of each living process to its last heartbeat, in epoch milliseconds.
	living map[string]int64
	// left is when a living process was last left out because living was full.
	left time.Time
}

const (
	// inFlight is how many heartbeats are projected together.
	inFlight = 1_024
	// changeAtOnce is how many states are changed while no heartbeat is projected.
	changeAtOnce = 256
	// readPause is how long all states are not read after a reading, as a multiple of its time.
	readPause = 9
	// leftFor is for how long all states are read after a process was left out: longer than a state
	// that was stored may not be seen.
	leftFor = time.Minute
)

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
		Topic: TopicHeartbeat, Group: Group, From: jetstream.FromEarliest, InFlight: inFlight, CacheKeys: cfg.MaxProcesses, DropNewKeys: true,
		Key: func(e *jetstream.Event) (string, error) {
			h, err := parseHeartbeat(e.Payload)
			return h.processID(), err
		},
		Apply:  applyHeartbeat,
		Logger: cfg.Logger, Observer: cfg.Observer, Tracer: cfg.Tracer,
	}, projections.NewTopicStore(cfg.Bus, TopicState), p.note)
	if err != nil {
		panic(err) // the above is wrong
	}
	return p
}

// Keys tells a bus whose keys on TopicState heartbeats make; see jetstream.Config.Derived.
func Keys() jetstream.DerivedKeys {
	return jetstream.DerivedKeys{From: TopicHeartbeat, Of: TopicState, Key: func(payload []byte) string {
		h, err := parseHeartbeat(payload)
		if err != nil {
			return ""
		}
		return h.processID()
	}}
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
	var scanners sync.WaitGroup
	defer scanners.Wait()
	for _, scan := range []func(context.Context) error{p.scan, p.scanStored} {
		scanners.Go(func() {
			if err := scan(ctx); err != nil {
				cancel(err)
			}
		})
	}
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

// scan looks for silent processes among those in memory until ctx ends. An error is that the bus is
// closed.
func (p *Projector) scan(ctx context.Context) error {
	for {
		if err := p.failed(ctx, p.markStale(ctx)); err != nil {
			return err
		}
		if !pause(ctx, p.cfg.ScanEvery) {
			return nil
		}
	}
}

// scanStored looks for silent processes among all stored states: at the beginning, because some
// fell silent while no hub ran, and while there are more than are kept in memory. An error is that
// the bus is closed.
func (p *Projector) scanStored(ctx context.Context) error {
	for again := true; ; {
		began := time.Now()
		p.mu.Lock()
		due := again || began.Sub(p.left) < leftFor
		p.mu.Unlock()
		if due {
			err := p.readStored(ctx)
			if again = err != nil; again {
				if err := p.failed(ctx, err); err != nil {
					return err
				}
			}
		}
		if !pause(ctx, max(p.cfg.ScanEvery, readPause*time.Since(began))) {
			return nil
		}
	}
}

// failed logs an error, or returns it when the bus is closed.
func (p *Projector) failed(ctx context.Context, err error) error {
	if errors.Is(err, jetstream.ErrClosed) && ctx.Err() == nil {
		return err
	}
	if err != nil && ctx.Err() == nil {
		p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "silent processes could not be marked", slog.Any("error", err))
	}
	return nil
}

// pause waits for d. It reports false when ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// meet keeps a living process that is not kept, as far as there is room.
func (p *Projector) meet(key string, state State) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, ok := p.living[key]; !ok {
		p.keepLocked(key, state)
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
	p.keepLocked(key, state)
}

func (p *Projector) keepLocked(key string, state State) {
	if _, ok := p.living[key]; !ok && len(p.living) >= p.cfg.MaxProcesses {
		first := p.left.IsZero()
		p.left = time.Now()
		if first {
			if p.cfg.Observer != nil {
				panics.Run(p.cfg.Logger, "Observer.LimitReached", func() { p.cfg.Observer.LimitReached("process_states") })
			}
			p.cfg.Logger.Warn("more living processes than are kept in memory", slog.String("limit", "process_states"), slog.Int("max", p.cfg.MaxProcesses))
		}
		return
	}
	p.living[key] = state.LastSeenTS
}

// silent returns the keys in memory that were last seen before a moment.
func (p *Projector) silent(before int64) (keys []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, seen := range p.living {
		if seen < before {
			keys = append(keys, key)
		}
	}
	return keys
}

// heard projects all heartbeats there are, so that what waits in the stream counts as heard. It
// returns the moment before which a process must have been last seen to be stale.
func (p *Projector) heard(ctx context.Context) (before int64, err error) {
	if err := p.run.Tail(ctx); err != nil {
		return 0, err
	}
	return p.now().Add(-p.cfg.StaleAfter).UnixMilli(), nil
}

// markStale publishes, once each, that processes in memory are stale that were silent for
// StaleAfter.
func (p *Projector) markStale(ctx context.Context) error {
	before, err := p.heard(ctx)
	if err != nil {
		return err
	}
	for keys := range slices.Chunk(p.silent(before), changeAtOnce) {
		if err := p.expire(ctx, keys, before); err != nil {
			return err
		}
	}
	return nil
}

// readStored is markStale for all stored states. It keeps the living in memory, as far as there is
// room.
func (p *Projector) readStored(ctx context.Context) error {
	before, err := p.heard(ctx)
	if err != nil {
		return err
	}
	var keys []string
	err = p.run.Each(ctx, func(key string, s projections.State) error {
		state := readState(key, s.Value)
		switch {
		case state.Status != Alive:
			return nil
		case state.LastSeenTS >= before:
			p.meet(key, state)
			return nil
		}
		if keys = append(keys, key); len(keys) < changeAtOnce {
			return nil
		}
		err := p.expire(ctx, keys, before)
		keys = keys[:0]
		return err
	})
	if err != nil {
		return err
	}
	return p.expire(ctx, keys, before)
}

func (p *Projector) expire(ctx context.Context, keys []string, before int64) error {
	err := p.run.Change(ctx, keys, func(key string) projections.Decision { return p.expired(key, before) })
	if err != nil {
		return fmt.Errorf("publish the states of processes: %w", err)
	}
	return nil
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
