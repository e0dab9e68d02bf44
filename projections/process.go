package projections

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
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
	// scanOverlap is how far a read of the heartbeats goes back before the last one projected, in case the clock of
	// the stream's server was set back in between.
	scanOverlap = time.Second
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
	// MaxProcesses ("process_states") is the most living processes kept in memory. Default 100,000, about 50 MB.
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
		if err == nil || isFinal(err) || ctx.Err() != nil {
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

// isFinal reports whether trying again cannot help.
func isFinal(err error) bool {
	if refused, ok := errors.AsType[*jetstream.Error](err); ok {
		return refused.Code == jetstream.CodeBadOptions || refused.Code == jetstream.CodeBadTopic
	}
	return errors.Is(err, jetstream.ErrClosed)
}

func (p *Process) warn(ctx context.Context, msg string, err error) {
	//nolint:sloglint // callers pass constants
	p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("cause", err.Error()))
}

// load reads the states of the living processes, so that those that fell silent while no hub ran are noticed.
func (p *Process) load(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.scanStates(ctx, func(key string, r record) error {
		p.remember(key, r)
		return nil
	})
}

// scanStates calls f with the newest state of each key.
func (p *Process) scanStates(ctx context.Context, f func(string, record) error) error {
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt, LatestByKey: true}
	err := p.cfg.Bus.Scan(ctx, TopicProcessState, opts, func(e *jetstream.Event) error {
		if e.Key == "" {
			return nil
		}
		return f(e.Key, readRecord(e))
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", TopicProcessState, err)
	}
	return nil
}

// catchUp projects what the group has not acknowledged.
func (p *Process) catchUp(ctx context.Context) error {
	cursor, err := p.cfg.Bus.Cursor(ctx, TopicHeartbeat, GroupProcess)
	if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return fmt.Errorf("read the cursor of %s: %w", GroupProcess, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.storedAt = max(p.storedAt, cursor.LastTS*int64(time.Millisecond))
	return p.fill(ctx)
}

// handle is called for each delivered heartbeat. It returns nil, which acknowledges the heartbeat, once the state is
// confirmed; an error, which leads to a dead letter in the end, only for what can never be projected.
func (p *Process) handle(ctx context.Context, d *jetstream.Delivery) error {
	if _, err := parseHeartbeat(d.Event.Payload); err != nil {
		p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "a heartbeat was refused", slog.String("id", d.Event.ID),
			slog.Int("attempt", d.Attempt), slog.String("cause", err.Error()))
		return err
	}
	// However long it takes, to the bus this heartbeat is in good hands.
	var alive *time.Timer
	alive = time.AfterFunc(heartbeatLease/3, func() {
		if d.Extend(0) == nil {
			alive.Reset(heartbeatLease / 3)
		}
	})
	defer alive.Stop()
	return p.insist(ctx, func(ctx context.Context) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.reach(ctx, &d.Event)
	})
}

// reach projects all heartbeats up to e. p.mu is held, as by all that follow.
func (p *Process) reach(ctx context.Context, e *jetstream.Event) error {
	if p.passed(e) {
		return nil
	}
	if next := (source{e.Stream, e.Sequence - 1}); next != p.position {
		if err := p.fill(ctx); err != nil {
			return err
		}
		if p.passed(e) {
			return nil
		}
		// It has left the stream since it was delivered.
	}
	return p.advance(ctx, e)
}

