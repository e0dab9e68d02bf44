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

// The names of a hub's outboxes in its metrics.
const (
	outboxOfDSN  = "database"
	outboxOfHTTP = "http"
)

// outboxTry bounds one try to open the outbox of OUTBOX_DSN.
const outboxTry = 20 * time.Second

// outboxServeFlags are the flags of serve about outboxes.
type outboxServeFlags struct {
	DSN     string        `name:"outbox-dsn" env:"OUTBOX_DSN" placeholder:"DSN" help:"Publish what is added to this outbox: sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE (the password may be in PGPASSWORD), or kv:BUCKET."`
	Table   string        `name:"outbox-table" env:"OUTBOX_TABLE" default:"outbox" help:"The table's name, in a database."`
	Migrate bool          `name:"outbox-migrate" env:"EVENTHUB_OUTBOX_MIGRATE" default:"true" negatable:"" help:"Make the table at the start, or bring it to the version that is needed; a SQLite file, too. Without it: eventhub outbox migrate."`
	HTTP    bool          `name:"outbox-http" env:"EVENTHUB_OUTBOX_HTTP" default:"true" negatable:"" help:"Take events at POST /outbox/TOPIC, which wait in the file outbox.db of the data directory while NATS is away."`
	Skew    time.Duration `name:"outbox-clock-skew" env:"EVENTHUB_OUTBOX_CLOCK_SKEW" default:"1m" help:"How far the clocks of the outbox's database, and of the servers of NATS, may be apart: beyond it the log warns. Events are looked for from so much earlier."`
}

// checkSkew refuses what makes no sense as the skew of clocks.
func checkSkew(skew time.Duration, flag string) error {
	const most = 24 * time.Hour
	if skew <= 0 || skew > most {
		return fmt.Errorf("clock skew %v: more than 0s and at most %v are allowed (%s, EVENTHUB_OUTBOX_CLOCK_SKEW)", skew, most, flag)
	}
	return nil
}

// outboxDSN is where the outbox of OUTBOX_DSN is, nil without one.
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

// outboxObserver passes on what a drainer reports.
type outboxObserver struct{ *ops.Outbox }

func (o outboxObserver) Backlog(st outbox.Stats) {
	o.Outbox.Backlog(st.Pending+st.Claimed, st.Errors, st.OldestAge)
}

// drainedOutbox is an outbox that a hub drains.
type drainedOutbox struct {
	*openedOutbox

	drainer *outbox.Drainer
}

// drain starts a drainer of an outbox, which belongs to what is returned. Close that before the bus. state is told whether the
// outbox can be used.
//
// lease is how long records wait for the next start when the hub is killed; 0 is the default.
func (h *hub) drain(ctx context.Context, o *openedOutbox, state *outboxState, lease time.Duration, observer outbox.Observer) (*drainedOutbox, error) {
	st, err := o.Stats(ctx)
	if err != nil {
		return nil, errors.Join(o.explain(err), o.close())
	}
	observer.Backlog(st) // that of the drainer comes later
	drainer, err := outbox.NewDrainer(outbox.Config{
		Store: watchedStore{o, state}, Bus: outbox.JetStream(h.bus), Lease: lease, ClockSkew: h.cmd.Skew, Observer: observer, Logger: state.log,
	})
	if err != nil {
		return nil, errors.Join(err, o.close())
	}
	drainer.Start() //nolint:contextcheck // close ends it
	return &drainedOutbox{openedOutbox: o, drainer: drainer}, nil
}

// close publishes what the drainer has, as long as ctx lasts, and closes the database.
func (d *drainedOutbox) close(ctx context.Context, log *slog.Logger) error {
	if err := d.drainer.Stop(ctx); err != nil {
		log.LogAttrs(ctx, slog.LevelWarn, "an outbox has records that were to be published: another hub, or the next start, does it", slog.Any("error", err))
	}
	return d.openedOutbox.close()
}

// openOutboxes opens the hub's own outbox if something may wait there, and starts to open that of OUTBOX_DSN.
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
		h.log.LogAttrs(ctx, slog.LevelInfo, "the table of the outbox was migrated", slog.Int("from", from), slog.Int("to", to))
	}
	return err
}

// closeOutboxes ends what openOutboxes and requests have opened. Nothing is added any more.
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
