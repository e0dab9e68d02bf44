package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// migration is one schema version; see inTable for the names in braces. A released migration may
// change only in ways that leave the resulting table the same.
type migration struct {
	about            string
	sqlite, postgres []string
	// oldSQLite runs before sqlite where an earlier version has made the table. ALTER TABLE of
	// SQLite cannot change a column, and copying the table would lose the triggers and references
	// of other tables.
	oldSQLite []string
	// oldPostgres runs before the transaction of the migration where an earlier version has made
	// the table, one statement at a time. It must not hold up writers, and may run again.
	oldPostgres []string
	// unless, if not empty, is a query for each dialect. Where it returns a row, the statements do
	// not run.
	unless map[Dialect]string
}

// defaultID is the SQL default for the id of a row: a UUIDv7, as Add makes it.
var defaultID = map[Dialect]string{
	SQLite: `printf('%08x-%04x-7%03x-%04x-%012x', ` + sqliteNow + ` >> 16, ` + sqliteNow + ` & 65535, random() & 4095, 32768 | (random() & 16383), random() & 281474976710655)`,
	PostgreSQL: `CAST(CAST(encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
  PLACING substring(int8send(CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)) FROM 3) FROM 1 FOR 6), 52, 1), 53, 1), 'hex') AS uuid) AS TEXT)`,
}

// sqliteNow is the current time in epoch milliseconds, in SQL that SQLite 3.37 understands.
const sqliteNow = `CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)`

const (
	// sqliteRow is the maximum size in bytes of a row's text in SQLite, not counting names. SQLite
	// rewrites a row as a whole, from memory, when its status changes. NATS accepts no larger
	// message either.
	sqliteRow = 64 << 20
	// sqliteChecks reject rows that are too large to process, and names that are too long for an
	// index, which PostgreSQL rejects by itself. The CAST is needed because length(text) stops at a
	// NUL.
	sqliteChecks = `,
  CONSTRAINT names_of_at_most_64_KiB CHECK (max(length(CAST(id AS BLOB)), length(CAST(aggregatetype AS BLOB)), length(CAST(aggregateid AS BLOB))) <= 65536),
  CONSTRAINT text_of_at_most_64_MiB CHECK (length(CAST(payload AS BLOB)) + length(CAST(headers AS BLOB)) + length(CAST(attributes AS BLOB)) + length(CAST(type AS BLOB)) <= 67108864)`
)

// sqliteText is the size in bytes of a row's text, not counting names. octet_length needs SQLite
// 3.43.
const sqliteText = `octet_length(payload) + octet_length(headers) + octet_length(attributes) + octet_length(type)`

// The id column of SQLite as versions 2 and 3 made it, and as version 4 makes it, with the
// constraint that makes ids unique in a topic.
const (
	sqliteID2   = `id            TEXT NOT NULL UNIQUE`
	sqliteID    = `id            TEXT NOT NULL`
	sqliteIDKey = `,
  UNIQUE (id, aggregatetype)`
)

// referenced finds foreign keys of other tables to the column id, which need ids that are unique in
// the whole table.
var referenced = map[Dialect]string{
	SQLite: `SELECT 1 FROM sqlite_schema t, pragma_foreign_key_list(t.name) f WHERE t.type = 'table' AND lower(f."table") = '{channel}' AND lower(f."to") = 'id'`,
	PostgreSQL: `SELECT 1 FROM pg_catalog.pg_constraint f JOIN pg_catalog.pg_attribute a ON a.attrelid = f.confrelid AND a.attnum = ANY(f.confkey)
WHERE f.contype = 'f' AND f.confrelid = to_regclass('{table}') AND a.attname = 'id'`,
}

