package inbox

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"eventhub/jetstream"
	"eventhub/jetstream/pacedlog"
	"eventhub/outbox"
	"eventhub/outbox/internal/sqltext"
)

// DefaultTable is the default name of the table.
const DefaultTable = "inbox"

// Expired marks are removed while new ones are made, more of them than new ones: cleanBatch at most
// after every cleanEvery.
const (
	cleanEvery = 100
	cleanBatch = 200
	cleanWait  = 5 * time.Second
)

// SQLConfig configures an SQL store.
type SQLConfig struct {
	// Dialect is the dialect of the database. Required. The store needs SQLite 3.42 or PostgreSQL
	// 13 or newer.
	Dialect outbox.Dialect
	// DB is the database in which handlers have their effects. Required. The caller owns it. Open
	// SQLite with WAL, a busy timeout and _txlock=immediate, as outbox.SQLConfig describes.
	DB *sql.DB
	// Table is the name of the table: 1 to 40 lower-case letters, digits, and underscores. Defaults
	// to DefaultTable.
	Table string
	// TTL is how long an event is remembered, at least 1 s. Defaults to DefaultTTL.
	TTL time.Duration
	// Logger receives what the store could not do. By default, nothing is logged.
	Logger *slog.Logger
}

// SQL is a store in a table of an SQL database. Its methods may be called concurrently, also by
// several processes. It needs no closing.
type SQL struct {
	db      *sql.DB
	dialect outbox.Dialect
	table   string
	ttl     time.Duration
	often   *pacedlog.Log
	marks   atomic.Int64 // made since the last Clean

	mark, seen, clean string // queries
}

