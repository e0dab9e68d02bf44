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

// migration is one step of the tables; see names for what stands in braces. A migration that was released is changed only so
// that later ones have less to do where there is no table yet: the table becomes the same.
type migration struct {
	about            string
	sqlite, postgres []string
	// oldSQLite are for SQLite where an earlier version has made the table. ALTER TABLE of SQLite changes no column, and a copy
	// of the table would lose triggers and references of others.
	oldSQLite []string
}

// defaultID is the id of a row whose writer gives none: a UUIDv7, as Add makes it.
var defaultID = map[Dialect]string{
	SQLite: `printf('%08x-%04x-7%03x-%04x-%012x', ` + sqliteNow + ` >> 16, ` + sqliteNow + ` & 65535, random() & 4095, 32768 | (random() & 16383), random() & 281474976710655)`,
	PostgreSQL: `CAST(CAST(encode(set_bit(set_bit(overlay(uuid_send(gen_random_uuid())
  PLACING substring(int8send(CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)) FROM 3) FROM 1 FOR 6), 52, 1), 53, 1), 'hex') AS uuid) AS TEXT)`,
}

// sqliteNow is what SQLite 3.37 knows of the time, in epoch milliseconds.
const sqliteNow = `CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)`

const (
	// sqliteRow is the most bytes of text, besides names, of a row of SQLite, which writes a row anew as a whole, from memory,
	// when its status changes. NATS takes no message that is larger.
	sqliteRow = 64 << 20
	// sqliteChecks refuse what could not be worked with, and names that are too long for indexes, which PostgreSQL refuses by
	// itself. Without CAST a length ends at a NUL.
	sqliteChecks = `,
  CONSTRAINT names_of_at_most_64_KiB CHECK (max(length(CAST(id AS BLOB)), length(CAST(aggregatetype AS BLOB)), length(CAST(aggregateid AS BLOB))) <= 65536),
  CONSTRAINT text_of_at_most_64_MiB CHECK (length(CAST(payload AS BLOB)) + length(CAST(headers AS BLOB)) + length(CAST(attributes AS BLOB)) + length(CAST(type AS BLOB)) <= 67108864)`
)

// sqliteText is how many bytes of text a row of SQLite has besides names, for SQLite 3.43.
const sqliteText = `octet_length(payload) + octet_length(headers) + octet_length(attributes) + octet_length(type)`

// sqliteID is the column of SQLite without its default, as version 2 made it.
const sqliteID = `id            TEXT NOT NULL UNIQUE`

// Columns that Debezium's outbox event router knows have the names it expects by default: id, aggregatetype, aggregateid, type,
// payload. A service that writes with plain SQL needs no others, for all the rest has defaults. Its statement is refused when it
// writes what no claim could read, as a time with a fraction or an id that is a BLOB would be: on SQLite the table is STRICT.
//
// A topic has no slash, so that the lanes of a topic lie together: those with a key behind topic/, those without one behind
// /topic/. Claims rely on that. Their index has what statistics ask for as well, which is cheaper than another index.
// The states are not checked by IN: of its list SQLite would make a table for each row that it checks.
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
  lane          TEXT NOT NULL GENERATED ALWAYS AS (CASE WHEN aggregateid = '' THEN '/' || aggregatetype || '/' || id ELSE aggregatetype || '/' || aggregateid END) STORED` + sqliteChecks + `
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
			// Most of the table is dead soon after it was written. What is dead lies in the way of claims until it is vacuumed.
			`ALTER TABLE {table} SET (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.05)`,
		},
	},
	{
		about: "rows have ids by default; on PostgreSQL, commits notify only while a drainer sleeps; on SQLite, what is too large is refused",
		oldSQLite: []string{
			`UPDATE {table} SET status = 'error', last_err = 'the row is larger than 64 MiB' WHERE status <> 'sent' AND ` + sqliteText + ` > 67108864`,
			`PRAGMA writable_schema = ON`,
			`UPDATE sqlite_schema SET sql = replace(replace(sql, '` + sqliteID + `,', '` + sqliteID + ` DEFAULT (` + strings.ReplaceAll(defaultID[SQLite], "'", "''") + `),'),
  'STORED' || char(10) || ') STRICT', 'STORED` + sqliteChecks + `' || char(10) || ') STRICT') WHERE type = 'table' AND name = '{channel}'`,
			`PRAGMA writable_schema = RESET`,
			`CREATE VIEW {table}_changed AS SELECT 1`, // tells other connections to read the schema anew, which the update does not
			`DROP VIEW {table}_changed`,
		},
		postgres: []string{
			`ALTER TABLE {table} ALTER COLUMN id SET DEFAULT ` + defaultID[PostgreSQL],
			`DROP TRIGGER IF EXISTS {table}_notify ON {table}`,
			`CREATE TRIGGER {table}_notify AFTER INSERT ON {table} FOR EACH STATEMENT WHEN (` + drainerSleeps + `) EXECUTE FUNCTION {table}_notify()`,
		},
	},
}

