package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/embedded"
	"eventhub/jetstream/topicfile"
)

// The exit codes of `eventhub topics diff` and `apply`.
const (
	exitDiffers = 1
	exitTrouble = 2 // the two could not be compared
)

// topicsWait bounds what a start spends on the topics file. What it does not come to waits for `eventhub topics apply`.
const topicsWait = 10 * time.Second

// topicsCmd is `eventhub topics`.
type topicsCmd struct {
	List   topicsListCmd   `cmd:"" help:"List the streams of all topics."`
	Diff   topicsDiffCmd   `cmd:"" help:"Say how the streams differ from the topics file. Exit code: 0 not at all, 1 they differ, 2 it could not be found out."`
	Apply  topicsApplyCmd  `cmd:"" help:"Make the streams as the topics file says. Exit code: 0 they are, 1 something is left, 2 it could not be found out."`
	Repair topicsRepairCmd `cmd:"" help:"Have the bucket of a compacted topic filled again."`
}

// storeFlags say where the streams are: at NATS_URL, or in the data directory of a hub that is not running.
type storeFlags struct {
	busFlags `group:"Bus"`

	limits jetstream.Limits // zero fields take their defaults
}

// with calls work with a bus and the rules of the topics file. make lets it begin with an empty data directory.
func (f storeFlags) with(ctx context.Context, std streams, make bool, work func(*jetstream.Bus) error) (err error) {
	f.NATSListen = "" // that is about the hub
	faults := f.validate()
	rules, err := f.rules()
	if listed, many := errors.AsType[topicfile.Errors](err); many {
		faults = append(faults, listed.Unwrap()...)
	} else if err != nil {
		faults = append(faults, err)
	}
	if len(faults) > 0 {
		for _, fault := range faults {
			_, _ = fmt.Fprintln(std.err, "eventhub: "+strings.ReplaceAll(fault.Error(), "\n", "; "))
		}
		return &exitError{exitTrouble, nil}
	}
	if f.NATSURL == "" && !make {
		if _, err := os.Stat(f.Data); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the data directory %s does not exist: name that of a hub (--data, EVENTHUB_DATA) or its NATS (--nats-url, NATS_URL)", f.Data)
		}
	}
	log := slog.New(slog.NewTextHandler(std.err, &slog.HandlerOptions{Level: slog.LevelWarn}))
	bus, err := f.open(ctx, jetstream.Config{Topics: rules, Limits: f.limits, Logger: log}, "")
	if errors.Is(err, embedded.ErrInUse) {
		return fmt.Errorf("data directory %s: a hub is running on it: start that hub with EVENTHUB_NATS_LISTEN=127.0.0.1:4222 and give this command NATS_URL=nats://TOKEN@127.0.0.1:4222 with the hub's token, or stop the hub first", f.Data)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bus.Close()) }() //nolint:contextcheck // it bounds itself
	return work(bus)
}

// topicsListCmd is `eventhub topics list`.
type topicsListCmd struct {
	storeFlags
}

// Run prints the streams.
func (cmd *topicsListCmd) Run(ctx context.Context, std streams) error {
	return cmd.with(ctx, std, false, func(bus *jetstream.Bus) error {
		all, err := bus.Admin().Topics(ctx)
		if err != nil {
			return err
		}
		rows := [][]string{{"TOPIC", "STREAM", "MESSAGES", "BYTES", "AGE", "COMPACTION", "RULE", "DRIFT"}}
		for _, s := range all {
			topic := s.Topic
			if topic == "" {
				topic = "(family)"
			}
			rows = append(rows, []string{
				topic, s.Stream, strconv.FormatUint(s.Messages, 10), strconv.FormatUint(s.Bytes, 10), jetstream.AgeText(s.Age),
				yes(s.Compacted), s.Rule, yes(len(s.Changes) > 0),
			})
		}
		return printTable(std.out, rows)
	})
}

// trouble is the failure of a command whose exit code 1 means something else.
func trouble(err error) error {
	if _, ok := errors.AsType[*exitError](err); ok {
		return err
	}
	return &exitError{exitTrouble, err}
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

func printTable(w io.Writer, rows [][]string) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		_, _ = io.WriteString(table, strings.Join(row, "\t")+"\n") // Flush tells
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

// Run prints what apply would do.
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

// withReason is a change, and why it cannot be carried out.
func withReason(c *jetstream.TopicChange) string {
	if c.Err == nil {
		return c.String()
	}
	return c.String() + ": " + strings.ReplaceAll(c.Err.Error(), "\n", "; ")
}

// topicsApplyCmd is `eventhub topics apply`.
type topicsApplyCmd struct {
	storeFlags

	AllowDeletion bool `help:"Also make bounds narrower, by which events may be deleted at once."`
}

// Run applies the file and prints what became of each change.
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
			text += ": events may be deleted by it, which --allow-deletion allows"
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

	RemoveForeign bool   `help:"Also remove entries that did not come from the topic and whose keys have no event left there. They are lost then."`
	Topic         string `arg:"" help:"The compacted topic."`
}

// Run repairs the bucket, and prints what it found.
func (cmd *topicsRepairCmd) Run(ctx context.Context, std streams) error {
	return cmd.with(ctx, std, false, func(bus *jetstream.Bus) error {
		report, err := bus.Admin().RepairBucket(ctx, cmd.Topic, jetstream.RepairOptions{RemoveForeign: cmd.RemoveForeign})
		if errors.Is(err, jetstream.ErrNotFound) {
			return fmt.Errorf("topic %s does not exist: eventhub topics list shows those that do", cmd.Topic)
		}
		if err != nil {
			return fmt.Errorf("repairing the bucket of %s: %w", cmd.Topic, err)
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
		fmt.Fprintf(&text, "the bucket %s of %s is filled by the server\n", report.Bucket, cmd.Topic)
		if _, err := io.WriteString(std.out, text.String()); err != nil {
			return &outputError{err}
		}
		return nil
	})
}

// applyTopics makes streams as the topics file says, as far as no event goes by it, and logs what is left. A hub whose
// file cannot be applied serves all the same: the streams are used as they are.
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
			h.log.LogAttrs(ctx, slog.LevelInfo, "a topic was made as its rule says", attrs...)
			continue
		}
		why := slog.String("hint", "events may be deleted by it: eventhub topics apply --allow-deletion does it")
		if c.Err != nil {
			why = slog.Any("error", c.Err)
		}
		h.log.LogAttrs(ctx, slog.LevelWarn, "a topic is not as its rule says", append(attrs, why)...)
	}
	if err != nil {
		h.log.LogAttrs(ctx, slog.LevelWarn, "the topics file was not applied, or not all of it: eventhub topics apply does it", slog.Any("error", err))
	}
}
