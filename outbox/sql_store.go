package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// Dialect is how a database writes SQL.
type Dialect string

// The dialects.
const (
	SQLite     Dialect = "sqlite"
	PostgreSQL Dialect = "postgres"
)

// DefaultTable is the name of the table unless another is configured.
const DefaultTable = "outbox"

// SQLConfig configures a SQLStore.
type SQLConfig struct {
	// Dialect is that of the database: SQLite 3.43 or PostgreSQL 13 or newer, whose encoding must be UTF8. Required. Services
	// that only write, with plain SQL, can do with SQLite 3.37, which is the first that can open such a table.
	Dialect Dialect
	// DB is the database, owned by the caller. Without it the store can only Add, which is all that a service needs whose
	// rows are drained elsewhere.
	//
	// SQLite should be opened with WAL and a busy timeout, so that writers wait for each other instead of failing. With
	// modernc.org/sqlite: file:orders.db?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_txlock=immediate. Without
	// _txlock=immediate, a transaction of yours that reads before it writes fails when another has written in between.
	//
	// PostgreSQL should be opened so that the driver keeps no prepared statements; with pgx: default_query_exec_mode=exec.
	// Otherwise plans that were made for a small table are used on one that has grown, until the database analyzes it (a
	// minute or so); and behind a pooler that deals connections out by transaction they do not work at all.
	DB *sql.DB
	// Table is the table's name: lower-case letters, digits and _, at most 40. Default DefaultTable. It may be a word of SQL,
	// which statements of yours must quote then. What else Migrate makes begins with it, and it is the channel of the
	// notifications.
	Table string
	// MaxPayload is the largest payload in bytes that Add takes. Default DefaultMaxPayload; it should be that of the bus.
	MaxPayload int
	// Listen, for PostgreSQL, wakes a drainer that sleeps at once when rows are committed (see PgxListener). Default: there is
	// only polling, as must be behind a pooler.
	Listen Listener
}

// SQLStore is an outbox in a table of a SQL database. Its methods may be called concurrently. It needs no closing.
type SQLStore struct {
	dialect    Dialect
	db         *sql.DB
	table      string
	maxPayload int
	listen     Listener

	mu       sync.Mutex
	progress progress             // of claims
	ailing   map[string]time.Time // lanes that could not be claimed, and until when they are left out
}

var _ Store = (*SQLStore)(nil)

var tableName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)

var errNoDB = errors.New("outbox: SQL store: without a DB it can only add")

// NewSQLStore makes a store. It asks nothing of the database; the table is made by Migrate.
func NewSQLStore(cfg SQLConfig) (*SQLStore, error) {
	if cfg.Table == "" {
		cfg.Table = DefaultTable
	}
	if cfg.MaxPayload == 0 {
		cfg.MaxPayload = DefaultMaxPayload
	}
	switch {
	case cfg.Dialect != SQLite && cfg.Dialect != PostgreSQL:
		return nil, fmt.Errorf("outbox: SQL store: dialect %q: sqlite or postgres is needed", cfg.Dialect)
	case !tableName.MatchString(cfg.Table):
		return nil, fmt.Errorf("outbox: SQL store: table %q: 1 to 40 lower-case letters, digits and _ are allowed, the first no digit", cfg.Table)
	case cfg.Dialect == SQLite && strings.HasPrefix(cfg.Table, "sqlite_"):
		return nil, fmt.Errorf("outbox: SQL store: table %q: SQLite keeps names that begin with sqlite_ to itself", cfg.Table)
	case cfg.MaxPayload < 0:
		return nil, fmt.Errorf("outbox: SQL store: max payload %d: it must be positive", cfg.MaxPayload)
	case cfg.Listen != nil && cfg.Dialect != PostgreSQL:
		return nil, errors.New("outbox: SQL store: only PostgreSQL can be listened to")
	}
	return &SQLStore{dialect: cfg.Dialect, db: cfg.DB, table: cfg.Table, maxPayload: cfg.MaxPayload, listen: cfg.Listen}, nil
}