// statements are those of a dialect; old says that an earlier version has made the table.
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

// SQL is what Migrate would do to a database without the table, as a script, for those who run their own. It includes the
// table of versions, so that Migrate knows later what is there.
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

// A migration waits for transactions that use the table, and those that come wait behind it: so it waits for lockTimeout only,
// and tries migrateTries times in all, migratePause apart.
const (
	lockTimeout  = `SET LOCAL lock_timeout = '300ms'`
	migrateTries = 3
	migratePause = 2 * time.Second
)

// inUse reports whether lockTimeout was not long enough.
func inUse(err error) bool {
	e, ok := errors.AsType[interface {
		error
		SQLState() string
	}](err)
	return ok && e.SQLState() == "55P03"
}

const versionsTable = `CREATE TABLE IF NOT EXISTS {table}_versions (version INTEGER PRIMARY KEY)`

// Version says which migrations the database has, and which this program needs. Statements of a program that needs fewer than
// there are may work or not: migrate with the newest one, and then let no older one run.
func (s *SQLStore) Version(ctx context.Context) (have, need int, err error) {
	need = len(migrations)
	if s.db == nil {
		return 0, need, errNoDB
	}
	query := "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
	if s.dialect == PostgreSQL {
		query = "SELECT COUNT(*) FROM pg_catalog.pg_class WHERE oid = to_regclass(?)"
	}
	var tables int
	if err = s.db.QueryRowContext(ctx, s.q(query), s.table+"_versions").Scan(&tables); err != nil || tables == 0 {
		return 0, need, s.wrap("version", err)
	}
	have, err = s.version(ctx, s.db)
	return have, need, s.wrap("version", err)
}

func (s *SQLStore) version(ctx context.Context, db interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
},
) (v int, err error) {
	err = db.QueryRowContext(ctx, s.q("SELECT COALESCE(MAX(version), 0) FROM {table}_versions")).Scan(&v)
	return v, err
}

// Migrate brings the table to what this program needs, all in one transaction, and says how many steps it took: 0 when it
// was so already. When several do it at once, one does it and the others wait.
func (s *SQLStore) Migrate(ctx context.Context) (steps int, err error) {
	if s.db == nil {
		return 0, errNoDB
	}
	// A user that may change rows but make no tables can work on one that another has migrated.
	if have, need, err := s.Version(ctx); err == nil && have == need {
		return 0, nil
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return 0, s.wrap("migrate", err)
	}
	defer func() { _ = conn.Close() }()
	begin := "BEGIN IMMEDIATE" // which database/sql cannot say: a transaction that only reads at first may fail to write later
	if s.dialect == PostgreSQL {
		begin = "BEGIN"
	}
	for try := 1; ; try++ {
		steps, err = s.migrateOnce(ctx, conn, begin)
		switch {
		case !inUse(err):
			return steps, s.wrap("migrate", err)
		case try == migrateTries || !pause(ctx, migratePause):
			return 0, s.wrap("migrate", fmt.Errorf("the table is in use by a transaction that goes on; migrate again when it has ended: %w", err))
		}
	}
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
		return 0, fmt.Errorf("the table has version %d, this program knows %d: use a newer one", have, len(migrations))
	}
	for i := have; i < len(migrations); i++ {
		for _, statement := range migrations[i].statements(s.dialect, s.table, have > 0) {
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
