package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"eventhub/outbox/internal/sqltext"
)

// Dialect is the SQL dialect of a database.
type Dialect string

// The supported dialects.
const (
	SQLite     Dialect = "sqlite"
	PostgreSQL Dialect = "postgres"
)

// DefaultTable is the default name of the table.
const DefaultTable = "outbox"

// SQLConfig configures an SQLStore.
type SQLConfig struct {
	// Dialect is the dialect of the database. Required. A drainer needs SQLite 3.43 or PostgreSQL
	// 13 or newer, with encoding UTF8. A service that only inserts rows with plain SQL needs SQLite
	// 3.37, the first version that can open the table.
	Dialect Dialect
	// DB is the database. The caller owns it. Without DB the store can only Add, which suffices for
	// a service whose rows are drained elsewhere.
	//
	// Open SQLite with WAL and a busy timeout, so that writers wait for each other instead of
	// failing. With modernc.org/sqlite:
	// file:orders.db?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate.
	// Without _txlock=immediate, a transaction that reads before it writes fails if another
	// transaction wrote in between.
	//
	// Open PostgreSQL so that the driver caches no prepared statements; with pgx:
	// default_query_exec_mode=exec. Otherwise a plan made for a small table stays in use after the
	// table has grown, until the database analyzes the table, about a minute later. Prepared
	// statements also do not work through a transaction-level pooler.
	DB *sql.DB
	// Table is the name of the table: 1 to 40 lower-case letters, digits, and underscores. It may
	// be an SQL keyword, which other statements must then quote. The names of all further objects
	// that Migrate creates begin with it. It is also the notification channel. Defaults to
	// DefaultTable.
	Table string
	// MaxPayload is the largest payload in bytes that Add accepts. It should match the limit of the
	// bus. Defaults to DefaultMaxPayload.
	MaxPayload int
	// Listen, for PostgreSQL only, wakes a sleeping drainer as soon as rows are committed; see
	// PgxListener. By default the drainer polls, which is the only choice behind a pooler.
	Listen Listener
}

// SQLStore is an outbox in a table of an SQL database. Its methods may be called concurrently. It
// needs no closing.
type SQLStore struct {
	dialect    Dialect
	db         *sql.DB
	table      string
	maxPayload int
	listen     Listener
	pace       pace

	mu       sync.Mutex
	queries  map[string]statement // by the text before its translation; at most maxStatements
	progress progress             // where the next claim continues
	// lanes that failed to be claimed, and until when claims skip them
	ailing map[string]time.Time
}

// pace is how long the store waits. It is usualPace, except in tests.
type pace struct {
	ailing       time.Duration // how long claims skip a lane that failed
	migratePause time.Duration // between attempts to migrate
	aheadTimeout string        // lock_timeout of what a migration does ahead, which holds nobody up
}

var usualPace = pace{ailing: againMax, migratePause: 2 * time.Second, aheadTimeout: "3s"}

var _ Store = (*SQLStore)(nil)

var errNoDB = errors.New("outbox: SQL store: only Add works without a DB")

// NewSQLStore returns a store. It does not access the database; Migrate creates the table.
func NewSQLStore(cfg SQLConfig) (*SQLStore, error) {
	if cfg.Table == "" {
		cfg.Table = DefaultTable
	}
	if cfg.MaxPayload == 0 {
		cfg.MaxPayload = DefaultMaxPayload
	}
	switch {
	case cfg.Dialect != SQLite && cfg.Dialect != PostgreSQL:
		return nil, fmt.Errorf("outbox: SQL store: dialect %q: must be sqlite or postgres", cfg.Dialect)
	case cfg.MaxPayload < 0:
		return nil, fmt.Errorf("outbox: SQL store: max payload %d: must be positive", cfg.MaxPayload)
	case cfg.Listen != nil && cfg.Dialect != PostgreSQL:
		return nil, errors.New("outbox: SQL store: Listen is only supported for PostgreSQL")
	}
	if err := sqltext.ValidTable(cfg.Table, cfg.Dialect == SQLite); err != nil {
		return nil, fmt.Errorf("outbox: SQL store: %w", err)
	}
	return &SQLStore{dialect: cfg.Dialect, db: cfg.DB, table: cfg.Table, maxPayload: cfg.MaxPayload, listen: cfg.Listen, pace: usualPace}, nil
}

// Add adds a record in the caller's transaction. The record is published if the transaction
// commits, and never if it rolls back. Add fills in ID, Payload, and TS when they are empty. It
// returns an *Error, without touching the transaction, for a record that the bus would refuse or a
// database could not store unchanged. After any other error, roll the transaction back.
func (s *SQLStore) Add(ctx context.Context, tx Tx, r *Record) error {
	if err := r.prepare(s.maxPayload); err != nil {
		return err
	}
	headers := ""
	if len(r.Headers) > 0 {
		b, err := json.Marshal(r.Headers)
		if err != nil {
			return fmt.Errorf("outbox: record %q: %w", r.ID, err)
		}
		headers = string(b)
	}
	attributes, err := r.attributes()
	if err != nil {
		return fmt.Errorf("outbox: record %q: %w", r.ID, err)
	}
	_, err = tx.ExecContext(ctx, s.q("INSERT INTO {table} (id, aggregatetype, aggregateid, type, payload, headers, attributes, ts) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"),
		r.ID, r.Topic, r.Key, r.Type, string(r.Payload), headers, attributes, r.TS)
	return s.wrap("add", err)
}

