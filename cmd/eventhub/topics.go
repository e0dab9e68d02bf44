package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topicfile"
)

// Exit codes of `eventhub topics diff` and `apply`.
const (
	exitDiffers = 1
	exitTrouble = 2 // the comparison failed
)

// topicsWait is the time that the start of a hub spends on the topics file. Remaining changes need
// `eventhub topics apply`.
const topicsWait = 10 * time.Second

// topicsCmd is `eventhub topics`.
type topicsCmd struct {
	List     topicsListCmd   `cmd:"" help:"List the streams of all topics of the running hub."`
	Show     topicsShowCmd   `cmd:"" help:"Show a topic of the running hub: what it holds, its bounds, and what groups have lost."`
	Create   topicsCreateCmd `cmd:"" help:"Create a topic, so that native NATS clients can publish to it. A topic that exists stays as it is."`
	Purge    topicsPurgeCmd  `cmd:"" help:"Remove events of a topic, whether groups have read them or not."`
	Delete   topicsDeleteCmd `cmd:"" help:"Delete a topic with its events and its groups."`
	Diff     topicsDiffCmd   `cmd:"" help:"Show how the streams differ from the topics file. Exit code: 0 no difference, 1 differences, 2 comparison failed."`
	Apply    topicsApplyCmd  `cmd:"" help:"Change the streams to match the topics file. Exit code: 0 all changes made, 1 some changes left, 2 comparison failed."`
	Replicas replicasCmd     `cmd:"" help:"Change the number of copies of all streams of the hubs on a cluster, while they work."`
	Repair   topicsRepairCmd `cmd:"" help:"Repair the bucket of a compacted topic, so that the server fills it again."`
}

// storeFlags select the streams: at NATS_URL, or in the data directory of a hub that is not
// running.
type storeFlags struct {
	busFlags `group:"Bus"`

	limits jetstream.Limits // zero fields select the defaults
}

// with opens a bus with the rules of the topics file and calls work. make allows an empty data
// directory.
func (f storeFlags) with(ctx context.Context, std streams, make bool, work func(*jetstream.Bus) error) (err error) {
	f.NATSListen = "" // only the hub listens
	faults := f.validate()
	rules, err := f.rules()
	if listed, many := errors.AsType[topicfile.Errors](err); many {
		faults = append(faults, listed.Unwrap()...)
	} else if err != nil {
		faults = append(faults, err)
	}
	if f.NATSURL == "" {
		if err := checkDataDir(f.Data); err != nil {
			faults = append(faults, err)
		}
	}
	if len(faults) > 0 {
		for _, fault := range faults {
			_, _ = fmt.Fprintln(std.err, "eventhub: "+strings.ReplaceAll(fault.Error(), "\n", "; "))
		}
		return &exitError{exitTrouble, nil}
	}
	if f.NATSURL == "" && !make {
		if _, err := os.Stat(f.Data); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("data directory %s does not exist; set the data directory of a hub (--data, EVENTHUB_DATA) or its NATS (--nats-url, NATS_URL)", f.Data)
		}
	}
	log := slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	bus, err := f.open(ctx, jetstream.Config{Topics: rules, Limits: f.limits, Logger: log})
	if errors.Is(err, embedded.ErrInUse) {
		return fmt.Errorf("data directory %s is in use by a running hub; stop the hub, or start it with EVENTHUB_NATS_LISTEN=127.0.0.1:4222 and run this command with NATS_URL=nats://TOKEN@127.0.0.1:4222 and the hub's token", f.Data)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bus.Close()) }() //nolint:contextcheck // Close limits its own duration
	return work(bus)
}

// trouble converts an error for a command whose exit code 1 has another meaning.
func trouble(err error) error {
	if _, ok := errors.AsType[*exitError](err); ok {
		return err
	}
	return &exitError{exitTrouble, err}
}

func printTable(w io.Writer, rows [][]string) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		_, _ = io.WriteString(table, strings.Join(row, "\t")+"\n") // Flush reports errors
	}
	if err := table.Flush(); err != nil {
		return &outputError{err}
	}
	return nil
}

// topicsDiffCmd is `eventhub topics diff`.
type topicsDiffCmd struct {
	storeFlags
}

// Run prints the changes that apply would make.
func (cmd *topicsDiffCmd) Run(ctx context.Context, std streams) error {
	var changes []jetstream.TopicChange
	err := cmd.with(ctx, std, false, func(bus *jetstream.Bus) (err error) {
		changes, err = bus.Admin().PlanTopics(ctx)
		return err
	})
	if err != nil {
		return trouble(err)
	}
	rows := make([][]string, len(changes))
	for i := range changes {
		rows[i] = []string{string(changes[i].Kind), withReason(&changes[i])}
	}
	if err := printTable(std.out, rows); err != nil {
		return trouble(err)
	}
	if len(changes) > 0 {
		return &exitError{exitDiffers, nil}
	}
	return nil
}

