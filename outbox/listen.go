package outbox

import (
	"context"
	"fmt"
	"hash/fnv"
	"time"
)

// A transaction that calls pg_notify takes a lock of the whole PostgreSQL cluster at commit, which
// cut the throughput of 32 clients to a tenth. The trigger of the table therefore notifies only
// while a drainer sleeps. A sleeping drainer shows that by a session-level advisory lock.
// PostgreSQL releases the lock when the session ends, and transactions test the lock without
// reading or writing a row. Of several sleeping drainers, one holds the lock and all of them
// listen.

// drainerSleeps is the trigger condition that reports whether a drainer holds the lock. Concurrent
// transactions test it without blocking each other and keep no lock. The lock number is a literal,
// because every statement parses the expression again.
const drainerSleeps = `CASE WHEN pg_try_advisory_lock_shared({sleepers}) THEN NOT pg_advisory_unlock_shared({sleepers}) ELSE TRUE END`

// advisoryLock derives the number of an advisory lock from the table's name.
func advisoryLock(table, what string) int64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte("eventhub outbox " + what + table))
	return int64(h.Sum64()) //nolint:gosec // overflow is harmless
}

// Statements of a listening session. The session may hold its one advisory lock several times.
const (
	fallAsleep = `LISTEN "{channel}"; SELECT pg_try_advisory_lock({sleepers})`
	stayAsleep = `SELECT pg_try_advisory_lock({sleepers})`
	getUp      = `SELECT pg_advisory_unlock_all(); UNLISTEN *`
	stayAwake  = `SELECT 1`
	// isDirect fails behind a pooler, because a pooler invents the process ids that it reports.
	isDirect = `SELECT 1 / CAST(pg_backend_pid() = %d AS int)`
	// endsSoon limits how long PostgreSQL counts a hung or unreachable drainer as sleeping.
	endsSoon = `SELECT set_config(name, value, false) FROM pg_catalog.pg_settings s JOIN (VALUES ('idle_session_timeout', '60000'),
  ('tcp_keepalives_idle', '10'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '4'), ('tcp_user_timeout', '30000')) AS v (name, value) USING (name)`
)

// Timing of a listening session.
const (
	// stayEvery is the interval at which a sleeper tries to take over the lock of another sleeper.
	stayEvery = 5 * time.Second
	// listenWait is the timeout of one statement.
	listenWait = 15 * time.Second
)

var errPooler = fmt.Errorf("%w: connected through a pooler", ErrCannotListen)

// Listener listens for the notifications of an outbox table in PostgreSQL and wakes a sleeping
// drainer. It returns an error when ctx ends or its connection breaks.
type Listener func(ctx context.Context, table string, sleeper Sleeper) error

// PgxListener returns a Listener that uses pgx. It opens each connection with connect, uses the
// connection only to listen, and closes it:
//
//	outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, address) })
//
// The address must be that of the database itself. A transaction-level pooler does not forward
// notifications and would keep the lock, so PgxListener refuses to listen through one. T, N, and P
// are types of pgconn, which the compiler infers.
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
		for { // start asleep: records added earlier sent no notification
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

// listening is the session of a Listener.
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

// sleep listens until a notification arrives, wakes the drainer, and returns when the drainer is
// asleep again.
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
	case <-sleeper.Asleep: // discard a repeated signal sent while asleep
	default:
	}
	sleeper.Wake()
	if err := s.exec(ctx, getUp); err != nil {
		return err
	}
	for more := true; more; { // discard notifications that arrived before UNLISTEN
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

// notified waits for a notification and reports whether one arrived in time.
func (s *listening[C, T, N, P]) notified(ctx context.Context, wait time.Duration) (bool, error) {
	wctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	_, err := s.conn.WaitForNotification(wctx)
	if err != nil && ctx.Err() == nil && wctx.Err() != nil {
		return false, nil
	}
	return err == nil, err
}
