package outbox

import (
	"context"
	"database/sql"
)

// Tx is the transaction that Add writes to, normally the caller's *sql.Tx. A *sql.Conn or *sql.DB
// also works: the record is then added in the connection's current transaction, or in a transaction
// of its own.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
}

// Pgx returns a Tx for a pgx transaction. tx may also be a *pgx.Conn or *pgxpool.Pool.
//
//	err := store.Add(ctx, outbox.Pgx(tx), record)
//
// T is pgconn.CommandTag, which the compiler infers.
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