// Listen implements Store.
func (s *SQLStore) Listen(ctx context.Context, sleeper Sleeper) error {
	if s.listen == nil {
		return ErrCannotListen
	}
	return s.wrap("listen", s.listen(ctx, s.table, sleeper))
}

func (s *SQLStore) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("outbox: %s: table %s: %w", what, s.table, err)
}

// SQL fragments by dialect. The time stays the same within a statement.
var (
	nowOf = map[Dialect]string{SQLite: sqltext.SQLiteNow, PostgreSQL: sqltext.PostgreSQLNow}
	// inOf and itsEndOf enclose a subquery of rows or ids for an IN condition. PostgreSQL evaluates
	// an array once, before the statement. It may evaluate any other form, and lock the rows that
	// the subquery finds, once per row.
	inOf     = map[Dialect]string{SQLite: "IN (", PostgreSQL: "= ANY(ARRAY("}
	itsEndOf = map[Dialect]string{SQLite: ")", PostgreSQL: "))"}
	// idsOf expands one parameter into ids, so that the statement text is the same for any number
	// of ids.
	idsOf = map[Dialect]string{
		SQLite:     "SELECT value FROM json_each(?)",
		PostgreSQL: "SELECT json_array_elements_text(CAST(? AS json))",
	}
	// sameOf expands one parameter, that of refList, into a condition on a row o. The condition
	// only checks rows that {ids} has found by an index. Without IS TRUE, PostgreSQL would consider
	// a join, which it may begin from the wrong side.
	sameOf = map[Dialect]string{
		SQLite:     "o.aggregatetype || '/' || o.id IN (SELECT value FROM json_each(?))",
		PostgreSQL: "((o.aggregatetype || '/' || o.id) IN (SELECT json_array_elements_text(CAST(? AS json)))) IS TRUE",
	}
	// rowOf identifies a row within a statement.
	rowOf = map[Dialect]string{SQLite: "seq", PostgreSQL: "ctid"}
	// spansOf expands one parameter into pairs of lanes, numbered from 0.
	spansOf = map[Dialect]string{
		SQLite:     "SELECT key AS n, json_extract(value, '$[0]') AS start, json_extract(value, '$[1]') AS stop FROM json_each(?)",
		PostgreSQL: "SELECT e.n - 1 AS n, e.v ->> 0 AS start, e.v ->> 1 AS stop FROM json_array_elements(CAST(? AS json)) WITH ORDINALITY e (v, n)",
	}
	// topicOf computes the topic of l.lane. SQLite's text functions stop at a NUL; its BLOB
	// functions do not.
	topicOf = map[Dialect]string{
		SQLite:     "CAST(substr(CAST(ltrim(l.lane, '/') AS BLOB), 1, instr(CAST(ltrim(l.lane, '/') AS BLOB), X'2F') - 1) AS TEXT)",
		PostgreSQL: "split_part(ltrim(l.lane, '/'), '/', 1)",
	}
	// rowsOf and rowsEndOf enclose a condition on a row o, for an update of a table that is called
	// o. PostgreSQL looks the rows up first and skips those that another transaction has locked.
	rowsOf    = map[Dialect]string{SQLite: "(", PostgreSQL: "ctid = ANY(ARRAY(SELECT o.ctid FROM {table} o WHERE "}
	rowsEndOf = map[Dialect]string{SQLite: ")", PostgreSQL: unlockedOf[PostgreSQL] + "))"}
	// unlockedOf skips rows that another transaction has locked.
	unlockedOf = map[Dialect]string{SQLite: "", PostgreSQL: " FOR NO KEY UPDATE SKIP LOCKED"}
)

// names returns the placeholders that depend on the table, each followed by its replacement:
// {table}_ begins a derived name, {table} is the quoted table name, {channel} is the unquoted name,
// and {sleepers} is the number of the advisory lock of sleeping drainers.
func names(table string) []string {
	return []string{"{table}_", table + "_", "{table}", `"` + table + `"`, "{channel}", table, "{sleepers}", strconv.FormatInt(advisoryLock(table, "sleepers "), 10)}
}

func inTable(table, statement string) string {
	return strings.NewReplacer(names(table)...).Replace(statement)
}

// maxStatements is the maximum number of queries that a store keeps translated. The store has about
// 30; those that depend on the number of records of a claim are translated each time beyond the
// maximum.
const maxStatements = 64