// The columns id, aggregatetype, aggregateid, type, and payload have the names that Debezium's
// outbox event router expects by default. A service that writes plain SQL needs only those columns;
// the others have defaults. On SQLite the table is STRICT, so that an INSERT of a value that no
// claim could read fails, for example a time with a fraction or an id that is a BLOB.
//
// A topic contains no slash, so the lanes of a topic are adjacent in the index: lanes with a key
// begin with topic/, lanes without a key with /topic/. Claims rely on this order. The lane index
// also covers the columns that Stats reads, which is cheaper than another index. The status check
// avoids IN, because SQLite would build a table of the IN list for every row that it checks.
var migrations = []migration{
	{
		about: "the table; all indexes but that of the ids are partial, so that sent rows cost a claim nothing",
		sqlite: []string{
			`CREATE TABLE {table} (
  seq           INTEGER PRIMARY KEY AUTOINCREMENT,
  ` + sqliteID + ` DEFAULT (` + defaultID[SQLite] + `),
  aggregatetype TEXT NOT NULL CONSTRAINT topic_without_slash CHECK (aggregatetype <> '' AND aggregatetype NOT LIKE '%/%'),  -- topic
  aggregateid   TEXT NOT NULL DEFAULT '',  -- key, or '' for none
  type          TEXT NOT NULL DEFAULT '',  -- header "type" of the event, or ''
  payload       TEXT NOT NULL,             -- JSON
  headers       TEXT NOT NULL DEFAULT '',  -- JSON object of strings, or ''
  attributes    TEXT NOT NULL DEFAULT '',  -- JSON object with sid, tags, caused_by, tombstone, or ''
  ts            INTEGER NOT NULL DEFAULT (` + sqliteNow + `),  -- of the event; all times are epoch milliseconds
  status        TEXT NOT NULL DEFAULT 'pending' CHECK (status = 'pending' OR status = 'claimed' OR status = 'sent' OR status = 'error'),
  claimed_by    TEXT NOT NULL DEFAULT '',
  lease_until   INTEGER NOT NULL DEFAULT 0,
  attempts      INTEGER NOT NULL DEFAULT 0,
  last_err      TEXT NOT NULL DEFAULT '',
  next_at       INTEGER NOT NULL DEFAULT 0,
  publish_began INTEGER NOT NULL DEFAULT 0,
  added_at      INTEGER NOT NULL DEFAULT (` + sqliteNow + `),
  sent_at       INTEGER NOT NULL DEFAULT 0,
  lane          TEXT NOT NULL GENERATED ALWAYS AS (CASE WHEN aggregateid = '' THEN '/' || aggregatetype || '/' || id ELSE aggregatetype || '/' || aggregateid END) STORED` + sqliteIDKey + sqliteChecks + `
) STRICT`,
			`CREATE INDEX {table}_lanes ON {table} (lane, seq, status, added_at) WHERE status <> 'sent'`,
			`CREATE INDEX {table}_claimed ON {table} (lease_until) WHERE status = 'claimed'`,
			`CREATE INDEX {table}_sent ON {table} (sent_at) WHERE status = 'sent'`,
		},
		postgres: []string{
			`CREATE TABLE {table} (
  seq           BIGINT NOT NULL GENERATED BY DEFAULT AS IDENTITY (CACHE 1),  -- a larger cache would break the order
  id            TEXT COLLATE "C" PRIMARY KEY,
  aggregatetype TEXT COLLATE "C" NOT NULL CONSTRAINT topic_without_slash CHECK (aggregatetype <> '' AND aggregatetype NOT LIKE '%/%'),  -- topic
  aggregateid   TEXT COLLATE "C" NOT NULL DEFAULT '',  -- key, or '' for none
  type          TEXT NOT NULL DEFAULT '',              -- header "type" of the event, or ''
  payload       TEXT NOT NULL,                         -- JSON; as text it stays byte for byte
  headers       TEXT NOT NULL DEFAULT '',              -- JSON object of strings, or ''
  attributes    TEXT NOT NULL DEFAULT '',              -- JSON object with sid, tags, caused_by, tombstone, or ''
  ts            BIGINT NOT NULL DEFAULT (CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)),  -- of the event; all times are epoch milliseconds
  status        TEXT COLLATE "C" NOT NULL DEFAULT 'pending' CHECK (status = 'pending' OR status = 'claimed' OR status = 'sent' OR status = 'error'),
  claimed_by    TEXT COLLATE "C" NOT NULL DEFAULT '',
  lease_until   BIGINT NOT NULL DEFAULT 0,
  attempts      INTEGER NOT NULL DEFAULT 0,
  last_err      TEXT NOT NULL DEFAULT '',
  next_at       BIGINT NOT NULL DEFAULT 0,
  publish_began BIGINT NOT NULL DEFAULT 0,
  added_at      BIGINT NOT NULL DEFAULT (CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)),
  sent_at       BIGINT NOT NULL DEFAULT 0,
  lane          TEXT COLLATE "C" NOT NULL GENERATED ALWAYS AS (CASE WHEN aggregateid = '' THEN '/' || aggregatetype || '/' || id ELSE aggregatetype || '/' || aggregateid END) STORED
)`,
			`CREATE INDEX {table}_lanes ON {table} (lane, seq) INCLUDE (status, added_at) WHERE status <> 'sent'`,
			`CREATE INDEX {table}_claimed ON {table} (lease_until) WHERE status = 'claimed'`,
			`CREATE INDEX {table}_sent ON {table} (sent_at) WHERE status = 'sent'`,
		},
	},
	{
		about: "on PostgreSQL, drainers are woken when rows are committed",
		postgres: []string{
			`CREATE FUNCTION {table}_notify() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_notify('{channel}', ''); RETURN NULL; END $$`,
			`CREATE TRIGGER {table}_notify AFTER INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {table}_notify()`,
			// Most rows are dead soon after they were written. Dead rows slow down claims until
			// they are vacuumed.
			`ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.05)`,
		},
	},
	{
		about: "rows have ids by default; on PostgreSQL, commits notify only while a drainer sleeps; on SQLite, what is too large is refused",
		oldSQLite: []string{
			`UPDATE {table} SET status = 'error', last_err = 'the row is larger than 64 MiB' WHERE status <> 'sent' AND ` + sqliteText + ` > 67108864`,
			`PRAGMA writable_schema = ON`,
			`UPDATE sqlite_schema SET sql = replace(replace(sql, '` + sqliteID2 + `,', '` + sqliteID2 + ` DEFAULT (` + strings.ReplaceAll(defaultID[SQLite], "'", "''") + `),'),
  'STORED' || char(10) || ') STRICT', 'STORED` + sqliteChecks + `' || char(10) || ') STRICT') WHERE type = 'table' AND name = '{channel}'`,
			`PRAGMA writable_schema = RESET`,
			// makes other connections reload the schema, which the UPDATE does not
			`CREATE VIEW {table}_changed AS SELECT 1`,
			`DROP VIEW {table}_changed`,
		},
		postgres: []string{
			`ALTER TABLE {table} ALTER COLUMN id SET DEFAULT ` + defaultID[PostgreSQL],
			`DROP TRIGGER IF EXISTS {table}_notify ON {table}`,
			`CREATE TRIGGER {table}_notify AFTER INSERT ON {table} FOR EACH STATEMENT WHEN (` + drainerSleeps + `) EXECUTE FUNCTION {table}_notify()`,
		},
	},
	{
		about:  "ids are unique in a topic, not in the table, unless other tables reference them",
		unless: referenced,
		oldSQLite: []string{
			`PRAGMA writable_schema = ON`,
			`UPDATE sqlite_schema SET sql = replace(replace(sql, '` + sqliteID2 + ` DEFAULT', '` + sqliteID + ` DEFAULT'), 'STORED,' || char(10), 'STORED` + sqliteIDKey + `,' || char(10))
WHERE type = 'table' AND name = '{channel}'`,
			`PRAGMA writable_schema = RESET`,
			`REINDEX {table}`, // fills the index of the constraint anew
			`CREATE VIEW {table}_changed AS SELECT 1`,
			`DROP VIEW {table}_changed`,
		},
		oldPostgres: []string{
			`SET lock_timeout = '300ms'`,
			`DO $$ BEGIN IF EXISTS (SELECT 1 FROM pg_catalog.pg_index WHERE indexrelid = to_regclass('{table}_ids') AND NOT indisvalid) THEN DROP INDEX {table}_ids; END IF; END $$`,
			`SET lock_timeout = '{ahead}'`, // writers do not queue behind what comes next
			`CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS {table}_ids ON {table} (id, aggregatetype)`,
		},
		postgres: []string{
			`CREATE UNIQUE INDEX IF NOT EXISTS {table}_ids ON {table} (id, aggregatetype)`,
			`ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ADD CONSTRAINT {table}_pkey PRIMARY KEY USING INDEX {table}_ids`,
		},
	},
}

