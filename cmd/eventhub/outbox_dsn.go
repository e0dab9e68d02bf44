package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // registers the driver

	"eventhub/jetstream"
	"eventhub/outbox"
)

const (
	// outboxConns is the maximum number of connections to PostgreSQL, not counting the one that
	// listens.
	outboxConns = 4
	// outboxConnectWait is the default timeout for connecting to PostgreSQL.
	outboxConnectWait = 10 * time.Second
	// outboxLook is the timeout of serve --check for a database.
	outboxLook = 5 * time.Second
)

// outboxDSN is a parsed DSN of an outbox. Exactly one field is set.
type outboxDSN struct {
	path     string          // SQLite file
	postgres *pgx.ConnConfig // PostgreSQL database
	bucket   *string         // KV bucket in NATS; "" selects the default name
}

// parseOutbox parses a DSN. Its errors never quote the DSN, which may contain a password.
func parseOutbox(dsn string) (outboxDSN, error) {
	kind, rest, _ := strings.Cut(dsn, ":")
	switch kind {
	case "sqlite":
		path := strings.TrimPrefix(rest, "//")
		if path == "" || strings.HasSuffix(path, "/") || filepath.Base(path) == ":memory:" || strings.ContainsAny(path, "?\x00") {
			return outboxDSN{}, errors.New("SQLite outbox must be a file; use sqlite:PATH without parameters")
		}
		// after two leading slashes, SQLite would take the next part for a host
		return outboxDSN{path: filepath.Clean(path)}, nil
	case "postgres", "postgresql":
		cfg, err := pgx.ParseConfig(dsn)
		if err != nil || !strings.HasPrefix(rest, "//") {
			// The error of pgx may quote part of a password that contains special characters.
			return outboxDSN{}, errors.New("invalid PostgreSQL address; use postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=… and escape special characters of the password as in a URL (%2F for /)")
		}
		if !strings.Contains(rest, "default_query_exec_mode=") {
			cfg.DefaultQueryExecMode = pgx.QueryExecModeExec // see outbox.SQLConfig.DB
		}
		if cfg.ConnectTimeout == 0 {
			cfg.ConnectTimeout = outboxConnectWait
		}
		return outboxDSN{postgres: cfg}, nil
	case "kv":
		return outboxDSN{bucket: &rest}, nil
	default:
		return outboxDSN{}, errors.New("unknown kind of outbox DSN; use sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE, or kv:BUCKET")
	}
}

// String names the outbox without its password.
func (p outboxDSN) String() string {
	switch {
	case p.postgres != nil:
		return "PostgreSQL at " + net.JoinHostPort(p.postgres.Host, strconv.Itoa(int(p.postgres.Port))) + ", database " + p.postgres.Database
	case p.bucket != nil:
		if *p.bucket == "" {
			return "KV bucket " + outbox.DefaultTable
		}
		return "KV bucket " + *p.bucket
	default:
		return "SQLite file " + p.path
	}
}

// check checks whether the SQLite file can exist at its path, without creating it.
func (p outboxDSN) check() error {
	if p.path == "" {
		return nil
	}
	dir := filepath.Dir(p.path)
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return fmt.Errorf("%v: directory %s: %w", p, dir, cause(err))
	case !info.IsDir():
		return fmt.Errorf("%v: %s is not a directory", p, dir)
	}
	if info, err = os.Stat(p.path); err == nil && info.IsDir() {
		return fmt.Errorf("%v: is a directory", p)
	}
	return nil
}

// openedOutbox is an open outbox. The caller must close it.
type openedOutbox struct {
	outbox.Store

	dsn outboxDSN
	sql *outbox.SQLStore // nil for a KV store
	db  *sql.DB
}

// outboxOptions configure how an outbox is opened.
type outboxOptions struct {
	table      string
	maxPayload int            // in bytes; 0 selects the default
	bus        *jetstream.Bus // required for a KV store
	make       bool           // create a missing SQLite file
}