// statement is a query in the dialect of the database.
type statement struct {
	text string
	// of SQLite, which otherwise compiles the text at each use; sql.DB.Close frees it
	prepared *sql.Stmt
}

// statement translates a query once, and prepares it for SQLite. PostgreSQL's driver prepares
// statements itself, where the connections permit it. A transaction gets the text alone: a
// statement is prepared on a connection of its own, and a database may be limited to one.
func (s *SQLStore) statement(ctx context.Context, db querier, query string) (statement, error) {
	s.mu.Lock()
	st, known := s.queries[query]
	full := len(s.queries) >= maxStatements
	s.mu.Unlock()
	if !known {
		st.text = s.q(query)
	}
	if db != querier(s.db) {
		st.prepared = nil
		return st, nil
	}
	if known || full {
		return st, nil
	}
	if s.dialect == SQLite {
		var err error
		if st.prepared, err = s.db.PrepareContext(ctx, st.text); err != nil {
			return st, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other, ok := s.queries[query]; ok {
		if st.prepared != nil {
			_ = st.prepared.Close()
		}
		return other, nil
	}
	if s.queries == nil {
		s.queries = make(map[string]statement)
	}
	s.queries[query] = st
	return st, nil
}

// querier is the part of *sql.DB and *sql.Tx that a store needs.
type querier interface {
	Tx
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// run translates and executes a statement.
func (s *SQLStore) run(ctx context.Context, db querier, query string, args ...any) (sql.Result, error) {
	st, err := s.statement(ctx, db, query)
	if err != nil {
		return nil, err
	}
	if st.prepared != nil {
		return st.prepared.ExecContext(ctx, args...)
	}
	return db.ExecContext(ctx, st.text, args...)
}

// query translates and executes a query.
func (s *SQLStore) query(ctx context.Context, db querier, query string, args ...any) (*sql.Rows, error) {
	st, err := s.statement(ctx, db, query)
	if err != nil {
		return nil, err
	}
	if st.prepared != nil {
		return st.prepared.QueryContext(ctx, args...)
	}
	return db.QueryContext(ctx, st.text, args...)
}

// q translates a query into the dialect. It replaces the placeholders of names as well as {now},
// {in …}, {rows …}, {ids}, {same}, {row}, {spans}, {topic}, {unlocked}, and question marks.
func (s *SQLStore) q(query string) string {
	d := s.dialect
	query = strings.NewReplacer(append(names(s.table), "{now}", nowOf[d], "{ids}", inOf[d]+idsOf[d]+itsEndOf[d], "{same}", sameOf[d], "{row}", rowOf[d], "{spans}", spansOf[d],
		"{in ", inOf[d], " in}", itsEndOf[d], "{rows ", inTable(s.table, rowsOf[d]), " rows}", rowsEndOf[d], "{topic}", topicOf[d], "{unlocked}", unlockedOf[d])...).Replace(query)
	if s.dialect != PostgreSQL {
		return query
	}
	return sqltext.Number(query)
}

// idList returns the parameter for {ids}: a JSON array. It escapes bytes and not runes, because
// rows that were written without Add may have ids in SQLite that are not UTF-8.
func idList(ids []string) string {
	b := []byte{'['}
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		for _, c := range []byte(id) {
			switch {
			case c < ' ':
				b = fmt.Appendf(b, `\u%04x`, c)
			case c == '"', c == '\\':
				b = append(b, '\\', c)
			default:
				b = append(b, c)
			}
		}
		b = append(b, '"')
	}
	return string(append(b, ']'))
}

// refArgs returns the parameters for "o.id {ids} AND {same}", which selects the records, in a query
// that ofTopic has prepared for the same records.
func refArgs(list []ref) (ids, same string) {
	names := make([]string, len(list))
	for i, r := range list {
		names[i] = r.id
	}
	if topic, ok := oneTopic(list); ok {
		return idList(names), topic
	}
	whole := make([]string, len(list))
	for i, r := range list {
		whole[i] = r.String()
	}
	return idList(names), idList(whole)
}

// ofTopic returns a query that has {same} for these records. Records of one topic, as most are,
// need no comparison of pairs, which takes a quarter of the time of a drainer on PostgreSQL.
func ofTopic(query string, list []ref) string {
	if _, ok := oneTopic(list); ok {
		return strings.Replace(query, "{same}", "o.aggregatetype = ?", 1)
	}
	return query
}

// oneTopic returns the topic that all records have.
func oneTopic(list []ref) (topic string, ok bool) {
	for _, r := range list {
		if r.topic != list[0].topic {
			return "", false
		}
		topic = r.topic
	}
	return topic, len(list) > 0
}

// errText returns an error's text in the form that stores keep: valid UTF-8 of at most maxErrLen
// bytes.
func errText(s string) string {
	s = strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", ""), "")
	if len(s) <= maxErrLen {
		return s
	}
	cut := maxErrLen
	for !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut]
}
