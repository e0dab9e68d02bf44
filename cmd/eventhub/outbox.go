package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// outboxCmd is `eventhub outbox`.
type outboxCmd struct {
	Migrate outboxMigrateCmd `cmd:"" help:"Create the table, or upgrade it to the version that this program needs."`
	Drain   outboxDrainCmd   `cmd:"" help:"Publish waiting records. Exit code: 0 all were published, 1 some failed or remain."`
	Stats   outboxStatsCmd   `cmd:"" help:"Print the number of waiting, claimed, and parked records as a line of JSON."`
	List    outboxListCmd    `cmd:"" help:"Print records, one per line as JSON."`
	Retry   outboxRetryCmd   `cmd:"" help:"Retry parked records."`
	Purge   outboxPurgeCmd   `cmd:"" help:"Delete sent or parked records."`
	SQL     outboxSQLCmd     `cmd:"" name:"sql" help:"Print the SQL of migrate, for other migration tools."`
}

// outboxFlags select the outbox and, for drain and kv outboxes, the NATS server.
type outboxFlags struct {
	DSN   string `name:"dsn" env:"OUTBOX_DSN" placeholder:"DSN" help:"Outbox: sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE (the password may be in PGPASSWORD), or kv:BUCKET."`
	Table string `env:"OUTBOX_TABLE" default:"outbox" help:"Name of the table, for databases."`

	storeFlags
}

// Whether a command needs the bus. A KV store always does.
const (
	withBus    = true
	withoutBus = false
)

// with opens the outbox, and the bus if needed, checks the version of the table, and calls work.
func (f outboxFlags) with(ctx context.Context, std streams, needsBus bool, work func(*openedOutbox, *jetstream.Bus) error) error {
	return f.open(ctx, std, needsBus, false, func(o *openedOutbox, bus *jetstream.Bus) error {
		if err := o.ready(ctx); err != nil {
			return err
		}
		return work(o, bus)
	})
}

func (f outboxFlags) open(ctx context.Context, std streams, needsBus, make bool, work func(*openedOutbox, *jetstream.Bus) error) error {
	if f.DSN == "" {
		return errors.New("no outbox given; set its DSN (--dsn, OUTBOX_DSN)")
	}
	dsn, err := parseOutbox(f.DSN)
	if err != nil {
		return fmt.Errorf("%w (--dsn, OUTBOX_DSN)", err)
	}
	use := func(bus *jetstream.Bus) (err error) {
		o, err := dsn.open(ctx, outboxOptions{table: f.Table, bus: bus, make: make})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, o.close()) }()
		return work(o, bus)
	}
	if needsBus || dsn.bucket != nil {
		return f.storeFlags.with(ctx, std, false, use)
	}
	return use(nil)
}

// say prints a line to standard output.
func say(std streams, format string, args ...any) error {
	if _, err := fmt.Fprintf(std.out, format+"\n", args...); err != nil {
		return &outputError{err}
	}
	return nil
}

// outboxMigrateCmd is `eventhub outbox migrate`.
type outboxMigrateCmd struct {
	outboxFlags
}

// Run migrates the table and prints the versions.
func (cmd *outboxMigrateCmd) Run(ctx context.Context, std streams) error {
	return cmd.open(ctx, std, withoutBus, true, func(o *openedOutbox, _ *jetstream.Bus) error {
		if o.sql == nil {
			return say(std, "%v: has no versions", o.dsn)
		}
		from, to, err := o.migrate(ctx)
		switch {
		case err != nil:
			return err
		case from == to:
			return say(std, "%v: already at version %d", o.dsn, to)
		default:
			return say(std, "%v: migrated from version %d to %d", o.dsn, from, to)
		}
	})
}

// outboxDrainCmd is `eventhub outbox drain`.
type outboxDrainCmd struct {
	outboxFlags

	Payload    int           `name:"limit-payload" env:"EVENTHUB_LIMIT_PAYLOAD" default:"1048576" help:"Bytes of a payload; NATS may set a lower limit. Larger records are parked."`
	Skew       time.Duration `name:"clock-skew" env:"EVENTHUB_OUTBOX_CLOCK_SKEW" default:"1m" help:"Tolerated clock difference between the database and the NATS servers. A larger one logs a warning. Look-ups of events start this much earlier."`
	PassErrors bool          `help:"Let a key continue past its parked records."`
	Follow     bool          `help:"Keep publishing new records until interrupted."`
}

// Run drains the outbox and prints a summary. Its exit code is 0 if no record remains and none
// failed.
func (cmd *outboxDrainCmd) Run(ctx context.Context, std streams) error {
	if cmd.Payload < 1 {
		return fmt.Errorf("limit %d: must be positive (--limit-payload, EVENTHUB_LIMIT_PAYLOAD)", cmd.Payload)
	}
	if err := checkSkew(cmd.Skew, "--clock-skew"); err != nil {
		return err
	}
	cmd.limits.MaxPayload = cmd.Payload
	return cmd.with(ctx, std, withBus, func(o *openedOutbox, bus *jetstream.Bus) error {
		drainer, err := outbox.NewDrainer(outbox.Config{
			Store: o, Bus: outbox.JetStream(bus), ClockSkew: cmd.Skew, PassErrors: cmd.PassErrors,
			Logger: slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
		if err != nil {
			return err
		}
		if cmd.Follow {
			drainer.Start() //nolint:contextcheck // Stop ends it
			<-ctx.Done()
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
			defer cancel()
			return drainer.Stop(ctx)
		}
		done, err := drainer.Drain(ctx)
		if ctx.Err() != nil {
			err = nil // an interruption is a normal end
		}
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		st, serr := o.Stats(sctx)
		if serr != nil {
			return errors.Join(err, o.explain(serr))
		}
		left := st.Pending + st.Claimed
		err = errors.Join(err, say(std, "published %d, failed %d, parked %d; %d left", done.Published, done.Failed, done.Parked, left))
		if err == nil && done.Failed+done.Parked+left > 0 {
			return &exitError{1, nil}
		}
		return err
	})
}

// outboxStatsCmd is `eventhub outbox stats`.
type outboxStatsCmd struct {
	outboxFlags
}

// Run prints the statistics.
func (cmd *outboxStatsCmd) Run(ctx context.Context, std streams) error {
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		st, err := o.Stats(ctx)
		if err != nil {
			return o.explain(err)
		}
		return printJSON(std.out, struct {
			Pending   int   `json:"pending"`
			Claimed   int   `json:"claimed"`
			Error     int   `json:"error"`
			OldestAge int64 `json:"oldest_age_ms"`
		}{st.Pending, st.Claimed, st.Errors, st.OldestAge.Milliseconds()})
	})
}

