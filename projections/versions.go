package projections

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// versionsBucket holds the live version of each projection that was rebuilt.
const versionsBucket = "eventhub_projections"

// maxVersion is the highest version number for which the longest group names leave room.
const maxVersion = 999_999

// version is an entry of versionsBucket. A projection without an entry is at version 1.
type version struct {
	Version int `json:"version"`
	// Newest is the highest version number given to a rebuild. Numbers are never reused, because
	// parts of a removed group may outlive it and disturb a new group of the same name.
	Newest int `json:"newest,omitempty"`
	// Left lists versions that are not live but may still exist, from rebuilds that are running or
	// did not finish.
	Left []int `json:"left,omitempty"`
}

// groupOf returns the group of a version of the projection.
func (p *Projection) groupOf(version int) string {
	if version == 1 {
		return p.Group
	}
	return p.Group + ".v" + strconv.Itoa(version)
}

// versions runs the live version of a projection.
type versions struct {
	bus   Bus
	p     *Projection
	names Collection
}

func newVersions(bus Bus, p *Projection) *versions { return &versions{bus: bus, p: p} }

func (v *versions) open(ctx context.Context) (err error) {
	v.names, err = v.bus.Collections().Open(ctx, versionsBucket)
	return err
}

// current returns the live version and the revision of its entry.
func (v *versions) current(ctx context.Context) (version, uint64, error) {
	e, err := v.names.Get(ctx, v.p.Name)
	if err != nil {
		return version{}, 0, err
	}
	n, err := readVersion(e)
	return n, e.Revision, err
}

func readVersion(e *jetstream.Entry) (version, error) {
	if e.Value == nil {
		return version{Version: 1}, nil
	}
	var stored version
	if err := json.Unmarshal(e.Value, &stored); err != nil || stored.Version < 1 {
		return version{}, fmt.Errorf("projections: entry %q of bucket %s is unreadable; delete it to return to version 1", e.Key, versionsBucket)
	}
	return stored, nil
}

// put replaces the entry at the given revision and returns the new revision.
func (v *versions) put(ctx context.Context, next version, revision uint64) (uint64, error) {
	value, err := json.Marshal(next)
	if err != nil {
		return 0, err
	}
	return v.names.Put(ctx, v.p.Name, value, nil, revision)
}

// errSwapped ends a version that is no longer live.
var errSwapped = errors.New("projections: another version is live now")

// run runs the live version, whichever it is, until ctx ends.
func (v *versions) run(ctx context.Context) error {
	if err := insist(ctx, v.p.Logger, "open the versions", v.open); err != nil {
		return v.end(ctx, err)
	}
	for ctx.Err() == nil {
		var n version
		err := insist(ctx, v.p.Logger, "read the version", func(ctx context.Context) (err error) {
			n, _, err = v.current(ctx)
			return err
		})
		if err != nil {
			return v.end(ctx, err)
		}
		if err := v.runUntilSwapped(ctx, n.Version); err != nil && !errors.Is(err, errSwapped) {
			return v.end(ctx, err)
		}
	}
	return nil
}

// end returns the error that Run returns: nil if ctx has ended.
func (v *versions) end(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the end of ctx is a normal stop
	}
	return fmt.Errorf("projection %s: %w", v.p.Name, err)
}

// runUntilSwapped runs version n. It returns errSwapped when another version becomes live.
func (v *versions) runUntilSwapped(ctx context.Context, n int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := make(chan struct{})
	defer func() { cancel(nil); <-watch }()
	go func() {
		defer close(watch)
		for ctx.Err() == nil {
			err := v.names.Follow(ctx, v.p.Name, func(e *jetstream.Entry) error {
				if now, err := readVersion(e); err == nil && now.Version != n {
					cancel(errSwapped)
				}
				return nil
			})
			if ctx.Err() == nil {
				v.p.Logger.LogAttrs(ctx, slog.LevelWarn, "failed to watch the version of a projection; retrying", slog.String("projection", v.p.Name), slog.Any("error", err))
				_ = pause(ctx, retryMax)
			}
		}
	}()
	err := v.runVersion(ctx, n)
	if errors.Is(context.Cause(ctx), errSwapped) {
		return errSwapped
	}
	return err
}

