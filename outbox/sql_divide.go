package outbox

import (
	"context"
	"database/sql"
	"time"
)

// refuseTime is the time within which a database refuses a statement. A later error means that the
// database is busy.
const refuseTime = time.Second

// refusal is an item that the database refused, for example because of a trigger of the user or a
// damaged page.
type refusal[T any] struct {
	item T
	err  error
}

// refused reports whether a statement that began at the given time and failed was refused because
// of its rows, so that it may succeed without some of them.
func refused(ctx context.Context, db *sql.DB, began time.Time) bool {
	return ctx.Err() == nil && time.Since(began) < refuseTime && db.PingContext(ctx) == nil
}

// divide calls f with all items. When the database refuses them, divide halves the list until only
// the refused items remain, and returns those. After any other error it returns that error.
func divide[T any](ctx context.Context, db *sql.DB, items []T, f func([]T) error) ([]refusal[T], error) {
	if len(items) == 0 {
		return nil, nil
	}
	began := time.Now()
	err := f(items)
	switch {
	case err == nil:
		return nil, nil
	case !refused(ctx, db, began):
		return nil, err
	case len(items) == 1:
		return []refusal[T]{{items[0], err}}, nil
	}
	var all []refusal[T]
	half := len(items) / 2
	for _, part := range [][]T{items[:half], items[half:]} {
		some, err := divide(ctx, db, part, f)
		if err != nil {
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}
