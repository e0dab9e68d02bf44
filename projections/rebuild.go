package projections

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"eventhub/jetstream"
)

const (
	// rebuildPoll is the interval at which a rebuild checks its progress.
	rebuildPoll = 100 * time.Millisecond
	// rebuildGrace is how long the old version is kept after a swap. Running instances leave it
	// within milliseconds.
	rebuildGrace = 5 * time.Second
)

// Rebuild derives the states of a projection anew from the first event that its topic holds, beside
// the live version. Once the new version has caught up, every instance switches to it, and Rebuild
// removes the old states and their group. It returns when that is done. Until the switch, the live
// version is unaffected, whatever happens to the rebuild. After a failed rebuild, the next one
// starts from the beginning.
//
// Instances keep their Apply when they switch. Stop or replace instances with an outdated Apply
// before.
//
// If two rebuilds of a projection run at the same time, the one that began first fails. A
// projection with a custom Store must keep its versions apart and remove old ones itself.
func Rebuild(ctx context.Context, bus Bus, p Projection) error {
	if err := p.validate(); err != nil {
		return err
	}
	v := newVersions(bus, &p)
	if err := v.open(ctx); err != nil {
		return err
	}
	at, revision, err := v.current(ctx)
	if err != nil {
		return err
	}
	left, live, next := at.Left, at.Version, max(at.Version, at.Newest)+1
	at.Newest, at.Left = next, append(slices.Clone(left), next)
	if revision, err = v.put(ctx, at, revision); err != nil {
		return fmt.Errorf("rebuild of projection %s: %w", p.Name, err)
	}
	// Remove the versions of unfinished rebuilds. If another rebuild is running, this makes it
	// fail.
	if err := v.removeAll(ctx, left); err != nil {
		return fmt.Errorf("rebuild of projection %s: %w", p.Name, err)
	}
	if revision, err = v.build(ctx, live, next, revision); err != nil {
		v.giveUp(ctx, next)
		return fmt.Errorf("rebuild of projection %s: %w", p.Name, err)
	}
	p.Logger.LogAttrs(ctx, slog.LevelInfo, "projection rebuilt", slog.String("projection", p.Name), slog.Int("version", next))
	if err := pause(ctx, cmp.Or(p.grace, rebuildGrace)); err != nil {
		return nil //nolint:nilerr // the rebuild is done; the next one removes what remains
	}
	if err := v.remove(ctx, live); err != nil {
		return err
	}
	if _, err := v.put(ctx, version{Version: next, Newest: next}, revision); err != nil && !errors.Is(err, jetstream.ErrKeyChanged) {
		return err
	}
	return nil
}

// build brings version next up to date and makes it the live version. It returns the new revision
// of the version entry.
func (v *versions) build(ctx context.Context, live, next int, revision uint64) (uint64, error) {
	building, stop := context.WithCancel(ctx)
	defer stop()
	var ran error
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		ran = v.runVersion(building, next)
	}()
	err := v.awaitCaughtUp(ctx, next, revision, ended)
	if err == nil {
		revision, err = v.put(ctx, version{Version: next, Newest: next, Left: []int{live}}, revision)
	}
	stop()
	<-ended
	if ran != nil && err != nil && ctx.Err() == nil {
		err = ran
	}
	return revision, err
}

// giveUp removes an unfinished version, unless the version may have become live.
func (v *versions) giveUp(ctx context.Context, n int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	at, _, err := v.current(ctx)
	if err == nil && at.Version != n {
		err = v.remove(ctx, n)
	}
	if err != nil {
		v.p.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to remove an unfinished rebuild; the next rebuild will remove it", slog.String("projection", v.p.Name), slog.Int("version", n), slog.Any("error", err))
	}
}

// awaitCaughtUp waits until a version has processed all events that were stored when awaitCaughtUp
// first read its backlog.
func (v *versions) awaitCaughtUp(ctx context.Context, n int, revision uint64, ended <-chan struct{}) error {
	tick := time.NewTicker(rebuildPoll)
	defer tick.Stop()
	var goal uint64
	for {
		if _, now, err := v.current(ctx); err == nil && now != revision {
			return errors.New("another rebuild has started")
		}
		b, err := v.bus.Group(v.p.Topic, v.p.groupOf(n)).Backlog(ctx)
		switch {
		case err == nil && b.Waiting == 0 && b.Leased == 0, err == nil && goal > 0 && b.Floor >= goal:
			return nil
		case err == nil && goal == 0:
			goal = b.Tail
		case err != nil && !errors.Is(err, jetstream.ErrNotFound): // the group does not exist yet
			v.p.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to read the progress of a rebuild; retrying", slog.String("projection", v.p.Name), slog.Any("error", err))
		}
		select {
		case <-ended:
			return errors.New("the new version stopped early; see the log")
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// removeAll removes the given versions.
func (v *versions) removeAll(ctx context.Context, left []int) error {
	for _, n := range left {
		if err := v.remove(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes a version and its group.
func (v *versions) remove(ctx context.Context, n int) error {
	if err := v.bus.Group(v.p.Topic, v.p.groupOf(n)).Delete(ctx); err != nil && !errors.Is(err, jetstream.ErrNotFound) {
		return fmt.Errorf("remove version %d of projection %s: %w", n, v.p.Name, err)
	}
	if v.p.Store != nil {
		return nil
	}
	return v.bus.Collections().Delete(ctx, StatesBucket(v.p.Name, n))
}
