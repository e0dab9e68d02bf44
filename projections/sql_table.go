package projections

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Dialect is the SQL dialect of a database.
type Dialect string

// The supported dialects.
const (
	SQLite     Dialect = "sqlite"
	PostgreSQL Dialect = "postgres"
)

// positionsTable holds the checkpoint of each SQLTable by name.
const positionsTable = "eventhub_positions"

// sqlRows is the maximum number of rows per statement, because databases limit the number of
// parameters.
const sqlRows = 200

// SQLTableConfig configures an SQLTable.
type SQLTableConfig struct {
	// DB is the database. The caller owns it. Required.
	DB *sql.DB
	// Dialect is the SQL dialect of DB. Required.
	Dialect Dialect
	// Table is the name of the table of rows: up to 63 letters, digits, and underscores. Its
	// columns are key, payload (JSON text), id, ts (epoch milliseconds), and sequence (in the
	// topic's stream). OpenSQLTable creates the table if it does not exist. Required unless Write
	// is set.
	Table string
	// Name identifies the checkpoint in table eventhub_positions. Defaults to Table.
	Name string
	// Write, if not nil, replaces the writing of rows to Table, which is then not created. It runs
	// in the transaction that also moves the checkpoint, and must not end that transaction.
	Write func(ctx context.Context, tx *sql.Tx, changes []Change) error
}

// SQLTable is a Table in an SQLite or PostgreSQL database, accessed through database/sql.
type SQLTable struct{ cfg SQLTableConfig }

var _ Table = (*SQLTable)(nil)