// NewSQL returns a store. It does not access the database; Migrate creates the table.
func NewSQL(cfg SQLConfig) (*SQL, error) {
	fail := func(err error) (*SQL, error) { return nil, fmt.Errorf("inbox: SQL store: %w", err) }
	ttl, err := validTTL(cfg.TTL)
	if err != nil {
		return fail(err)
	}
	if cfg.Table == "" {
		cfg.Table = DefaultTable
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Dialect != outbox.SQLite && cfg.Dialect != outbox.PostgreSQL {
		return fail(fmt.Errorf("dialect %q: must be sqlite or postgres", cfg.Dialect))
	}
	if cfg.DB == nil {
		return fail(errors.New("no DB is given"))
	}
	if err := sqltext.ValidTable(cfg.Table, cfg.Dialect == outbox.SQLite); err != nil {
		return fail(err)
	}
	s := &SQL{db: cfg.DB, dialect: cfg.Dialect, table: cfg.Table, ttl: ttl, often: pacedlog.New(cfg.Logger)}
	// A mark that has expired counts as none, whether or not it was removed.
	s.mark = s.query(`INSERT INTO {table} AS o (topic, grp, id, expires) VALUES (?, ?, ?, {now} + ?)
ON CONFLICT (topic, grp, id) DO UPDATE SET expires = excluded.expires WHERE o.expires <= {now}`)
	s.seen = s.query("SELECT COUNT(*) FROM {table} WHERE topic = ? AND grp = ? AND id = ? AND expires > {now}")
	s.clean = s.query("DELETE FROM {table} WHERE (topic, grp, id) IN (SELECT topic, grp, id FROM {table} WHERE expires <= {now} LIMIT ?)")
	if cfg.Dialect == outbox.PostgreSQL {
		s.clean = s.query("DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE expires <= {now} LIMIT ? FOR UPDATE SKIP LOCKED))")
	}
	return s, nil
}

func (s *SQL) query(text string) string {
	now := sqltext.SQLiteNow
	if s.dialect == outbox.PostgreSQL {
		text, now = sqltext.Number(text), sqltext.PostgreSQLNow
	}
	return strings.NewReplacer("{table}_", s.table+"_", "{table}", `"`+s.table+`"`, "{now}", now).Replace(text)
}

// Migrate creates the table and its index unless they exist. It may be called at every start, by
// several processes.
func (s *SQL) Migrate(ctx context.Context) error {
	table := `CREATE TABLE IF NOT EXISTS {table} (
  topic   TEXT NOT NULL,
  grp     TEXT NOT NULL,
  id      TEXT NOT NULL,
  expires BIGINT NOT NULL, -- epoch milliseconds
  PRIMARY KEY (topic, grp, id)
)`
	if s.dialect == outbox.SQLite {
		table += " WITHOUT ROWID"
	}
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("inbox: migrate table %s: %w", s.table, err)
	}
	defer func() { _ = tx.Rollback() }() // of no effect after the commit
	statements := []string{table, "CREATE INDEX IF NOT EXISTS {table}_expires ON {table} (expires)"}
	// two processes that create a table at once disturb each other
	if s.dialect == outbox.PostgreSQL {
		statements = append([]string{"SELECT pg_advisory_xact_lock(hashtext('eventhub inbox'))"}, statements...)
	}
	for _, statement := range statements {
		if _, err := tx.ExecContext(ctx, s.query(statement)); err != nil {
			return fmt.Errorf("inbox: migrate table %s: %w", s.table, err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("inbox: migrate table %s: %w", s.table, err)
	}
	return nil
}

// Handle returns a handler for Bus.Consume that calls handler once for each event of a group.
// handler has its effects in tx, and neither commits nor rolls it back: the transaction is
// committed with the mark of the event when handler returns nil, and rolled back when it returns an
// error or panics, or when the lease has ended. If two handlers get the same event, the second
// waits for the transaction of the first, and then has nothing to do.
func (s *SQL) Handle(group string, handler func(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error) func(context.Context, *jetstream.Delivery) error {
	return func(ctx context.Context, d *jetstream.Delivery) error {
		first, err := s.once(ctx, group, &d.Event, handler)
		if err != nil {
			if own, ok := errors.AsType[*failure](err); ok && ctx.Err() == nil {
				s.often.Log(ctx, slog.LevelWarn, "failed to mark an event; it comes again", d.Event.Topic+"::"+group, slog.String("topic", d.Event.Topic), slog.String("group", group),
					slog.String("id", d.Event.ID), slog.String("failed", own.what), slog.Any("error", own.err))
			}
			return err
		}
		if first && s.marks.Add(1)%cleanEvery == 0 {
			s.cleanSome(ctx)
		}
		return nil
	}
}

// once runs handler unless the event has its mark.
func (s *SQL) once(ctx context.Context, group string, e *jetstream.Event, handler func(context.Context, *sql.Tx, *jetstream.Event) error) (first bool, err error) {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return false, &failure{"cannot begin a transaction", err}
	}
	defer func() { _ = tx.Rollback() }() // of no effect after the commit
	// the mark comes first: whoever else has the event waits here
	if first, err = s.Mark(ctx, tx, e.Topic, group, e.ID); err != nil || !first {
		return false, err
	}
	if err := handler(ctx, tx, e); err != nil {
		return false, err
	}
	if err := tx.Commit(); err != nil {
		return false, &failure{"cannot commit the transaction", err}
	}
	return true, nil
}

// cleanSome removes some expired marks. What it cannot remove stays for the next time.
func (s *SQL) cleanSome(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanWait)
	defer cancel()
	if _, err := s.Clean(ctx); err != nil {
		s.often.Log(ctx, slog.LevelWarn, "failed to remove expired marks; retrying later", "", slog.Any("error", err))
	}
}

// Mark marks an event as handled by a group, in a transaction of the caller, who commits the
// effects with it. It reports whether the event had no mark; if it had one, do nothing and roll
// back. Where another transaction is marking the same event, Mark waits for its end. Handle does
// all that.
func (s *SQL) Mark(ctx context.Context, tx *sql.Tx, topic, group, id string) (first bool, err error) {
	res, err := tx.ExecContext(ctx, s.mark, topic, group, column(id), s.ttl.Milliseconds())
	if err != nil {
		return false, &failure{"cannot mark the event", err}
	}
	n, err := res.RowsAffected()
	if err != nil {
		return false, &failure{"cannot mark the event", err}
	}
	return n == 1, nil
}

// Seen reports whether a group has handled an event, as far as it is committed.
func (s *SQL) Seen(ctx context.Context, topic, group, id string) (bool, error) {
	var n int
	if err := s.db.QueryRowContext(ctx, s.seen, topic, group, column(id)).Scan(&n); err != nil {
		return false, &failure{"cannot look an event up", err}
	}
	return n > 0, nil
}

// Clean removes up to 200 expired marks, and returns how many it removed. Handle calls it after
// every 100 events, so that marks do not pile up. Call it repeatedly to remove the marks of groups
// that handle nothing any more.
func (s *SQL) Clean(ctx context.Context) (int, error) {
	res, err := s.db.ExecContext(ctx, s.clean, cleanBatch)
	if err != nil {
		return 0, fmt.Errorf("inbox: clean table %s: %w", s.table, err)
	}
	n, err := res.RowsAffected()
	if err != nil {
		return 0, fmt.Errorf("inbox: clean table %s: %w", s.table, err)
	}
	return int(n), nil
}

// maxColumn is the longest id that is stored as it is. Ids from a hub have at most 128 bytes.
const maxColumn = 200

// hashed begins the stored form of other ids.
const hashed = "sha256:"

// column is an id as it is stored. Native publishers may give ids that no database takes, or that
// are too long for an index.
func column(id string) string {
	if len(id) <= maxColumn && utf8.ValidString(id) && strings.IndexByte(id, 0) < 0 && !strings.HasPrefix(id, hashed) {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return hashed + hex.EncodeToString(sum[:])
}
