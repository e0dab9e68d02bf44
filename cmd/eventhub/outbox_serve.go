package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"eventhub/ops"
	"eventhub/outbox"
)

// Names of a hub's outboxes in its metrics.
const (
	outboxOfDSN  = "database"
	outboxOfHTTP = "http"
)

// outboxTry is the timeout of one attempt to open the outbox of OUTBOX_DSN.
const outboxTry = 20 * time.Second

// outboxUpgrade is the timeout of an attempt that upgrades a table: a large one gets a new index.
const outboxUpgrade = 10 * time.Minute

// outboxServeFlags are the outbox flags of serve.
type outboxServeFlags struct {
	DSN     string        `name:"outbox-dsn" env:"OUTBOX_DSN" placeholder:"DSN" help:"Outbox to publish from: sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE (the password may be in PGPASSWORD), or kv:BUCKET."`
	Table   string        `name:"outbox-table" env:"OUTBOX_TABLE" default:"outbox" help:"Name of the table, for databases."`
	Migrate bool          `name:"outbox-migrate" env:"EVENTHUB_OUTBOX_MIGRATE" default:"true" negatable:"" help:"Create or upgrade the table, and create a SQLite file, at startup. Otherwise use eventhub outbox migrate."`
	HTTP    bool          `name:"outbox-http" env:"EVENTHUB_OUTBOX_HTTP" default:"true" negatable:"" help:"Accept events at POST /outbox/TOPIC. They wait in outbox.db in the data directory while NATS is unavailable."`
	Skew    time.Duration `name:"outbox-clock-skew" env:"EVENTHUB_OUTBOX_CLOCK_SKEW" default:"1m" help:"Tolerated clock difference between the database and the NATS servers. A larger one logs a warning. Look-ups of events start this much earlier."`
}

// checkSkew rejects an invalid clock skew.
func checkSkew(skew time.Duration, flag string) error {
	const most = 24 * time.Hour
	if skew <= 0 || skew > most {
		return fmt.Errorf("clock skew %v: must be more than 0s and at most %v (%s, EVENTHUB_OUTBOX_CLOCK_SKEW)", skew, most, flag)
	}
	return nil
}

// outboxDSN returns the parsed and checked OUTBOX_DSN, or nil if there is none.
func (f outboxServeFlags) outboxDSN() (*outboxDSN, error) {
	if f.DSN == "" {
		return nil, nil
	}
	where := func(err error) error { return fmt.Errorf("%w (--outbox-dsn, OUTBOX_DSN)", err) }
	dsn, err := parseOutbox(f.DSN)
	if err != nil {
		return nil, where(err)
	}
	if err := dsn.check(); err != nil {
		return nil, where(err)
	}
	if _, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.SQLite, Table: f.Table}); err != nil {
		return nil, fmt.Errorf("%w (--outbox-table, OUTBOX_TABLE)", err)
	}
	return &dsn, nil
}

// outboxObserver passes the reports of a drainer on to the metrics.
type outboxObserver struct{ *ops.Outbox }

func (o outboxObserver) Backlog(st outbox.Stats) {
	o.Outbox.Backlog(st.Pending+st.Claimed, st.Errors, st.OldestAge)
}

// drainedOutbox is an open outbox with its running drainer.
type drainedOutbox struct {
	*openedOutbox

	drainer *outbox.Drainer
}

// drain starts a drainer for an outbox, with what cfg says of it, and takes ownership of the
// outbox. The caller must close the result before the bus. state tracks whether the outbox is
// available.
func (h *hub) drain(ctx context.Context, o *openedOutbox, state *outboxState, cfg outbox.Config) (*drainedOutbox, error) {
	st, err := o.Stats(ctx)
	if err != nil {
		return nil, errors.Join(o.explain(err), o.close())
	}
	cfg.Observer.Backlog(st) // the drainer's first report comes later
	cfg.Store, cfg.ClockSkew, cfg.Logger = watchedStore{o, state}, h.cmd.Skew, state.log
	if h.tracer != nil {
		cfg.Tracer = h.tracer
	}
	drainer, err := outbox.NewDrainer(cfg)
	if err != nil {
		return nil, errors.Join(err, o.close())
	}
	drainer.Start() //nolint:contextcheck // ended by close
	return &drainedOutbox{openedOutbox: o, drainer: drainer}, nil
}

// close publishes the records that the drainer holds, until ctx ends, and closes the database.
func (d *drainedOutbox) close(ctx context.Context, log *slog.Logger) error {
	if err := d.drainer.Stop(ctx); err != nil {
		log.LogAttrs(ctx, slog.LevelWarn, "failed to publish all claimed records of an outbox; another hub or the next start will publish them", slog.Any("error", err))
	}
	return d.openedOutbox.close()
}

// openOutboxes opens the hub's own outbox if its file exists, and starts to open the outbox of
// OUTBOX_DSN.
func (h *hub) openOutboxes(ctx context.Context) error {
	if h.cmd.HTTP {
		h.own = newOwnOutbox(h, filepath.Join(h.cmd.Data, ownOutboxName))
		if err := h.own.resume(ctx); err != nil {
			return err
		}
	}
	if h.outbox == nil {
		return nil
	}
	h.database = newDatabaseOutbox(h, *h.outbox)
	return h.database.start(ctx)
}

func (h *hub) prepareOutbox(ctx context.Context, o *openedOutbox) error {
	if !h.cmd.outboxServeFlags.Migrate {
		return o.ready(ctx)
	}
	from, to, err := o.migrate(ctx)
	if err == nil && from != to {
		h.log.LogAttrs(ctx, slog.LevelInfo, "migrated the table of the outbox", slog.Int("from", from), slog.Int("to", to))
	}
	return err
}

// closeOutboxes closes all outboxes. Nothing can be added afterwards.
func (h *hub) closeOutboxes(ctx context.Context) error {
	var errs []error
	if h.own != nil {
		errs = append(errs, h.own.close(ctx))
	}
	if h.database != nil {
		errs = append(errs, h.database.close(ctx))
	}
	return errors.Join(errs...)
}