// withReason describes a change, with the reason if it cannot be made.
func withReason(c *jetstream.TopicChange) string {
	if c.Err == nil {
		return c.String()
	}
	return c.String() + ": " + strings.ReplaceAll(c.Err.Error(), "\n", "; ")
}

// topicsApplyCmd is `eventhub topics apply`.
type topicsApplyCmd struct {
	storeFlags

	AllowDeletion bool `help:"Also lower limits, which may delete events at once."`
}

// Run applies the topics file and prints the result of each change.
func (cmd *topicsApplyCmd) Run(ctx context.Context, std streams) error {
	var changes []jetstream.TopicChange
	err := cmd.with(ctx, std, true, func(bus *jetstream.Bus) (err error) {
		changes, err = bus.Admin().ApplyTopics(ctx, cmd.AllowDeletion)
		return err
	})
	rows := make([][]string, len(changes))
	left := false
	for i := range changes {
		c := &changes[i]
		outcome := "left"
		switch {
		case c.Done:
			outcome = "done"
		case c.Kind == jetstream.ChangeImpossible:
			outcome = "impossible"
		case c.Err != nil:
			outcome = "failed"
		}
		text := withReason(c)
		if outcome == "left" {
			text += ": may delete events; use --allow-deletion"
		}
		rows[i] = []string{outcome, text}
		left = left || !c.Done
	}
	if err := errors.Join(printTable(std.out, rows), err); err != nil {
		return trouble(err)
	}
	if left {
		return &exitError{exitDiffers, nil}
	}
	return nil
}

// topicsRepairCmd is `eventhub topics repair`.
type topicsRepairCmd struct {
	storeFlags

	RemoveForeign bool   `help:"Also remove entries that did not come from the topic and whose keys have no event left in it. These entries are lost."`
	Topic         string `arg:"" help:"Compacted topic."`
}

// Run repairs the bucket and prints the findings.
func (cmd *topicsRepairCmd) Run(ctx context.Context, std streams) error {
	return cmd.with(ctx, std, false, func(bus *jetstream.Bus) error {
		report, err := bus.Admin().RepairBucket(ctx, cmd.Topic, jetstream.RepairOptions{RemoveForeign: cmd.RemoveForeign})
		if errors.Is(err, jetstream.ErrNotFound) {
			return fmt.Errorf("topic %s does not exist; eventhub topics list shows the existing topics", cmd.Topic)
		}
		if err != nil {
			return fmt.Errorf("repair the bucket of %s: %w", cmd.Topic, err)
		}
		var text strings.Builder
		for _, fault := range report.Faults {
			fmt.Fprintf(&text, "repaired: %s\n", fault)
		}
		for _, e := range report.Foreign {
			fmt.Fprintf(&text, "foreign entry of key %q: %s\n", e.Key, e.Outcome)
		}
		if more := report.ForeignTotal - len(report.Foreign); more > 0 {
			fmt.Fprintf(&text, "and %d more foreign entries\n", more)
		}
		fmt.Fprintf(&text, "the server keeps bucket %s of %s up to date\n", report.Bucket, cmd.Topic)
		if _, err := io.WriteString(std.out, text.String()); err != nil {
			return &outputError{err}
		}
		return nil
	})
}

// applyTopics changes streams to match the topics file, except for changes that may delete events,
// and logs the rest. Then it creates the built-in topics. A topics file that cannot be applied does
// not stop the hub; the streams are used as they are.
func (h *hub) applyTopics(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, topicsWait)
	defer cancel()
	changes, err := h.bus.Admin().ApplyTopics(ctx, false)
	for i := range changes {
		c := &changes[i]
		attrs := []slog.Attr{
			slog.String("topic", c.Topic), slog.String("stream", c.Stream), slog.String("rule", c.Rule), slog.String("field", c.Field),
			slog.String("have", c.Have), slog.String("want", c.Want), slog.String("kind", string(c.Kind)),
		}
		if c.Done {
			h.log.LogAttrs(ctx, slog.LevelInfo, "changed a topic to match its rule", attrs...)
			continue
		}
		why := slog.String("hint", "the change may delete events; use eventhub topics apply --allow-deletion")
		if c.Err != nil {
			why = slog.Any("error", c.Err)
		}
		h.log.LogAttrs(ctx, slog.LevelWarn, "topic does not match its rule", append(attrs, why)...)
	}
	if err != nil {
		h.log.LogAttrs(ctx, slog.LevelWarn, "failed to apply the whole topics file; run eventhub topics apply", slog.Any("error", err))
	}
	if err := h.bus.Admin().CreateBuiltinTopics(ctx); err != nil {
		h.log.LogAttrs(ctx, slog.LevelWarn, "failed to create all built-in topics; their first use creates them", slog.Any("error", err))
	}
}