// printJSON prints v as a line of JSON.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return &outputError{err}
	}
	return nil
}

// outboxListCmd is `eventhub outbox list`.
type outboxListCmd struct {
	outboxFlags

	Status string `enum:"pending,claimed,sent,error" default:"pending" help:"Status of the records: ${enum}."`
	After  int64  `placeholder:"SEQUENCE" help:"Start after the record with this sequence."`
	Limit  int    `default:"100" help:"Maximum number of records."`
}

// outboxPage is the number of records read at a time.
const outboxPage = 1_000

// Run prints the records.
func (cmd *outboxListCmd) Run(ctx context.Context, std streams) error {
	if cmd.Limit < 1 {
		return fmt.Errorf("limit %d: must be positive (--limit)", cmd.Limit)
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		for after, left := cmd.After, cmd.Limit; left > 0; {
			n := min(left, outboxPage)
			list, err := o.List(ctx, outbox.ListOptions{Status: outbox.Status(cmd.Status), After: after, Limit: n})
			if err != nil {
				return o.explain(err)
			}
			for _, r := range list {
				if !json.Valid(r.Payload) { // possible in a row written without Add
					r.Payload, _ = json.Marshal(string(r.Payload)) //nolint:errchkjson // strings always marshal
				}
				if err := printJSON(std.out, r); err != nil {
					return err
				}
				after = r.Sequence
			}
			if len(list) < n || o.sql == nil { // the shards of a KV store have separate sequences
				return nil
			}
			left -= n
		}
		return nil
	})
}

// outboxRetryCmd is `eventhub outbox retry`.
type outboxRetryCmd struct {
	outboxFlags

	All bool     `help:"All parked records."`
	IDs []string `arg:"" optional:"" name:"id" help:"Ids of records."`
}

// Run retries the records and prints their number.
func (cmd *outboxRetryCmd) Run(ctx context.Context, std streams) error {
	if cmd.All == (len(cmd.IDs) > 0) {
		return errors.New("no records given; list their ids or use --all, not both")
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		n, err := o.Retry(ctx, cmd.IDs...)
		if err != nil {
			return o.explain(err)
		}
		return say(std, "%d to be retried", n)
	})
}

// outboxPurgeCmd is `eventhub outbox purge`.
type outboxPurgeCmd struct {
	outboxFlags

	OlderThan time.Duration `default:"24h" help:"Minimum age since a record was sent or, for a parked record, added."`
	Status    string        `enum:"sent,error" default:"sent" help:"Status of the records: ${enum}. Parked events are lost."`
	Topic     string        `placeholder:"TOPIC" help:"Topic of the records. Default: all. Records of several topics may have the same id."`
	IDs       []string      `arg:"" optional:"" name:"id" help:"Ids to delete. Default: all."`
}

// Run deletes the records and prints their number.
func (cmd *outboxPurgeCmd) Run(ctx context.Context, std streams) error {
	if cmd.OlderThan < 0 {
		return fmt.Errorf("age %v: must not be negative (--older-than)", cmd.OlderThan)
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		all, err := purge(ctx, o, outbox.PurgeOptions{Status: outbox.Status(cmd.Status), OlderThan: cmd.OlderThan, IDs: cmd.IDs, Topic: cmd.Topic})
		if err != nil {
			return o.explain(err)
		}
		return say(std, "%d deleted", all)
	})
}

// purgeBatch is the number of records deleted at a time, so that other writers are not blocked for
// long.
const purgeBatch = 5_000

// purge deletes batches until no matching record remains, and returns the number deleted.
func purge(ctx context.Context, store outbox.Store, opts outbox.PurgeOptions) (all int, err error) {
	opts.Limit = purgeBatch
	for {
		n, err := store.Purge(ctx, opts)
		all += n
		if err != nil || n < opts.Limit {
			return all, err
		}
	}
}

// outboxSQLCmd is `eventhub outbox sql`.
type outboxSQLCmd struct {
	Dialect string `required:"" enum:"sqlite,postgres" help:"SQL dialect: ${enum}."`
	Table   string `env:"OUTBOX_TABLE" default:"outbox" help:"Name of the table."`
}

// Run prints the script.
func (cmd *outboxSQLCmd) Run(std streams) error {
	store, err := outbox.NewSQLStore(outbox.SQLConfig{Dialect: outbox.Dialect(cmd.Dialect), Table: cmd.Table})
	if err != nil {
		return err
	}
	if _, err := io.WriteString(std.out, store.SQL()); err != nil {
		return &outputError{err}
	}
	return nil
}
