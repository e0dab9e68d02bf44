//go:build unix

package model

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	_ "modernc.org/sqlite" // for the outbox

	"eventhub/acl"
	"eventhub/facade"
	"eventhub/jetstream"
	"eventhub/ops"
	"eventhub/outbox"
	"eventhub/projections"
)

// besides is what a hub does besides WebSockets. Empty fields leave it out.
type besides struct {
	HTTP, Ops  string // addresses
	Projection string // a topic, which the hub folds
	Outbox     string // a file of SQLite, which the hub drains
}

const (
	password       = "x" // of all clients, on all ports
	projectionName = "folded"
	// rowsLease is how long rows of a hub that was killed wait for another one.
	rowsLease = 2 * time.Second
)

// start begins all that b names. The returned function ends it, before the bus is closed.
func (b besides) start(ctx context.Context, bus *jetstream.Bus, srv *facade.Server, log *slog.Logger) (end func(context.Context) error, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	var ends []func(context.Context) error
	end = func(limit context.Context) error {
		cancel()
		var errs []error
		for _, f := range ends {
			errs = append(errs, f(limit))
		}
		running.Wait()
		return errors.Join(errs...)
	}
	serve := func(addr string, handler http.Handler) error {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
		if err != nil {
			return err
		}
		web := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
		running.Go(func() { _ = web.Serve(l) })
		ends = append(ends, func(context.Context) error { return web.Close() })
		return nil
	}
	if b.HTTP != "" {
		err = serve(b.HTTP, srv.HTTP())
	}
	if b.Ops != "" && err == nil {
		var tokens *acl.Verifier
		if tokens, err = acl.NewVerifier(ctx, acl.Config{Static: []acl.StaticToken{{Token: password}}}); err == nil {
			err = serve(b.Ops, ops.New(ops.Config{Bus: bus, Registry: prometheus.NewRegistry(), Groups: bus, Events: bus, Guard: ops.Guard{Tokens: tokens}, Logger: log}).Handler())
		}
	}
	if b.Projection != "" {
		running.Go(func() {
			for ctx.Err() == nil { // it ends where NATS is away at its start
				err := projections.Run(ctx, projections.JetStream(bus), projections.Projection{
					Name: projectionName, Topic: b.Projection, Group: projectionName, From: jetstream.FromEarliest, Apply: applyFold, Logger: log,
				})
				if err != nil {
					log.WarnContext(ctx, "the projection ended; trying again", slog.Any("error", err))
				}
				wait(ctx, 200*time.Millisecond)
			}
		})
	}
	if b.Outbox != "" && err == nil {
		var drainer *outbox.Drainer
		var db *sql.DB
		if db, err = sql.Open("sqlite", sqliteAddress(b.Outbox)); err == nil {
			ends = append(ends, func(context.Context) error { return db.Close() })
			drainer, err = b.drainer(db, bus, log)
		}
		if err == nil {
			drainer.Start()
			ends = append([]func(context.Context) error{drainer.Stop}, ends...)
		}
	}
	if err != nil {
		return nil, errors.Join(err, end(ctx))
	}
	return end, nil
}

func (b besides) drainer(db *sql.DB, bus *jetstream.Bus, log *slog.Logger) (*outbox.Drainer, error) {
	store, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, DB: db})
	if err != nil {
		return nil, err
	}
	return outbox.NewDrainer(outbox.Config{Store: store, Bus: outbox.JetStream(bus), Lease: rowsLease, RetryFirst: 100 * time.Millisecond, RetryMax: time.Second, Logger: log})
}

func sqliteAddress(path string) string {
	return "file:" + path + "?_pragma=journal_mode(WAL)&_pragma=busy_timeout(20000)&_pragma=synchronous(NORMAL)&_txlock=immediate"
}

// applyFold is fold for states that are JSON.
func applyFold(_ context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
	var s folded
	if state != nil {
		if err := json.Unmarshal(state, &s); err != nil {
			return nil, err
		}
	}
	return json.Marshal(fold(s, e.ID))
}
