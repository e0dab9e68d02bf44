package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"eventhub/jetstream"
)

// This file goes through the heartbeats in the order of their stream. catchUp takes p.mu; for all others it is held.

const (
	// fillTries is how often a delivered heartbeat is looked for in its stream, over 3 s in all.
	fillTries = 6
	// scanOverlap is how far a read of the heartbeats goes back before the last one projected, in case the clock of
	// the stream's server was set back in between.
	scanOverlap = time.Second
)

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

// reach projects all heartbeats up to e.
func (p *Process) reach(ctx context.Context, e *jetstream.Event) error {
	if p.passed(e) {
		return nil
	}
	if next := (source{e.Stream, e.Sequence - 1}); next != p.position {
		if err := p.fillTo(ctx, e); err != nil {
			return err
		}
		if p.passed(e) {
			return nil
		}
	}
	return p.advance(ctx, e)
}

// fillTo projects the stored heartbeats after position until e, which was delivered, is among them. A replica that lags
// may not show it at once. When it stays away, it was removed from the stream, and all before it as well.
func (p *Process) fillTo(ctx context.Context, e *jetstream.Event) error {
	wait := retryFirst
	for range fillTries {
		if err := p.fill(ctx); err != nil {
			return err
		}
		if p.passed(e) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		wait *= 2
	}
	return nil
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
		switch err := p.project(ctx, h, e); {
		case isRefused(err):
			// Nothing that a heartbeat may hold leads here; if something does, the others must not wait for it.
			p.cfg.Logger.LogAttrs(ctx, slog.LevelError, "a heartbeat was left out", slog.String("id", e.ID), slog.String("cause", err.Error()))
		case err != nil:
			return err
		}
	}
	p.position, p.storedAt = source{e.Stream, e.Sequence}, e.StoredAt
	return nil
}