// statements returns the SQL for a dialect. old means that an earlier version has made the table.
func (m *migration) statements(d Dialect, table string, old bool) []string {
	from := m.postgres
	if d == SQLite {
		from = m.sqlite
		if old {
			from = slices.Concat(m.oldSQLite, m.sqlite)
		}
	}
	list := make([]string, len(from))
	for i, s := range from {
		list[i] = inTable(table, s)
	}
	return list
}

// SQL returns a script that does what Migrate does to a database without the table, for use with
// other migration tools. The script also fills the table of versions, so that Migrate recognises
// the result.
func (s *SQLStore) SQL() string {
	var b strings.Builder
	b.WriteString("BEGIN;\n\n" + s.q(versionsTable) + ";\n")
	for i, m := range migrations {
		fmt.Fprintf(&b, "\n-- %d: %s\n", i+1, m.about)
		for _, statement := range m.statements(s.dialect, s.table, false) {
			b.WriteString(statement + ";\n")
		}
		fmt.Fprintf(&b, "INSERT INTO %s_versions (version) VALUES (%d);\n", s.table, i+1)
	}
	b.WriteString("\nCOMMIT;\n")
	return b.String()
}

// A migration waits for transactions that use the table, and new transactions queue behind the
// migration. Each attempt therefore waits for at most lockTimeout. There are migrateTries attempts,
// pace.migratePause apart. What oldPostgres does waits for them, too, but holds nobody up.
const (
	lockTimeout  = `SET LOCAL lock_timeout = '300ms'`
	migrateTries = 3
	// migrateLook is how often a program looks whether another has ended what it does ahead.
	migrateLook = 100 * time.Millisecond
)

