package outbox

import (
	"context"
	"fmt"
	"hash/fnv"
	"time"
)

// A transaction that notifies takes a lock of the whole PostgreSQL cluster when it commits, so that 32 clients commit a tenth of
// what they do otherwise. So the trigger of the table notifies only while a drainer sleeps, which one says by an advisory lock
// that its session holds: it is gone at the moment when the drainer is, and no transaction has to read or write a row to know.
// Among several that sleep one has the lock, and all of them listen.

// drainerSleeps, in a trigger, says that a drainer has the lock. Transactions that ask at the same time do not hinder each other,
// and keep nothing. The number is a constant, for the expression is read anew by each statement.
const drainerSleeps = `CASE WHEN pg_try_advisory_lock_shared({sleepers}) THEN NOT pg_advisory_unlock_shared({sleepers}) ELSE TRUE END`

// advisoryLock is the number of an advisory lock of a table.
func advisoryLock(table, what string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("eventhub outbox " + what + table))
	return int64(h.Sum64()) //nolint:gosec // any number will do
}

// Statements of a session that listens. It may hold the lock several times, and has no other.
const (
	fallAsleep = `LISTEN "{channel}"; SELECT pg_try_advisory_lock({sleepers})`
	stayAsleep = `SELECT pg_try_advisory_lock({sleepers})`
	getUp      = `SELECT pg_advisory_unlock_all(); UNLISTEN *`
	stayAwake  = `SELECT 1`
	// A pooler makes up the process ids that it tells its clients.
	isDirect = `SELECT 1 / CAST(pg_backend_pid() = %d AS int)`
	// A drainer that stands still, or whose host is gone, is not taken for one that sleeps for longer than this.
	endsSoon = `SELECT set_config(name, value, false) FROM pg_catalog.pg_settings s JOIN (VALUES ('idle_session_timeout', '60000'),
  ('tcp_keepalives_idle', '10'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '4'), ('tcp_user_timeout', '30000')) AS v (name, value) USING (name)`
)

// Waits of a session that listens.
const (
	// stayEvery is how often a sleeper tries to get the lock that another had.
	stayEvery = 5 * time.Second
	// listenWait bounds a statement.
	listenWait = 15 * time.Second
)

var errPooler = fmt.Errorf("%w: there is a pooler between the drainer and PostgreSQL", ErrCannotListen)

// Listener waits for the notifications of an outbox in a table of PostgreSQL, and wakes a drainer that sleeps, until ctx ends or
// its connection breaks. It returns why it ended.
type Listener func(ctx context.Context, table string, sleeper Sleeper) error

// PgxListener makes a Listener of connections of pgx. Each is made by connect, used for listening alone, and closed:
//
//	outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, address) })
//
// The address must be that of the database itself: a pooler that deals connections out by transaction passes no
// notifications on, and would keep the lock. Where there is one in between, nothing is listened to. T, N and P are types of pgconn,
// which the compiler finds by itself.
func PgxListener[C pgxConn[T, N, P], T, N any, P pgxBackend](connect func(context.Context) (C, error)) Listener {
	return func(ctx context.Context, table string, sleeper Sleeper) error {
		conn, err := connect(ctx)
		if err != nil {
			return err
		}
		defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
		s := &listening[C, T, N, P]{conn: conn, table: table}
		if err := s.exec(ctx, endsSoon); err != nil {
			return err
		}
		if s.exec(ctx, fmt.Sprintf(isDirect, conn.PgConn().PID())) != nil {
			if err := s.exec(ctx, stayAwake); err != nil {
				return err
			}
			return errPooler
		}
		for { // it begins asleep: what was added before notified nobody
			if err := s.sleep(ctx, sleeper); err != nil {
				return err
			}
		}
	}
}

type pgxConn[T, N any, P pgxBackend] interface {
	Exec(ctx context.Context, query string, args ...any) (T, error)
	WaitForNotification(ctx context.Context) (N, error)
	Close(ctx context.Context) error
	PgConn() P
}

type pgxBackend interface{ PID() uint32 }

// listening is a session that listens while the drainer sleeps.
type listening[C pgxConn[T, N, P], T, N any, P pgxBackend] struct {
	conn  C
	table string
}

func (s *listening[C, T, N, P]) exec(ctx context.Context, statements string) error {
	ctx, cancel := context.WithTimeout(ctx, listenWait)
	defer cancel()
	_, err := s.conn.Exec(ctx, inTable(s.table, statements))
	return err
}

// sleep listens until there is something to wake the drainer for, and returns when it sleeps again.
func (s *listening[C, T, N, P]) sleep(ctx context.Context, sleeper Sleeper) error {
	if err := s.exec(ctx, fallAsleep); err != nil {
		return err
	}
	sleeper.Listening()
	for {
		notified, err := s.notified(ctx, stayEvery)
		if err != nil {
			return err
		}
		if notified {
			break
		}
		if err := s.exec(ctx, stayAsleep); err != nil {
			return err
		}
	}
	select {
	case <-sleeper.Asleep: // it has said so again, while it was asleep
	default:
	}
	sleeper.Wake()
	if err := s.exec(ctx, getUp); err != nil {
		return err
	}
	for more := true; more; { // those that came before the session had ended to listen
		more, _ = s.notified(ctx, 0)
	}
	for {
		select {
		case <-sleeper.Asleep:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(stayEvery):
			if err := s.exec(ctx, stayAwake); err != nil {
				return err
			}
		}
	}
}

// notified waits for a notification, and reports whether one came in time.
func (s *listening[C, T, N, P]) notified(ctx context.Context, wait time.Duration) (bool, error) {
	wctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	_, err := s.conn.WaitForNotification(wctx)
	if err != nil && ctx.Err() == nil && wctx.Err() != nil {
		return false, nil
	}
	return err == nil, err
}