// Add adds a record in the caller's transaction: it is published if that commits, and never was if it does not. It fills in
// ID, Payload and TS when they are empty. An *Error for what the bus would refuse, or a database not keep as it is, is returned
// before the transaction is touched; after any other error the transaction must be rolled back.
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

// Expressions of the dialects. The time is the same within a statement.
var (
	nowOf = map[Dialect]string{
		SQLite:     "CAST(unixepoch('subsec') * 1000 AS INTEGER)",
		PostgreSQL: "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)",
	}
	// inOf and itsEndOf are around a query for the ids that a column must be one of. As an array it is evaluated once, and
	// before the statement; as anything else PostgreSQL may evaluate it, and lock what it finds, once for each row.
	inOf     = map[Dialect]string{SQLite: "IN (", PostgreSQL: "= ANY(ARRAY("}
	itsEndOf = map[Dialect]string{SQLite: ")", PostgreSQL: "))"}
	// idsOf takes ids as one parameter, so that the statement is the same for any number of them.
	idsOf = map[Dialect]string{
		SQLite:     "SELECT value FROM json_each(?)",
		PostgreSQL: "SELECT json_array_elements_text(CAST(? AS json))",
	}
	// spansOf reads pairs of lanes, numbered from 0, from one parameter.
	spansOf = map[Dialect]string{
		SQLite:     "SELECT key AS n, json_extract(value, '$[0]') AS start, json_extract(value, '$[1]') AS stop FROM json_each(?)",
		PostgreSQL: "SELECT e.n - 1 AS n, e.v ->> 0 AS start, e.v ->> 1 AS stop FROM json_array_elements(CAST(? AS json)) WITH ORDINALITY e (v, n)",
	}
	// topicOf is the topic of lane l.lane. Functions of SQLite take a NUL for the end of a text, but not of a BLOB.
	topicOf = map[Dialect]string{
		SQLite:     "CAST(substr(CAST(ltrim(l.lane, '/') AS BLOB), 1, instr(CAST(ltrim(l.lane, '/') AS BLOB), X'2F') - 1) AS TEXT)",
		PostgreSQL: "split_part(ltrim(l.lane, '/'), '/', 1)",
	}
	// unlockedOf passes over rows that another transaction is about to change.
	unlockedOf = map[Dialect]string{SQLite: "", PostgreSQL: " FOR UPDATE SKIP LOCKED"}
)

// names are what stands for the table's name, with what it is replaced by: {table}, which is quoted, for it may be a word of
// SQL; names that begin with it, which are none; {channel}; and {sleepers}, the number of their lock.
func names(table string) []string {
	return []string{"{table}_", table + "_", "{table}", `"` + table + `"`, "{channel}", table, "{sleepers}", strconv.FormatInt(advisoryLock(table, "sleepers "), 10)}
}

func inTable(table, statement string) string {
	return strings.NewReplacer(names(table)...).Replace(statement)
}

// q writes a query as the dialect does: names, {now}, {in …}, {ids}, {spans}, {topic}, {unlocked}, and question marks for parameters.
func (s *SQLStore) q(query string) string {
	d := s.dialect
	query = strings.NewReplacer(append(names(s.table), "{now}", nowOf[d], "{ids}", inOf[d]+idsOf[d]+itsEndOf[d], "{spans}", spansOf[d],
		"{in ", inOf[d], " in}", itsEndOf[d], "{topic}", topicOf[d], "{unlocked}", unlockedOf[d])...).Replace(query)
	if s.dialect != PostgreSQL {
		return query
	}
	var b strings.Builder
	n := 0
	for part := range strings.SplitSeq(query, "?") {
		if n > 0 {
			b.WriteString("$" + strconv.Itoa(n))
		}
		b.WriteString(part)
		n++
	}
	return b.String()
}

// idList is the parameter of {ids}: a JSON array. Ids that others wrote may be no UTF-8 in SQLite, which takes and gives them
// as they are.
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

func idsOfRecords(records []*Record) []string {
	ids := make([]string, len(records))
	for i, r := range records {
		ids[i] = r.ID
	}
	return ids
}

// errText is an error's text as a store keeps it.
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