// fill projects the stored heartbeats after position, to the end.
func (p *Process) fill(ctx context.Context) error {
	opts := jetstream.ScanOptions{From: jetstream.FromEarliest, Limit: math.MaxInt}
	if p.storedAt > 0 {
		opts.From = jetstream.FromTS
		opts.TS = time.Unix(0, p.storedAt).Add(-scanOverlap).UnixMilli()
	}
	err := p.cfg.Bus.Scan(ctx, TopicHeartbeat, opts, func(e *jetstream.Event) error {
		if p.passed(e) {
			return nil
		}
		return p.advance(ctx, e)
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", TopicHeartbeat, err)
	}
	return nil
}

// passed reports whether e is at or before position. A heartbeat of a lower sequence that was stored later is not: its
// stream was deleted and made again.
func (p *Process) passed(e *jetstream.Event) bool {
	return e.Stream == p.position.stream && e.Sequence <= p.position.sequence && e.StoredAt <= p.storedAt
}

// advance projects e, which follows position, and moves position to it. What is no heartbeat is passed over: its own
// delivery leads it to the dead letters.
func (p *Process) advance(ctx context.Context, e *jetstream.Event) error {
	if h, err := parseHeartbeat(e.Payload); err == nil {
		if err := p.project(ctx, h, e); err != nil {
			return err
		}
	}
	p.position, p.storedAt = source{e.Stream, e.Sequence}, e.StoredAt
	return nil
}

// project publishes the state that follows from a heartbeat, unless it was published before.
func (p *Process) project(ctx context.Context, h Heartbeat, e *jetstream.Event) error {
	key := h.processID()
	state := ProcessState{
		ProcessID: key, Name: h.Name, Host: h.Host, PID: h.PID, SID: h.SID,
		CPUPct: h.CPUPct, MemMB: h.MemMB, LastSeenTS: e.TS, Status: Alive,
	}
	known, ok := p.living[key]
	for {
		if !ok {
			var err error
			if known, err = p.read(ctx, key); err != nil {
				return err
			}
		}
		if known.covers(e) {
			return nil
		}
		err := p.publish(ctx, known, record{state: state, from: source{e.Stream, e.Sequence}}, e.ID)
		if !errors.Is(err, jetstream.ErrKeyChanged) {
			return err
		}
		ok = false
	}
}

// read asks the bus for the newest state of a key, and remembers it.
func (p *Process) read(ctx context.Context, key string) (record, error) {
	e, err := p.cfg.Bus.LatestByKey(ctx, TopicProcessState, key)
	if errors.Is(err, jetstream.ErrNotFound) {
		delete(p.living, key)
		return record{}, nil
	}
	if err != nil {
		return record{}, fmt.Errorf("read the state of a process: %w", err)
	}
	r := readRecord(e)
	p.remember(key, r)
	return r, nil
}

// publish replaces the state known by next, and remembers it. It returns ErrKeyChanged when another state has been
// published since known.
func (p *Process) publish(ctx context.Context, known, next record, causedBy ...string) error {
	payload, err := json.Marshal(next.state)
	if err != nil {
		return fmt.Errorf("encode the state of a process: %w", err)
	}
	opts := jetstream.PublishOptions{Key: next.state.ProcessID, CausedBy: causedBy, ExpectKeySequence: &known.sequence}
	if next.from != (source{}) {
		opts.Headers = map[string]string{headerSource: next.from.String()}
	}
	receipt, err := p.cfg.Bus.Publish(ctx, TopicProcessState, payload, opts)
	if err != nil {
		return fmt.Errorf("publish the state of a process: %w", err)
	}
	next.sequence = receipt.Sequence
	next.storedAt = p.cfg.Now().UnixNano()
	p.remember(next.state.ProcessID, next)
	return nil
}

// remember keeps the state of a living process and forgets that of any other.
func (p *Process) remember(key string, r record) {
	if r.state.Status != Alive {
		delete(p.living, key)
		return
	}
	if _, ok := p.living[key]; !ok && len(p.living) >= p.cfg.MaxProcesses {
		if !p.overflow {
			p.overflow = true
			p.cfg.Logger.LogAttrs(context.Background(), slog.LevelWarn, "more living processes than are kept in memory",
				slog.String("limit", "process_states"), slog.Int("max", p.cfg.MaxProcesses))
		}
		return
	}
	p.living[key] = r
}

// markStale publishes, once each, that processes are stale that were silent for StaleAfter. First it projects all
// heartbeats there are, so that what waits in the stream counts as heard.
func (p *Process) markStale(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.fill(ctx); err != nil {
		return err
	}
	before := p.cfg.Now().Add(-p.cfg.StaleAfter).UnixMilli()
	for key, r := range p.living {
		if err := p.expire(ctx, key, r, before); err != nil {
			return err
		}
	}
	if !p.overflow {
		return nil
	}
	return p.scanStates(ctx, func(key string, r record) error { return p.expire(ctx, key, r, before) })
}

// expire publishes that a process is stale if it lives and was last seen before the given time.
func (p *Process) expire(ctx context.Context, key string, r record, before int64) error {
	for r.state.Status == Alive && r.state.LastSeenTS < before {
		next := r
		next.state.Status = Stale
		err := p.publish(ctx, r, next)
		if !errors.Is(err, jetstream.ErrKeyChanged) {
			return err
		}
		// Another hub has a newer state of it: a heartbeat, or that it is stale.
		if r, err = p.read(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
