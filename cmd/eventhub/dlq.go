package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"eventhub/jetstream"
)

// dlqCmd is `eventhub dlq`.
type dlqCmd struct {
	List    dlqListCmd    `cmd:"" help:"Count the dead letters of each group, or list those of a topic."`
	Show    dlqShowCmd    `cmd:"" help:"Print one dead letter with its event."`
	Redrive dlqRedriveCmd `cmd:"" help:"Put the events of dead letters back."`
	Discard dlqDiscardCmd `cmd:"" help:"Remove dead letters for good."`
}

// letterFlags select dead letters.
type letterFlags struct {
	opsFlags

	Group  string `help:"Only letters of this group."`
	ID     string `name:"id" help:"Only the letter with this id."`
	Event  string `help:"Only letters of the event with this id."`
	Reason string `help:"Only letters whose reason contains this text."`
	FromTS *int64 `name:"from-ts" help:"Only letters stored at or after this time in epoch milliseconds."`
	ToTS   *int64 `name:"to-ts" help:"Only letters stored at or before this time in epoch milliseconds."`
}

func (f *letterFlags) query(topic string) url.Values {
	q := make(url.Values)
	for name, value := range map[string]string{"topic": topic, "group": f.Group, "id": f.ID, "event": f.Event, "reason": f.Reason} {
		if value != "" {
			q.Set(name, value)
		}
	}
	if f.FromTS != nil {
		q.Set("fromTs", strconv.FormatInt(*f.FromTS, 10))
	}
	if f.ToTS != nil {
		q.Set("toTs", strconv.FormatInt(*f.ToTS, 10))
	}
	return q
}

// filtered reports whether the flags select less than a topic.
func (f *letterFlags) filtered() bool { return len(f.query("")) > 0 }

// letterJSON is a dead letter in an answer.
type letterJSON struct {
	ID       string          `json:"id"`
	At       string          `json:"at"`
	StoredTS int64           `json:"storedTs"`
	Topic    string          `json:"topic"`
	Group    string          `json:"group"`
	Err      string          `json:"err"`
	Attempts int             `json:"attempts"`
	Original json.RawMessage `json:"original"`
	Fault    string          `json:"fault"`
}

// eachLetter asks for pages of dead letters and calls f for each, until f returns false.
func eachLetter(ctx context.Context, hub *opsHub, q url.Values, needs string, f func(json.RawMessage) (bool, error)) error {
	for {
		var page struct {
			Letters []json.RawMessage `json:"letters"`
			Next    string            `json:"next"`
		}
		if err := hub.call(ctx, opsCall{method: http.MethodGet, path: []string{"dlq"}, query: q, needs: needs}, &page); err != nil {
			return err
		}
		for _, l := range page.Letters {
			if more, err := f(l); err != nil || !more {
				return err
			}
		}
		if page.Next == "" {
			return nil
		}
		q.Set("next", page.Next)
	}
}

// dlqListCmd is `eventhub dlq list`.
type dlqListCmd struct {
	letterFlags

	Topic string `arg:"" optional:"" help:"Topic whose events failed. Without a topic, the letters of each topic and group are counted."`
	Count bool   `help:"Count the letters of each group, and do not list them."`
	Limit int    `default:"100" help:"Stop after this many letters; 0 for all."`
	JSON  bool   `name:"json" help:"Print one JSON object per line, with the events as far as the token may see them."`
}

// Run lists or counts.
func (cmd *dlqListCmd) Run(ctx context.Context, std streams) error {
	if cmd.Limit < 0 {
		return errors.New("--limit must not be negative; 0 lists all letters")
	}
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	q := cmd.query(cmd.Topic)
	needs := "subscribe or admin on " + cmp.Or(cmd.Topic, "the topic")
	if cmd.Topic == "" && !cmd.JSON || cmd.Count {
		err = cmd.count(ctx, hub, q, needs, std.out)
	} else {
		err = cmd.list(ctx, hub, q, needs, std.out)
	}
	if errors.Is(err, syscall.EPIPE) {
		return nil // the reader closed the pipe
	}
	return err
}

// count prints a line for each group.
func (cmd *dlqListCmd) count(ctx context.Context, hub *opsHub, q url.Values, needs string, out io.Writer) error {
	var counts struct {
		Total  int `json:"total"`
		Groups []struct {
			Topic   string `json:"topic"`
			Group   string `json:"group"`
			Count   int    `json:"count"`
			FirstTS int64  `json:"firstTs"`
			LastTS  int64  `json:"lastTs"`
		} `json:"groups"`
	}
	if err := hub.call(ctx, opsCall{method: http.MethodGet, path: []string{"dlq", "counts"}, query: q, needs: needs}, &counts); err != nil {
		return err
	}
	if cmd.JSON {
		for _, g := range counts.Groups {
			if err := json.NewEncoder(out).Encode(g); err != nil {
				return err
			}
		}
		return nil
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "TOPIC\tGROUP\tLETTERS\tOLDEST\tNEWEST")
	for _, g := range counts.Groups {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%d\t%s\t%s\n", g.Topic, cmp.Or(g.Group, "(unreadable)"), g.Count, clockTime(g.FirstTS), clockTime(g.LastTS))
	}
	_, _ = fmt.Fprintf(table, "total\t\t%d\t\t\n", counts.Total)
	return table.Flush()
}

