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
	_ "modernc.org/sqlite" // the driver

	"eventhub/jetstream"
	"eventhub/outbox"
)

const (
	// outboxConns is the most connections to PostgreSQL, besides the one that listens.
	outboxConns = 4
	// outboxConnectWait bounds how long a connection to PostgreSQL takes, unless the DSN says otherwise.
	outboxConnectWait = 10 * time.Second
	// outboxLook bounds how long serve --check looks at a database.
	outboxLook = 5 * time.Second
)

// outboxDSN is where an outbox is: what a DSN says.
type outboxDSN struct {
	path     string          // of the SQLite file
	postgres *pgx.ConnConfig // or of PostgreSQL
	bucket   *string         // or of the bucket in NATS
}

// parseOutbox reads a DSN. No error shows any of it, for there may be a password in it.
func parseOutbox(dsn string) (outboxDSN, error) {
	kind, rest, _ := strings.Cut(dsn, ":")
	switch kind {
	case "sqlite":
		path := strings.TrimPrefix(rest, "//")
		if path == "" || strings.HasSuffix(path, "/") || filepath.Base(path) == ":memory:" || strings.ContainsAny(path, "?\x00") {
			return outboxDSN{}, errors.New("a SQLite outbox is a file: give sqlite:PATH, without parameters")
		}
		return outboxDSN{path: filepath.Clean(path)}, nil // of two slashes at the start, SQLite would take what follows for a host
	case "postgres", "postgresql":
		cfg, err := pgx.ParseConfig(dsn)
		if err != nil || !strings.HasPrefix(rest, "//") {
			// The cause may quote a part of the password, where that has a character that ends it.
			return outboxDSN{}, errors.New("the address of PostgreSQL cannot be read: give postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=…, with the special characters of the password as in a URL (%2F for /)")
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
		return outboxDSN{}, errors.New("the DSN of the outbox is of no kind that is known: give sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE, or kv:BUCKET")
	}
}

// String names the outbox, without a password.
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

// check finds out whether a file could be there, without making it.
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
		return fmt.Errorf("%v: it is a directory", p)
	}
	return nil
}

// openedOutbox is an outbox that can be used. Close it.
type openedOutbox struct {
	outbox.Store

	dsn outboxDSN
	sql *outbox.SQLStore // nil for a KV store
	db  *sql.DB
}

// outboxOptions say how an outbox is opened.
type outboxOptions struct {
	table      string
	maxPayload int            // 0 is the default
	bus        *jetstream.Bus // for a KV store
	make       bool           // make the file when there is none
}

// open opens the outbox. But for a KV store, nothing is asked of the database yet.
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
	if _, err := outbox.NewSQLStore(cfg); err != nil { // before a file is made
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
		conns = 1 // they would wait for each other's writes in no fair order
	}
	cfg.DB.SetMaxOpenConns(conns)
	cfg.DB.SetMaxIdleConns(conns)
	store, err := outbox.NewSQLStore(cfg)
	if err != nil {
		return nil, errors.Join(err, cfg.DB.Close())
	}
	return &openedOutbox{Store: store, dsn: p, sql: store, db: cfg.DB}, nil
}

// openSQLite opens a file as outbox.SQLConfig.DB says. One that it makes is its owner's alone.
func openSQLite(path string, make bool) (*sql.DB, error) {
	flags := os.O_RDWR
	if make {
		flags |= os.O_CREATE
	}
	file, err := os.OpenFile(path, flags, 0o600) //nolint:gosec // the file is the operator's choice
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("it does not exist: eventhub outbox migrate makes it")
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

// look finds out whether the outbox could be drained now. It asks a database on a network only, and changes nothing. migrates
// says that the table would be made or brought to the version that is needed.
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

// ready reports what eventhub outbox migrate would have to do first.
func (o *openedOutbox) ready(ctx context.Context) error { return o.version(ctx, false) }

// version reports what is wrong with the table; one that lacks something is right for those who migrate it.
func (o *openedOutbox) version(ctx context.Context, migrates bool) error {
	if o.sql == nil {
		return nil
	}
	have, need, err := o.sql.Version(ctx)
	switch {
	case err != nil:
		return o.explain(err)
	case have > need:
		return fmt.Errorf("%v: the table has version %d, this program knows %d: use a newer one", o.dsn, have, need)
	case have < need && !migrates:
		return fmt.Errorf("%v: the table has version %d, this program needs %d: eventhub outbox migrate makes it so", o.dsn, have, need)
	}
	return nil
}

// migrate makes the table as this program needs it, and says what it was before and is now: 0 is no table.
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

// explain says which outbox an error is of.
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
