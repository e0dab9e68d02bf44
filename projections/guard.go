package projections

import (
	"context"
	"errors"
	"log/slog"

	"eventhub/jetstream"
	"eventhub/jetstream/panics"
)

// guardedStore converts panics of a Store to errors.
type guardedStore struct {
	Store
	log *slog.Logger
}

func (g guardedStore) Load(ctx context.Context, key string) (s State, err error) {
	err = panics.Call(g.log, "Store.Load", func() (err error) {
		s, err = g.Store.Load(ctx, key)
		return err
	})
	return s, err
}

func (g guardedStore) Save(ctx context.Context, key string, old, next State, cause *jetstream.Event) (s State, err error) {
	err = panics.Call(g.log, "Store.Save", func() (err error) {
		s, err = g.Store.Save(ctx, key, old, next, cause)
		return err
	})
	return s, err
}

func (g guardedStore) loadMany(ctx context.Context, keys []string) (states map[string]State, err error) {
	many, ok := g.Store.(manyStore)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	err = panics.Call(g.log, "Store.LoadMany", func() (err error) {
		states, err = many.loadMany(ctx, keys)
		return err
	})
	return states, err
}

// guardedTable converts panics of a Table to errors.
type guardedTable struct {
	table Table
	log   *slog.Logger
}

func (g guardedTable) Checkpoint(ctx context.Context) (p Checkpoint, err error) {
	err = panics.Call(g.log, "Table.Checkpoint", func() (err error) {
		p, err = g.table.Checkpoint(ctx)
		return err
	})
	return p, err
}

func (g guardedTable) Commit(ctx context.Context, from, to Checkpoint, changes []Change) error {
	return panics.Call(g.log, "Table.Commit", func() error { return g.table.Commit(ctx, from, to, changes) })
}

// guardedObserver logs panics of an Observer, which do not affect the projection.
type guardedObserver struct {
	observer Observer
	log      *slog.Logger
}

// guardObserver wraps an Observer, which may be nil.
func guardObserver(o Observer, log *slog.Logger) Observer {
	if o == nil {
		return nobody{}
	}
	return guardedObserver{o, log}
}

func (g guardedObserver) Projected(projection string, outcome Outcome) {
	panics.Run(g.log, "Observer.Projected", func() { g.observer.Projected(projection, outcome) })
}

func (g guardedObserver) LimitReached(limit string) {
	panics.Run(g.log, "Observer.LimitReached", func() { g.observer.LimitReached(limit) })
}