// open opens the outbox. For a database it does not connect yet.
func (p outboxDSN) open(ctx context.Context, opts outboxOptions) (*openedOutbox, error) {
	if p.bucket != nil {
		bucket, err := opts.bus.Collections().Open(ctx, cmp.Or(*p.bucket, outbox.DefaultTable))
		if err != nil {
			return nil, fmt.Errorf("%v: %w", p, err)
		}
		store, err := outbox.NewKVStore(outbox.KVConfig{Collection: bucket})
		if err != nil {
			return nil, err
		}
		return &openedOutbox{Store: store, dsn: p}, nil
	}
	cfg := outbox.SQLConfig{Dialect: outbox.SQLite, Table: opts.table, MaxPayload: opts.maxPayload}
	if _, err := outbox.NewSQLStore(cfg); err != nil { // check the options before a file is created
		return nil, err
	}
	if p.postgres != nil {
		cfg.Dialect, cfg.DB = outbox.PostgreSQL, stdlib.OpenDB(*p.postgres)
		cfg.Listen = outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.ConnectConfig(ctx, p.postgres.Copy()) })
	} else {
		if err := p.check(); err != nil {
			return nil, err
		}
		var err error
		if cfg.DB, err = openSQLite(p.path, opts.make); err != nil {
			return nil, fmt.Errorf("%v: %w", p, err)
		}
	}
	conns := outboxConns
	if p.path != "" {
		conns = 1 // several connections would compete for the write lock without fairness
	}
	cfg.DB.SetMaxOpenConns(conns)
	cfg.DB.SetMaxIdleConns(conns)
	store, err := outbox.NewSQLStore(cfg)
	if err != nil {
		return nil, errors.Join(err, cfg.DB.Close())
	}
	return &openedOutbox{Store: store, dsn: p, sql: store, db: cfg.DB}, nil
}

// openSQLite opens a file with the settings that outbox.SQLConfig.DB recommends. A new file is
// accessible only by its owner.
func openSQLite(path string, make bool) (*sql.DB, error) {
	flags := os.O_RDWR
	if make {
		flags |= os.O_CREATE
	}
	file, err := os.OpenFile(path, flags, 0o600) //nolint:gosec // the file is the operator's choice
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("file does not exist; create it with eventhub outbox migrate")
	}
	if err != nil {
		return nil, cause(err)
	}
	if err := file.Close(); err != nil {
		return nil, cause(err)
	}
	name := (&url.URL{Path: path}).EscapedPath()
	return sql.Open("sqlite", "file:"+name+"?mode=rw&_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)&_txlock=immediate")
}

// look checks whether the outbox could be drained now, without changing anything. It only contacts
// databases on a network. migrates means that the hub would migrate the table.
func (p outboxDSN) look(ctx context.Context, table string, migrates bool) error {
	if p.postgres == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, outboxLook)
	defer cancel()
	o, err := p.open(ctx, outboxOptions{table: table})
	if err != nil {
		return err
	}
	return errors.Join(o.version(ctx, migrates), o.close())
}

// ready returns an error if the table needs a migration.
func (o *openedOutbox) ready(ctx context.Context) error { return o.version(ctx, false) }

// version returns an error if the version of the table does not suit this program. An old version
// is accepted if migrates is true.
func (o *openedOutbox) version(ctx context.Context, migrates bool) error {
	if o.sql == nil {
		return nil
	}
	have, need, err := o.sql.Version(ctx)
	switch {
	case err != nil:
		return o.explain(err)
	case have > need:
		return fmt.Errorf("%v: table has version %d but this program knows only %d; use a newer program", o.dsn, have, need)
	case have < need && !migrates:
		return fmt.Errorf("%v: table has version %d but this program needs %d; run eventhub outbox migrate", o.dsn, have, need)
	}
	return nil
}

// outdated reports whether there is a table of an earlier version.
func (o *openedOutbox) outdated(ctx context.Context) bool {
	if o.sql == nil {
		return false
	}
	have, need, err := o.sql.Version(ctx)
	return err == nil && have > 0 && have < need
}

// migrate upgrades the table and returns its versions before and after. Version 0 means that there
// was no table.
func (o *openedOutbox) migrate(ctx context.Context) (from, to int, err error) {
	if o.sql == nil {
		return 0, 0, nil
	}
	steps, err := o.sql.Migrate(ctx)
	if err != nil {
		return 0, 0, o.explain(err)
	}
	to, _, err = o.sql.Version(ctx)
	return to - steps, to, o.explain(err)
}

// explain adds the name of the outbox to an error.
func (o *openedOutbox) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%v: %w", o.dsn, err)
}

func (o *openedOutbox) close() error {
	if o.db == nil {
		return nil
	}
	return o.db.Close()
}
