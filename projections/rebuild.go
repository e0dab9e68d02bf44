package projections

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"eventhub/jetstream"
)

const (
	// rebuildPoll is how often a rebuild looks how far it is.
	rebuildPoll = 100 * time.Millisecond
	// rebuildGrace is how long the old version is left alone after a swap: instances end it within milliseconds.
	rebuildGrace = 5 * time.Second
)

// Rebuild derives a projection anew from the first event that is left in its topic, beside the version that is live; when
// the new one has caught up, every instance goes over to it, and the old states and their group are removed. It returns once
// that is done. Until the swap nothing changes for anybody, whatever happens to the rebuild: the next one begins anew.
//
// Instances go over with the Apply that they have: those with an old one are to be ended, or replaced, before.
//
// Of two rebuilds of one projection at the same time the one that began first fails. A projection with a Store of its
// own must keep its versions apart, and remove old ones itself.
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
	// What rebuilds left that did not come to their end, or, if one is under way, what is in its way.
	if err := v.removeAll(ctx, left); err != nil {
		return fmt.Errorf("rebuild of projection %s: %w", p.Name, err)
	}
	if revision, err = v.build(ctx, live, next, revision); err != nil {
		v.giveUp(ctx, next)
		return fmt.Errorf("rebuild of projection %s: %w", p.Name, err)
	}
	p.Logger.LogAttrs(ctx, slog.LevelInfo, "a projection was rebuilt", slog.String("projection", p.Name), slog.Int("version", next))
	if err := pause(ctx, rebuildGrace); err != nil {
		return nil //nolint:nilerr // the rebuild is done; the next one removes what is left
	}
	if err := v.remove(ctx, live); err != nil {
		return err
	}
	if _, err := v.put(ctx, version{Version: next, Newest: next}, revision); err != nil && !errors.Is(err, jetstream.ErrKeyChanged) {
		return err
	}
	return nil
}

// build brings version next up to date, beside the live one, and makes it the one. It returns the revision of that.
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

// giveUp removes a version that was not finished, if that is known.
func (v *versions) giveUp(ctx context.Context, n int) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	at, _, err := v.current(ctx)
	if err == nil && at.Version != n {
		err = v.remove(ctx, n)
	}
	if err != nil {
		v.p.Logger.LogAttrs(ctx, slog.LevelWarn, "what a rebuild leaves is removed by the next one", slog.String("projection", v.p.Name), slog.Int("version", n), slog.Any("error", err))
	}
}

// awaitCaughtUp waits until a version has worked off what was stored when it was asked last.
func (v *versions) awaitCaughtUp(ctx context.Context, n int, revision uint64, ended <-chan struct{}) error {
	tick := time.NewTicker(rebuildPoll)
	defer tick.Stop()
	var goal uint64
	for {
		if _, now, err := v.current(ctx); err == nil && now != revision {
			return errors.New("another rebuild has begun")
		}
		b, err := v.bus.Group(v.p.Topic, v.p.groupOf(n)).Backlog(ctx)
		switch {
		case err == nil && b.Waiting == 0 && b.Leased == 0, err == nil && goal > 0 && b.Floor >= goal:
			return nil
		case err == nil && goal == 0:
			goal = b.Tail
		case err != nil && !errors.Is(err, jetstream.ErrNotFound): // not found: the group is being made
			v.p.Logger.LogAttrs(ctx, slog.LevelWarn, "how far a rebuild is cannot be read now", slog.String("projection", v.p.Name), slog.Any("error", err))
		}
		select {
		case <-ended:
			return errors.New("it ended early: see the log")
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// removeAll removes versions.
func (v *versions) removeAll(ctx context.Context, left []int) error {
	for _, n := range left {
		if err := v.remove(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes a version with its group.
func (v *versions) remove(ctx context.Context, n int) error {
	if err := v.bus.Group(v.p.Topic, v.p.groupOf(n)).Delete(ctx); err != nil {
		return fmt.Errorf("remove version %d of projection %s: %w", n, v.p.Name, err)
	}
	if v.p.Store != nil {
		return nil
	}
	return v.bus.Collections().Delete(ctx, StatesBucket(v.p.Name, n))
}