// clockTime is a time of storage for people.
func clockTime(ms int64) string { return time.UnixMilli(ms).UTC().Format("2006-01-02 15:04:05Z") }

// list prints a line for each letter.
func (cmd *dlqListCmd) list(ctx context.Context, hub *opsHub, q url.Values, needs string, out io.Writer) error {
	limit := cmd.Limit
	if limit > 0 {
		q.Set("limit", strconv.Itoa(min(limit, 1000)))
	}
	if !cmd.JSON {
		q.Set("payloads", "0")
		if _, err := fmt.Fprintln(out, "STORED                ATTEMPTS  GROUP  ID  EVENT  REASON"); err != nil {
			return err
		}
	}
	n := 0
	return eachLetter(ctx, hub, q, needs, func(raw json.RawMessage) (bool, error) {
		n++
		if cmd.JSON {
			_, err := out.Write(append(unbroken(raw), '\n'))
			return n != limit, err
		}
		var l letterJSON
		if err := hub.read(raw, &l); err != nil {
			return false, err
		}
		var event struct{ ID string }
		if len(l.Original) > 0 {
			if err := hub.read(l.Original, &event); err != nil {
				return false, err
			}
		}
		_, err := fmt.Fprintf(out, "%s  %-8d  %s  %s  %s  %s\n", clockTime(l.StoredTS), l.Attempts, cmp.Or(unfolded(l.Group), "-"), unfolded(l.ID), cmp.Or(unfolded(event.ID), "-"), cmp.Or(unfolded(l.Err), unfolded(l.Fault)))
		return n != limit, err
	})
}

// unfolded is text of a client without line breaks.
func unfolded(s string) string {
	if strings.ContainsAny(s, "\r\n") {
		return strconv.Quote(s)
	}
	return s
}

// dlqShowCmd is `eventhub dlq show`.
type dlqShowCmd struct {
	opsFlags

	ID    string `arg:"" help:"Id of the letter, as list prints it."`
	Topic string `help:"Topic whose event failed, if the token may only see that."`
}

// Run prints the letter as JSON.
func (cmd *dlqShowCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	q := url.Values{"id": {cmd.ID}}
	if cmd.Topic != "" {
		q.Set("topic", cmd.Topic)
	}
	found := false
	err = eachLetter(ctx, hub, q, "subscribe or admin on "+cmp.Or(cmd.Topic, "the topic"), func(raw json.RawMessage) (bool, error) {
		found = true
		_, err := std.out.Write(append(unbroken(raw), '\n'))
		return false, err
	})
	if err == nil && !found {
		return fmt.Errorf("there is no dead letter %s, or the token may not see it", cmd.ID)
	}
	return err
}

// changeFlags select the dead letters that a command changes.
type changeFlags struct {
	letterFlags

	Topic  string `arg:"" help:"Topic whose events failed."`
	All    bool   `help:"All dead letters of the topic."`
	Rate   int    `help:"Letters per second. Default: 100 for redrive, 1000 for discard."`
	DryRun bool   `help:"Only say how many dead letters it would be."`
}

// dlqRedriveCmd is `eventhub dlq redrive`.
type dlqRedriveCmd struct {
	changeFlags

	To string `default:"group" enum:"group,topic" help:"group: the group that failed only, with the same id. topic: all groups, with a new id."`
}

// Run redrives.
func (cmd *dlqRedriveCmd) Run(ctx context.Context, std streams) error {
	hub, q, err := cmd.begin()
	if err != nil {
		return err
	}
	defer hub.close()
	q.Set("to", cmd.To)
	total, err := cmd.dryRun(ctx, hub, q, "redrive")
	if err != nil {
		return err
	}
	if cmd.DryRun {
		_, err = fmt.Fprintf(std.out, "would redrive %s to the %s\n", letters(total), cmd.To)
		return err
	}
	return cmd.run(ctx, hub, q, "redrive", "redriven", total, std)
}

// dlqDiscardCmd is `eventhub dlq discard`.
type dlqDiscardCmd struct {
	changeFlags
	yesFlag
}

