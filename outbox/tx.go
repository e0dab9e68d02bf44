package outbox

import (
	"context"
	"database/sql"
)

// Tx is what Add writes to: the caller's *sql.Tx. A *sql.Conn and a *sql.DB will do too; then the record is in whatever
// transaction that one has, or in one of its own.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// Pgx makes a Tx of a transaction of pgx (pgx.Tx; a *pgx.Conn or *pgxpool.Pool will do too):
//
//	err := store.Add(ctx, outbox.Pgx(tx), record)
//
// T is pgconn.CommandTag, which the compiler finds by itself.
func Pgx[T any](tx interface {
	Exec(ctx context.Context, query string, args ...any) (T, error)
},
) Tx {
	return pgxTx(func(ctx context.Context, query string, args []any) error {
		_, err := tx.Exec(ctx, query, args...)
		return err
	})
}

type pgxTx func(ctx context.Context, query string, args []any) error

func (f pgxTx) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return nil, f(ctx, query, args)
}