// runVersion runs version n until ctx ends.
func (v *versions) runVersion(ctx context.Context, n int) error {
	var a *applier
	from := v.p.From
	if n > 1 {
		from = jetstream.FromEarliest
	}
	err := insist(ctx, v.p.Logger, "open the states", func(ctx context.Context) error {
		store, err := v.p.store(ctx, v.bus, n)
		if err != nil {
			return err
		}
		a = newApplier(v.bus, v.p, store)
		if n == 1 && v.p.Snapshot != "" {
			from, err = a.warm(ctx, v.p.groupOf(n), from)
		}
		return err
	})
	if err != nil {
		return err
	}
	if v.p.Key == nil {
		return runKeyed(ctx, a, v.p.groupOf(n), from)
	}
	o := newOrdered(a)
	return o.run(ctx, v.p.groupOf(n), from)
}

// store opens the store for the states of a version.
func (p *Projection) store(ctx context.Context, bus Bus, version int) (Store, error) {
	if p.Store != nil {
		var store Store
		err := panics.Call(p.Logger, "Store", func() (err error) {
			store, err = p.Store(ctx, version)
			return err
		})
		return store, err
	}
	return OpenStates(ctx, bus, StatesBucket(p.Name, version))
}

// View reads the states of the live version of a projection. Its methods may be called
// concurrently.
type View struct {
	v *versions

	mu     sync.Mutex
	opened int
	states *States // states of version opened
}

// OpenView returns a view of a projection that keeps its states in the default Store.
func OpenView(ctx context.Context, bus Bus, projection string) (*View, error) {
	v := newVersions(bus, &Projection{Name: projection})
	if err := v.open(ctx); err != nil {
		return nil, err
	}
	return &View{v: v}, nil
}

// current returns the live version and its states.
func (w *View) current(ctx context.Context) (int, *States, error) {
	n, _, err := w.v.current(ctx)
	if err != nil {
		return 0, nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.opened != n.Version {
		states, err := OpenStates(ctx, w.v.bus, StatesBucket(w.v.p.Name, n.Version))
		if err != nil {
			return 0, nil, err
		}
		w.opened, w.states = n.Version, states
	}
	return n.Version, w.states, nil
}

// Get returns the state of a key, or the zero State if there is none.
func (w *View) Get(ctx context.Context, key string) (State, error) {
	for {
		n, states, err := w.current(ctx)
		if err != nil {
			return State{}, err
		}
		s, err := states.Load(ctx, key)
		if err == nil && s.Revision > 0 {
			return s, nil
		}
		// The states may be missing because a rebuild removed the version.
		now, _, again := w.v.current(ctx)
		if again != nil || now.Version == n {
			return s, cmp.Or(err, again)
		}
	}
}

// ErrRebuilt is returned by View.Each if a rebuild happened meanwhile and may have removed states
// before they were read.
var ErrRebuilt = errors.New("projections: the projection was rebuilt while its states were read; read them again")

// Each calls f for every key that has a state. It stops at the first error of f and returns it. All
// states are of the version that is live at the call. A rebuild removes that version a few seconds
// after it finishes, so a longer read fails, at the latest with ErrRebuilt.
func (w *View) Each(ctx context.Context, f func(key string, s State) error) error {
	began := time.Now()
	n, states, err := w.current(ctx)
	if err != nil {
		return err
	}
	if err := states.Each(ctx, f); err != nil {
		return err
	}
	if time.Since(began) < rebuildGrace/2 {
		return nil
	}
	now, _, err := w.v.current(ctx)
	if err == nil && now.Version != n {
		return ErrRebuilt
	}
	return err
}
