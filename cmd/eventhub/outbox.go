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
	Migrate outboxMigrateCmd `cmd:"" help:"Make the table, or bring it to the version that this program needs."`
	Drain   outboxDrainCmd   `cmd:"" help:"Publish what waits. Exit code: 0 all that could be published was, 1 something failed."`
	Stats   outboxStatsCmd   `cmd:"" help:"Print how many records wait, are being published, and are parked, as a line of JSON."`
	List    outboxListCmd    `cmd:"" help:"Print records, one line of JSON each."`
	Retry   outboxRetryCmd   `cmd:"" help:"Have parked records tried again."`
	Purge   outboxPurgeCmd   `cmd:"" help:"Delete records that were sent, or are parked."`
	SQL     outboxSQLCmd     `cmd:"" name:"sql" help:"Print the SQL of migrate, for those who run their own."`
}

// outboxFlags say where the outbox is, and for drain and kv: where NATS is.
type outboxFlags struct {
	DSN   string `name:"dsn" env:"OUTBOX_DSN" placeholder:"DSN" help:"The outbox: sqlite:PATH, postgres://USER:PASSWORD@HOST:PORT/DATABASE (the password may be in PGPASSWORD), or kv:BUCKET."`
	Table string `env:"OUTBOX_TABLE" default:"outbox" help:"The table's name, in a database."`

	storeFlags
}

// The bus is opened for withBus only, and for a KV store.
const (
	withBus    = true
	withoutBus = false
)

// with calls work with the outbox, whose table is as it should be, and with the bus when that is needed.
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
		return errors.New("no outbox is named: say where it is (--dsn, OUTBOX_DSN)")
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

// say prints a line.
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

// Run migrates, and prints what it did.
func (cmd *outboxMigrateCmd) Run(ctx context.Context, std streams) error {
	return cmd.open(ctx, std, withoutBus, true, func(o *openedOutbox, _ *jetstream.Bus) error {
		if o.sql == nil {
			return say(std, "%v: there are no versions of it", o.dsn)
		}
		from, to, err := o.migrate(ctx)
		switch {
		case err != nil:
			return err
		case from == to:
			return say(std, "%v: version %d already", o.dsn, to)
		default:
			return say(std, "%v: from version %d to %d", o.dsn, from, to)
		}
	})
}

// outboxDrainCmd is `eventhub outbox drain`.
type outboxDrainCmd struct {
	outboxFlags

	Payload    int           `name:"limit-payload" env:"EVENTHUB_LIMIT_PAYLOAD" default:"1048576" help:"Bytes of a payload; fewer where NATS takes fewer. Records with more are parked."`
	Skew       time.Duration `name:"clock-skew" env:"EVENTHUB_OUTBOX_CLOCK_SKEW" default:"1m" help:"How far the clocks of the outbox's database, and of the servers of NATS, may be apart: beyond it the log warns. Events are looked for from so much earlier."`
	PassErrors bool          `help:"Let a key go on past records of it that are parked."`
	Follow     bool          `help:"Go on with what is added, until told to end."`
}

// Run drains, and prints what it did. Its exit code is 0 when nothing that waits is left, and nothing failed.
func (cmd *outboxDrainCmd) Run(ctx context.Context, std streams) error {
	if cmd.Payload < 1 {
		return fmt.Errorf("limit %d: it must be positive (--limit-payload, EVENTHUB_LIMIT_PAYLOAD)", cmd.Payload)
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
			err = nil // to be told to end is no failure
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

// printJSON prints v as a line.
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
	After  int64  `placeholder:"SEQUENCE" help:"Begin after the record of this sequence."`
	Limit  int    `default:"100" help:"The most records."`
}

// outboxPage is how many records are read at a time.
const outboxPage = 1_000

// Run prints the records.
func (cmd *outboxListCmd) Run(ctx context.Context, std streams) error {
	if cmd.Limit < 1 {
		return fmt.Errorf("limit %d: it must be positive (--limit)", cmd.Limit)
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		for after, left := cmd.After, cmd.Limit; left > 0; {
			n := min(left, outboxPage)
			list, err := o.List(ctx, outbox.ListOptions{Status: outbox.Status(cmd.Status), After: after, Limit: n})
			if err != nil {
				return o.explain(err)
			}
			for _, r := range list {
				if !json.Valid(r.Payload) { // by other hands than Add
					r.Payload, _ = json.Marshal(string(r.Payload)) //nolint:errchkjson // strings always marshal
				}
				if err := printJSON(std.out, r); err != nil {
					return err
				}
				after = r.Sequence
			}
			if len(list) < n || o.sql == nil { // sequences of a KV store are each shard's own
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

	All bool     `help:"All that are parked."`
	IDs []string `arg:"" optional:"" name:"id" help:"Ids of records."`
}

// Run makes them pending, and prints how many.
func (cmd *outboxRetryCmd) Run(ctx context.Context, std streams) error {
	if cmd.All == (len(cmd.IDs) > 0) {
		return errors.New("which records are meant: give their ids, or --all")
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		n, err := o.Retry(ctx, cmd.IDs...)
		if err != nil {
			return o.explain(err)
		}
		return say(std, "%d to be tried again", n)
	})
}

// outboxPurgeCmd is `eventhub outbox purge`.
type outboxPurgeCmd struct {
	outboxFlags

	OlderThan time.Duration `default:"24h" help:"Only those that were sent, or for parked ones added, so long ago."`
	Status    string        `enum:"sent,error" default:"sent" help:"Status of the records: ${enum}. Events of parked ones are lost."`
	IDs       []string      `arg:"" optional:"" name:"id" help:"Only these ids."`
}

// Run deletes them, and prints how many.
func (cmd *outboxPurgeCmd) Run(ctx context.Context, std streams) error {
	if cmd.OlderThan < 0 {
		return fmt.Errorf("age %v: it must not be negative (--older-than)", cmd.OlderThan)
	}
	return cmd.with(ctx, std, withoutBus, func(o *openedOutbox, _ *jetstream.Bus) error {
		all, err := purge(ctx, o, outbox.PurgeOptions{Status: outbox.Status(cmd.Status), OlderThan: cmd.OlderThan, IDs: cmd.IDs})
		if err != nil {
			return o.explain(err)
		}
		return say(std, "%d deleted", all)
	})
}

// purgeBatch is how many records are deleted at a time, so that others can write in between.
const purgeBatch = 5_000

// purge deletes until nothing is left to delete.
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
	Dialect string `required:"" enum:"sqlite,postgres" help:"Of which database: ${enum}."`
	Table   string `env:"OUTBOX_TABLE" default:"outbox" help:"The table's name."`
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