// inUse reports whether an attempt exceeded lockTimeout.
func inUse(err error) bool {
	e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	return ok && e.SQLState() == "55P03"
}

const versionsTable = `CREATE TABLE IF NOT EXISTS {table}_versions (version INTEGER PRIMARY KEY)`

// Version returns the schema version of the database and the version that this program needs. A
// program may fail on a newer schema: migrate with the newest program, then stop the older ones.
func (s *SQLStore) Version(ctx context.Context) (have, need int, err error) {
	need = len(migrations)
	if s.db == nil {
		return 0, need, errNoDB
	}
	have, err = s.made(ctx, s.db)
	return have, need, s.wrap("version", err)
}

// rower is what *sql.DB and *sql.Conn have in common for reading versions.
type rower interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// made returns the version of the table, or 0 if there is none.
func (s *SQLStore) made(ctx context.Context, db rower) (have int, err error) {
	query := "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
	if s.dialect == PostgreSQL {
		query = "SELECT COUNT(*) FROM pg_catalog.pg_class WHERE oid = to_regclass(?)"
	}
	var tables int
	if err = db.QueryRowContext(ctx, s.q(query), s.table+"_versions").Scan(&tables); err != nil || tables == 0 {
		return 0, err
	}
	return s.version(ctx, db)
}

func (s *SQLStore) version(ctx context.Context, db rower) (v int, err error) {
	err = db.QueryRowContext(ctx, s.q("SELECT COALESCE(MAX(version), 0) FROM {table}_versions")).Scan(&v)
	return v, err
}

// Migrate upgrades the table to the version that this program needs, in one transaction, and
// returns the number of steps applied; 0 means that the table was current. Concurrent calls are
// safe: one migrates and the others wait.
func (s *SQLStore) Migrate(ctx context.Context) (steps int, err error) {
	if s.db == nil {
		return 0, errNoDB
	}
	// Without this check, a database user that may not create tables could not start on a table
	// that is already current.
	if have, need, err := s.Version(ctx); err == nil && have == need {
		return 0, nil
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return 0, s.wrap("migrate", err)
	}
	defer func() { _ = conn.Close() }()
	// database/sql cannot express IMMEDIATE; a plain BEGIN that reads first may fail to write later
	begin := "BEGIN IMMEDIATE"
	if s.dialect == PostgreSQL {
		begin = "BEGIN"
	}
	for try := 1; ; try++ {
		if err = s.migrateAhead(ctx, conn); err == nil {
			steps, err = s.migrateOnce(ctx, conn, begin)
		}
		switch {
		case !inUse(err):
			return steps, s.wrap("migrate", err)
		case try == migrateTries || !pause(ctx, s.pace.migratePause):
			return 0, s.wrap("migrate", fmt.Errorf("table locked by another transaction; migrate again after that transaction ends: %w", err))
		}
	}
}

