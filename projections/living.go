package projections

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"

	"eventhub/jetstream"
)

// This file writes the states. load and markStale take p.mu; for all others it is held.

// maxCause is the longest id that the bus takes in caused_by, in bytes. Those that it gives are shorter, but native
// clients give what they like.
const maxCause = 1_024

// load reads the states of the living processes, so that those that fell silent while no hub ran are noticed.
func (p *Process) load(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.scanStates(ctx, func(key string, r record) error {
		p.remember(ctx, key, r)
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
		err := p.publish(ctx, known, record{state: state, from: source{e.Stream, e.Sequence}}, e)
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
	p.remember(ctx, key, r)
	return r, nil
}

// publish replaces the state known by next, which cause led to (nil: the clock), and remembers it. It returns
// ErrKeyChanged when another state has been published since known.
func (p *Process) publish(ctx context.Context, known, next record, cause *jetstream.Event) error {
	payload, err := json.Marshal(next.state)
	if err != nil {
		return fmt.Errorf("encode the state of a process: %w", err)
	}
	opts := jetstream.PublishOptions{Key: next.state.ProcessID, ExpectKeySequence: &known.sequence}
	if cause != nil && len(cause.ID) <= maxCause {
		opts.CausedBy = []string{cause.ID}
	}
	if next.from != (source{}) {
		opts.Headers = map[string]string{headerSource: next.from.String()}
	}
	receipt, err := p.cfg.Bus.Publish(ctx, TopicProcessState, payload, opts)
	if err != nil {
		return fmt.Errorf("publish the state of a process: %w", err)
	}
	next.sequence = receipt.Sequence
	next.storedAt = p.cfg.Now().UnixNano()
	p.remember(ctx, next.state.ProcessID, next)
	return nil
}

// remember keeps the state of a living process and forgets that of any other.
func (p *Process) remember(ctx context.Context, key string, r record) {
	if r.state.Status != Alive {
		delete(p.living, key)
		return
	}
	if _, ok := p.living[key]; !ok && len(p.living) >= p.cfg.MaxProcesses {
		if !p.overflow {
			p.overflow = true
			p.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "more living processes than are kept in memory",
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
		err := p.publish(ctx, r, next, nil)
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