// Run discards.
func (cmd *dlqDiscardCmd) Run(ctx context.Context, std streams) error {
	hub, q, err := cmd.begin()
	if err != nil {
		return err
	}
	defer hub.close()
	total, err := cmd.dryRun(ctx, hub, q, "discard")
	if err != nil {
		return err
	}
	if cmd.DryRun {
		_, err = fmt.Fprintf(std.out, "would discard %s\n", letters(total))
		return err
	}
	if total == 0 {
		_, err = fmt.Fprintf(std.out, "discarded %s\n", letters(0))
		return err
	}
	if !q.Has("through") {
		return errOldHub
	}
	if err := cmd.confirm(std, "discard "+letters(total)+" of "+cmd.Topic+" for good"); err != nil {
		return err
	}
	return cmd.run(ctx, hub, q, "discard", "discarded", total, std)
}

// letters is a number of dead letters, for people.
func letters(n int) string {
	if n == 1 {
		return "1 dead letter"
	}
	return strconv.Itoa(n) + " dead letters"
}

// begin checks the flags. The caller closes the hub.
func (cmd *changeFlags) begin() (*opsHub, url.Values, error) {
	if err := jetstream.ValidTopic(cmd.Topic); err != nil {
		return nil, nil, err
	}
	switch {
	case cmd.All == cmd.filtered() && cmd.All:
		return nil, nil, errors.New("--all means all dead letters of the topic; leave it out, or leave out the other selections")
	case cmd.All == cmd.filtered():
		return nil, nil, errors.New("name the dead letters with --group, --id, --event, --reason, --from-ts or --to-ts, or use --all")
	case cmd.Rate < 0:
		return nil, nil, errors.New("--rate must be at least 1")
	}
	hub, err := cmd.hub()
	if err != nil {
		return nil, nil, err
	}
	q := cmd.query(cmd.Topic)
	if cmd.All {
		q.Set("all", "1")
	}
	if cmd.Rate > 0 {
		q.Set("rate", strconv.Itoa(cmd.Rate))
	}
	return hub, q, nil
}

// redrivenJSON is a line of an answer.
type redrivenJSON struct {
	Matched int            `json:"matched"`
	Done    int            `json:"done"`
	Skipped int            `json:"skipped"`
	Reasons map[string]int `json:"reasons"`
	Through string         `json:"through"`
	Ended   bool           `json:"ended"`
	Error   string         `json:"error"`
	Code    string         `json:"code"`
}

// ask has the hub do what, and calls progress for each line of its answer.
func (cmd *changeFlags) ask(ctx context.Context, hub *opsHub, q url.Values, what string, progress func(redrivenJSON)) (last redrivenJSON, err error) {
	err = hub.lines(ctx, opsCall{method: http.MethodPost, path: []string{"dlq", what}, query: q, needs: "admin on " + cmd.Topic}, func(line []byte) error {
		last = redrivenJSON{}
		if err := hub.read(line, &last); err != nil {
			return err
		}
		progress(last)
		return nil
	})
	switch {
	case err != nil:
	case !last.Ended:
		err = errors.New("the answer was cut off; repeat the command")
	case last.Code != "":
		err = &httpError{http.StatusOK, last.Code, last.Error}
	}
	return last, err
}

// dryRun counts the letters. It confines the query to those that there are.
func (cmd *changeFlags) dryRun(ctx context.Context, hub *opsHub, q url.Values, what string) (int, error) {
	q.Set("dryRun", "1")
	defer q.Del("dryRun")
	last, err := cmd.ask(ctx, hub, q, what, func(redrivenJSON) {})
	if last.Through != "" {
		q.Set("through", last.Through)
	}
	return last.Matched, err
}

// run does what, with progress, and prints the outcome.
func (cmd *changeFlags) run(ctx context.Context, hub *opsHub, q url.Values, what, done string, total int, std streams) error {
	p := newTally(std.err, done)
	last, err := cmd.ask(ctx, hub, q, what, func(l redrivenJSON) {
		if now := time.Now(); !l.Ended && now.Sub(p.told) >= p.every {
			p.told = now
			p.show(bar(done, l, max(total, l.Matched), p.screen != nil))
		}
	})
	p.clear()
	_, printErr := fmt.Fprintf(std.out, "%s %s\n", done, letters(last.Done))
	reasons := make([]string, 0, len(last.Reasons))
	for why := range last.Reasons {
		reasons = append(reasons, why)
	}
	slices.Sort(reasons)
	for _, why := range reasons {
		p.say(fmt.Sprintf("%s stay: %s", letters(last.Reasons[why]), why))
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("interrupted; the other dead letters stay, repeat the command to go on")
	case err != nil:
		return err
	}
	return printErr
}

// bar says how far a redrive is; on a terminal, with a bar.
func bar(done string, l redrivenJSON, total int, terminal bool) string {
	text := fmt.Sprintf("%s %d of %d", done, l.Done, total)
	if l.Skipped > 0 {
		text += fmt.Sprintf(", %d stay", l.Skipped)
	}
	if !terminal || total == 0 {
		return text
	}
	return meter(min(l.Done+l.Skipped, total), total) + text
}