var tableName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,62}$`)

// OpenSQLTable returns an SQLTable and creates missing tables.
func OpenSQLTable(ctx context.Context, cfg SQLTableConfig) (*SQLTable, error) {
	if cfg.Name == "" {
		cfg.Name = cfg.Table
	}
	switch {
	case cfg.DB == nil:
		return nil, errors.New("projections: SQL table: DB is missing")
	case cfg.Dialect != SQLite && cfg.Dialect != PostgreSQL:
		return nil, fmt.Errorf("projections: SQL table: dialect %q: must be sqlite or postgres", cfg.Dialect)
	case !tableName.MatchString(cfg.Table) && (cfg.Write == nil || cfg.Table != ""):
		return nil, fmt.Errorf("projections: SQL table: name %q: must be up to 63 letters, digits, and _, and must not begin with a digit", cfg.Table)
	case cfg.Name == "":
		return nil, errors.New("projections: SQL table: Name is missing")
	}
	t := &SQLTable{cfg}
	statements := []string{
		"CREATE TABLE IF NOT EXISTS " + positionsTable + " (name TEXT PRIMARY KEY, stream TEXT NOT NULL, sequence BIGINT NOT NULL, stored_at BIGINT NOT NULL)",
	}
	if cfg.Write == nil {
		statements = append(statements, "CREATE TABLE IF NOT EXISTS "+cfg.Table+
			" (key TEXT PRIMARY KEY, payload TEXT NOT NULL, id TEXT NOT NULL, ts BIGINT NOT NULL, sequence BIGINT NOT NULL)")
	}
	for _, s := range statements {
		if _, err := cfg.DB.ExecContext(ctx, s); err != nil {
			return nil, fmt.Errorf("projections: SQL table %s: %w", cfg.Name, err)
		}
	}
	return t, nil
}

// Checkpoint implements Table.
func (t *SQLTable) Checkpoint(ctx context.Context) (Checkpoint, error) {
	var p Checkpoint
	query := "SELECT stream, sequence, stored_at FROM " + positionsTable + " WHERE name = " + t.param(1)
	err := t.cfg.DB.QueryRowContext(ctx, query, t.cfg.Name).Scan(&p.Stream, &p.Sequence, &p.StoredAt)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return Checkpoint{}, fmt.Errorf("projections: read the checkpoint of %s: %w", t.cfg.Name, err)
	}
	return p, nil
}

// Commit implements Table. It locks the checkpoint row first, so that concurrent instances wait for
// each other.
func (t *SQLTable) Commit(ctx context.Context, from, to Checkpoint, changes []Change) error {
	tx, err := t.cfg.DB.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("projections: table %s: %w", t.cfg.Name, err)
	}
	defer func() { _ = tx.Rollback() }() // no effect after the commit
	if err := t.move(ctx, tx, from, to); err != nil {
		return err
	}
	write := t.cfg.Write
	if write == nil {
		write = t.write
	}
	if len(changes) > 0 {
		if err := write(ctx, tx, changes); err != nil {
			return fmt.Errorf("projections: write rows of %s: %w", t.cfg.Name, err)
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("projections: table %s: %w", t.cfg.Name, err)
	}
	return nil
}

func (t *SQLTable) move(ctx context.Context, tx *sql.Tx, from, to Checkpoint) error {
	var res sql.Result
	var err error
	if from == (Checkpoint{}) {
		res, err = tx.ExecContext(ctx, t.params("INSERT INTO "+positionsTable+" (name, stream, sequence, stored_at) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING"),
			t.cfg.Name, to.Stream, to.Sequence, to.StoredAt)
	} else {
		res, err = tx.ExecContext(ctx, t.params("UPDATE "+positionsTable+" SET stream = ?, sequence = ?, stored_at = ? WHERE name = ? AND stream = ? AND sequence = ? AND stored_at = ?"),
			to.Stream, to.Sequence, to.StoredAt, t.cfg.Name, from.Stream, from.Sequence, from.StoredAt)
	}
	if err != nil {
		return fmt.Errorf("projections: move the checkpoint of %s: %w", t.cfg.Name, err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 1 {
		return err
	}
	return ErrConflict
}

// write is the default for SQLTableConfig.Write.
func (t *SQLTable) write(ctx context.Context, tx *sql.Tx, changes []Change) error {
	for len(changes) > 0 {
		n := min(len(changes), sqlRows)
		if err := t.writeRows(ctx, tx, changes[:n]); err != nil {
			return err
		}
		changes = changes[n:]
	}
	return nil
}

func (t *SQLTable) writeRows(ctx context.Context, tx *sql.Tx, changes []Change) error {
	var gone, rows []any
	for _, c := range changes {
		if c.Event.Tombstone {
			gone = append(gone, c.Key)
			continue
		}
		rows = append(rows, c.Key, string(c.Event.AppendPayload(nil)), c.Event.ID, c.Event.TS, c.Event.Sequence)
	}
	if len(gone) > 0 {
		query := "DELETE FROM " + t.cfg.Table + " WHERE key IN (" + list("?", len(gone)) + ")"
		if _, err := tx.ExecContext(ctx, t.params(query), gone...); err != nil {
			return err
		}
	}
	if len(rows) == 0 {
		return nil
	}
	query := "INSERT INTO " + t.cfg.Table + " (key, payload, id, ts, sequence) VALUES " + list("(?, ?, ?, ?, ?)", len(rows)/5) +
		" ON CONFLICT (key) DO UPDATE SET payload = excluded.payload, id = excluded.id, ts = excluded.ts, sequence = excluded.sequence"
	_, err := tx.ExecContext(ctx, t.params(query), rows...)
	return err
}

// list repeats s n times, separated by commas.
func list(s string, n int) string { return strings.TrimSuffix(strings.Repeat(s+", ", n), ", ") }

// params translates the question marks of a query into the dialect's parameters.
func (t *SQLTable) params(query string) string {
	if t.cfg.Dialect != PostgreSQL {
		return query
	}
	var b strings.Builder
	n := 0
	for part := range strings.SplitSeq(query, "?") {
		if n > 0 {
			b.WriteString(t.param(n))
		}
		b.WriteString(part)
		n++
	}
	return b.String()
}

func (t *SQLTable) param(n int) string {
	if t.cfg.Dialect == PostgreSQL {
		return "$" + strconv.Itoa(n)
	}
	return "?"
}
