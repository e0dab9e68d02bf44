package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
	"eventhub/ops"
)

// topicsListCmd is `eventhub topics list`.
type topicsListCmd struct {
	opsFlags
}

// Run prints the streams that the token may see.
func (cmd *topicsListCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	var got struct {
		Topics []ops.ListedTopic `json:"topics"`
	}
	if err := hub.call(ctx, opsCall{method: http.MethodGet, path: []string{"topics"}}, &got); err != nil {
		return err
	}
	rows := [][]string{{"TOPIC", "STREAM", "MESSAGES", "BYTES", "AGE", "ON_FULL", "COMPACTION", "RULE", "DRIFT"}}
	for _, t := range got.Topics {
		rows = append(rows, []string{
			cmp.Or(t.Topic, "(family)"), t.Stream, strconv.FormatUint(t.Events, 10), strconv.FormatUint(t.Bytes, 10), ageText(t.Retention.AgeMS),
			t.OnFull, yes(t.Compacted), t.Rule, yes(len(t.Drift) > 0),
		})
	}
	return printTable(std.out, rows)
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

func ageText(ms int64) string { return topics.AgeText(time.Duration(ms) * time.Millisecond) }

// topicFlags name a topic of the running hub.
type topicFlags struct {
	opsFlags

	Topic string `arg:"" help:"Topic."`
}

// call asks the hub about the topic. rest follows the topic in the path.
func (f *topicFlags) call(ctx context.Context, method string, query url.Values, body, into any, rest ...string) error {
	if err := jetstream.ValidTopic(f.Topic); err != nil {
		return err
	}
	hub, err := f.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	needs := "admin on " + f.Topic
	if method == http.MethodGet {
		needs = "inspect, subscribe or " + needs
	}
	return hub.call(ctx, opsCall{method: method, path: append([]string{"topics", f.Topic}, rest...), query: query, body: body, needs: needs}, into)
}

// show asks the hub for the state of the topic.
func (f *topicFlags) show(ctx context.Context) (t ops.ShownTopic, err error) {
	err = f.call(ctx, http.MethodGet, nil, nil, &t)
	return t, err
}

// topicsShowCmd is `eventhub topics show`.
type topicsShowCmd struct {
	topicFlags
}

// Run prints the state of the topic.
func (cmd *topicsShowCmd) Run(ctx context.Context, std streams) error {
	t, err := cmd.show(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{
		{"topic", t.Topic},
		{"stream", t.Stream + ", replicas: " + strconv.Itoa(t.Replicas)},
		{"rule", t.Rule},
		{"events", strconv.FormatUint(t.Events, 10)},
		{"bytes", strconv.FormatUint(t.Bytes, 10)},
		{"first", eventText(t.First)},
		{"last", eventText(t.Last)},
		{"retention", "age " + ageText(t.Retention.AgeMS) + ", bytes " + boundText(t.Retention.Bytes) + ", messages " + boundText(t.Retention.Messages)},
		{"on full", t.OnFull},
	}
	if t.GroupAgeMS > 0 {
		rows = append(rows, []string{"group age", ageText(t.GroupAgeMS)})
	}
	rows = append(rows, []string{"compacted", yes(t.Compacted)}, []string{"groups", strconv.Itoa(t.Groups)})
	if t.Family {
		rows = append(rows, []string{"family", "yes; bytes and bounds are those of the stream"})
	}
	if t.Needed != "" {
		rows = append(rows, []string{"needed", t.Needed})
	}
	for _, l := range t.Lost {
		rows = append(rows, []string{"lost", fmt.Sprintf("%d events by group %q, last found %s", l.Events, l.Group, timeText(l.TS))})
	}
	return printTable(std.out, rows)
}

// topicsCreateCmd is `eventhub topics create`.
type topicsCreateCmd struct {
	topicFlags
}

// Run creates the topic and prints where native clients find it.
func (cmd *topicsCreateCmd) Run(ctx context.Context, std streams) error {
	var t ops.ShownTopic
	if err := cmd.call(ctx, http.MethodPut, nil, nil, &t); err != nil {
		return err
	}
	return printTable(std.out, [][]string{
		{"topic", t.Topic},
		{"stream", t.Stream},
		{"subject", native.Subject(t.Topic, "")},
		{"subjects with a key", native.KeyedPattern(t.Topic)},
	})
}

func boundText(n int64) string {
	if n <= 0 {
		return "none"
	}
	return strconv.FormatInt(n, 10)
}

func eventText(e *ops.EventRef) string {
	if e == nil {
		return "none"
	}
	return e.ID + ", " + timeText(e.TS)
}

func timeText(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// destroyFlags are those of commands that remove a topic or its events.
type destroyFlags struct {
	topicFlags
	yesFlag

	DryRun bool `help:"Only say what would be removed."`
	Needed bool `help:"Also for a topic that the hub itself needs, such as dead letters and snapshots."`
}

// errOldHub refuses to remove more than what a dry run has shown.
var errOldHub = errors.New("nothing was changed: the hub does not say what its dry run has seen; use the command of the hub's version")

// topicsPurgeCmd is `eventhub topics purge`.
type topicsPurgeCmd struct {
	destroyFlags

	All       bool   `xor:"what" required:"" help:"Remove all events."`
	BeforeTS  *int64 `name:"before-ts" xor:"what" required:"" placeholder:"MS" help:"Remove the events stored before this time, in epoch milliseconds."`
	ThroughID string `name:"through-id" xor:"what" required:"" placeholder:"ID" help:"Remove the event with this id and those before it."`
}

// Run asks, and then removes the events.
func (cmd *topicsPurgeCmd) Run(ctx context.Context, std streams) error {
	body := ops.PurgeRequest{All: cmd.All, BeforeTS: cmd.BeforeTS, ThroughID: cmd.ThroughID, Needed: cmd.Needed, DryRun: true}
	var done ops.PurgeAnswer
	if err := cmd.call(ctx, http.MethodPost, nil, body, &done, "purge"); err != nil {
		return err
	}
	if done.Bound == "" {
		return errOldHub
	}
	what := fmt.Sprintf("%d events of %s, and leave %d", done.Removed, cmd.Topic, done.Left)
	if cmd.DryRun {
		_, err := fmt.Fprintln(std.out, "would remove "+what)
		return err
	}
	if err := cmd.confirm(std, "remove "+what); err != nil {
		return err
	}
	body.DryRun, body.Bound = false, done.Bound // what came since stays
	if err := cmd.call(ctx, http.MethodPost, nil, body, &done, "purge"); err != nil {
		return cmd.hint(err)
	}
	_, err := fmt.Fprintf(std.out, "removed %d events of %s, %d are left\n", done.Removed, cmd.Topic, done.Left)
	return err
}

// hint adds the flag with which a refusal can be overruled.
func (f *destroyFlags) hint(err error) error {
	if !f.Needed && strings.Contains(err.Error(), "the hub needs topic") {
		return fmt.Errorf("%w (--needed)", err)
	}
	return err
}

// topicsDeleteCmd is `eventhub topics delete`.
type topicsDeleteCmd struct {
	destroyFlags
}

// Run asks, and then deletes the topic.
func (cmd *topicsDeleteCmd) Run(ctx context.Context, std streams) error {
	t, err := cmd.show(ctx)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("topic %s with %d events and %d groups", t.Topic, t.Events, t.Groups)
	if cmd.DryRun {
		_, err := fmt.Fprintln(std.out, "would delete "+what)
		return err
	}
	if err := cmd.confirm(std, "delete "+what); err != nil {
		return err
	}
	query := make(url.Values)
	if cmd.Needed {
		query.Set("needed", "true")
	}
	if err := cmd.call(ctx, http.MethodDelete, query, nil, nil); err != nil {
		return cmd.hint(err)
	}
	_, err = fmt.Fprintln(std.out, "deleted "+what)
	return err
}