// migrateAhead does what takes long, and needs no transaction, for a table that an earlier version
// has made. One program does it at a time: two that make an index would wait for each other.
func (s *SQLStore) migrateAhead(ctx context.Context, conn *sql.Conn) (err error) {
	if s.dialect != PostgreSQL {
		return nil
	}
	lock := advisoryLock(s.table, "ahead ")
	for locked := false; !locked; {
		have, err := s.made(ctx, conn)
		if err != nil || have == 0 || have >= len(migrations) {
			return err // the transaction reports a version that is too new
		}
		if err := conn.QueryRowContext(ctx, s.q("SELECT pg_try_advisory_lock(?)"), lock).Scan(&locked); err != nil {
			return err
		}
		if !locked && !pause(ctx, migrateLook) {
			return ctx.Err()
		}
	}
	defer func() {
		_, reset := conn.ExecContext(context.WithoutCancel(ctx), "RESET lock_timeout")
		_, unlock := conn.ExecContext(context.WithoutCancel(ctx), s.q("SELECT pg_advisory_unlock(?)"), lock)
		err = errors.Join(err, reset, unlock)
	}()
	have, err := s.version(ctx, conn)
	if err != nil {
		return err
	}
	for i := have; i < len(migrations); i++ {
		if not, err := s.unwanted(ctx, conn, &migrations[i]); not || err != nil {
			return err
		}
		for _, statement := range migrations[i].oldPostgres {
			if _, err := conn.ExecContext(ctx, inTable(s.table, strings.ReplaceAll(statement, "{ahead}", s.pace.aheadTimeout))); err != nil {
				return fmt.Errorf("version %d: %w", i+1, err)
			}
		}
	}
	return nil
}

// unwanted reports whether the table must stay as it is.
func (s *SQLStore) unwanted(ctx context.Context, conn *sql.Conn, m *migration) (bool, error) {
	if m.unless == nil {
		return false, nil
	}
	var n int
	err := conn.QueryRowContext(ctx, "SELECT COUNT(*) FROM ("+inTable(s.table, m.unless[s.dialect])+") u").Scan(&n)
	return n > 0, err
}

// migrateOnce migrates in one transaction.
func (s *SQLStore) migrateOnce(ctx context.Context, conn *sql.Conn, begin string) (steps int, err error) {
	if _, err := conn.ExecContext(ctx, begin); err != nil {
		return 0, err
	}
	if steps, err = s.migrate(ctx, conn); err == nil {
		_, err = conn.ExecContext(ctx, "COMMIT")
	}
	if err != nil {
		_, rollback := conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
		return 0, errors.Join(err, rollback)
	}
	return steps, nil
}

func (s *SQLStore) migrate(ctx context.Context, conn *sql.Conn) (steps int, err error) {
	if s.dialect == PostgreSQL {
		if _, err := conn.ExecContext(ctx, s.q("SELECT pg_advisory_xact_lock(?)"), advisoryLock(s.table, "")); err != nil {
			return 0, err
		}
		if _, err := conn.ExecContext(ctx, lockTimeout); err != nil {
			return 0, err
		}
	}
	if _, err := conn.ExecContext(ctx, s.q(versionsTable)); err != nil {
		return 0, err
	}
	have, err := s.version(ctx, conn)
	if err != nil {
		return 0, err
	}
	if have > len(migrations) {
		return 0, fmt.Errorf("table has version %d but this program knows only %d; use a newer program", have, len(migrations))
	}
	for i := have; i < len(migrations); i++ {
		statements := migrations[i].statements(s.dialect, s.table, have > 0)
		if not, err := s.unwanted(ctx, conn, &migrations[i]); err != nil {
			return 0, fmt.Errorf("version %d: %w", i+1, err)
		} else if not {
			statements = nil
		}
		for _, statement := range statements {
			if _, err := conn.ExecContext(ctx, statement); err != nil {
				return 0, fmt.Errorf("version %d: %w", i+1, err)
			}
		}
		if _, err := conn.ExecContext(ctx, s.q("INSERT INTO {table}_versions (version) VALUES (?)"), i+1); err != nil {
			return 0, err
		}
	}
	return len(migrations) - have, nil
}
