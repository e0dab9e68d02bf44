package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"eventhub/jetstream"
	"eventhub/ops"
)

// A projection makes no progress when it has had events to project for stalledAfter, and has
// settled none. The hub looks every progressEvery.
const (
	progressEvery = 5 * time.Second
	stalledAfter  = 30 * time.Second
)

// progress watches whether a projection of the hub comes forward: whoever holds its events, or
// keeps it from its group, is noticed by that.
type progress struct {
	name         string // of the projection
	backlog      func(context.Context) (jetstream.Backlog, error)
	every, after time.Duration
	metrics      *ops.Metrics
	log          *slog.Logger

	stalled atomic.Int64 // for how long, a time.Duration; 0 while it comes forward
}

func newProgress(name string, group jetstream.Group, metrics *ops.Metrics, log *slog.Logger) *progress {
	metrics.Projection(name)
	return &progress{name: name, backlog: group.Backlog, every: progressEvery, after: stalledAfter, metrics: metrics, log: log}
}

// String returns the state for /readyz.
func (p *progress) String() string {
	if d := time.Duration(p.stalled.Load()); d > 0 {
		return fmt.Sprintf("no progress for %v; see the log", d.Round(time.Second))
	}
	return ops.PartOK
}

// watch looks until ctx ends.
func (p *progress) watch(ctx context.Context) {
	tick := time.NewTicker(p.every)
	defer tick.Stop()
	p.metrics.ProjectionStalled(p.name, 0)
	var floor uint64
	came := time.Now() // when it last came forward
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asking, cancel := context.WithTimeout(ctx, p.every)
		b, err := p.backlog(asking)
		cancel()
		if ctx.Err() != nil {
			return
		}
		if err == nil && (b.Waiting+b.Leased == 0 || b.Floor != floor) {
			came, floor = time.Now(), b.Floor
		}
		stuck := time.Since(came)
		if stuck < p.after {
			stuck = 0
		}
		was := p.stalled.Swap(int64(stuck))
		p.metrics.ProjectionStalled(p.name, stuck)
		switch {
		case was == 0 && stuck > 0:
			why := slog.Uint64("waiting", b.Waiting+b.Leased)
			if errors.Is(err, jetstream.ErrNotFound) {
				err = errors.New("its group does not exist: it could not be made")
			}
			p.log.LogAttrs(ctx, slog.LevelWarn, "projection makes no progress", slog.String("projection", p.name), why, slog.Any("error", err))
		case was > 0 && stuck == 0:
			p.log.LogAttrs(ctx, slog.LevelInfo, "projection makes progress again", slog.String("projection", p.name))
		}
	}
}
