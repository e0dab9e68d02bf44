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

// Listener waits for the notifications of a PostgreSQL channel: it listens, calls listening, and then notified for each
// notification, until ctx ends or its connection breaks. It returns why it ended.
type Listener func(ctx context.Context, channel string, notified func()) error

// PgxListener makes a Listener of connections of pgx. Each is made by connect, used for LISTEN alone, and closed:
//
//	outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, address) })
//
// The address must be that of the database itself: a pooler that deals connections out by transaction passes no
// notifications on. T and N are types of pgconn, which the compiler finds by itself.
func PgxListener[C pgxConn[T, N], T, N any](connect func(context.Context) (C, error)) Listener {
	return func(ctx context.Context, channel string, notified func()) error {
		conn, err := connect(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
		if _, err := conn.Exec(ctx, `LISTEN "`+channel+`"`); err != nil {
			return err
		}
		for {
			notified() // also once at first: what was added before LISTEN notified nobody
			if _, err := conn.WaitForNotification(ctx); err != nil {
				return err
			}
		}
	}
}

type pgxConn[T, N any] interface {
	Exec(ctx context.Context, query string, args ...any) (T, error)
	WaitForNotification(ctx context.Context) (N, error)
	Close(ctx context.Context) error
}
