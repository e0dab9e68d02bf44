package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"eventhub/ops"
)

// delayedCmd is `eventhub delayed`.
type delayedCmd struct {
	List   delayedListCmd   `cmd:"" help:"List the events that wait to be stored in a topic."`
	Cancel delayedCancelCmd `cmd:"" help:"Cancel an event that waits."`
}

// delayedListCmd is `eventhub delayed list`.
type delayedListCmd struct {
	topicFlags

	JSON bool `name:"json" help:"Print one JSON object per line."`
}

// Run prints a line per event, in the order in which they were published.
func (cmd *delayedListCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	rows := [][]string{{"ID", "DUE", "PUBLISHED", "BYTES"}}
	text := func(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }
	for next := ""; ; {
		var page ops.DelayedAnswer
		call := opsCall{
			method: http.MethodGet, path: []string{"topics", cmd.Topic, "delayed"}, needs: "inspect, subscribe or admin on " + cmd.Topic,
			query: url.Values{"limit": {"1000"}, "next": {next}},
		}
		if err := hub.call(ctx, call, &page); err != nil {
			return err
		}
		for i := range page.Delayed {
			e := &page.Delayed[i]
			if cmd.JSON {
				if err := json.NewEncoder(std.out).Encode(e); err != nil {
					return err
				}
				continue
			}
			rows = append(rows, []string{e.ID, text(e.AtMS), text(e.PublishedMS), strconv.Itoa(e.Bytes)})
		}
		if next = page.Next; next == "" {
			break
		}
	}
	if cmd.JSON {
		return nil
	}
	return printTable(std.out, rows)
}

// delayedCancelCmd is `eventhub delayed cancel`.
type delayedCancelCmd struct {
	topicFlags
	yesFlag

	ID string `arg:"" help:"Id of the event, as eventhub delayed list shows it."`
}

// Run cancels the event.
func (cmd *delayedCancelCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.confirm(std, fmt.Sprintf("cancel the delayed event %q of %s", cmd.ID, cmd.Topic)); err != nil {
		return err
	}
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	call := opsCall{method: http.MethodDelete, path: []string{"topics", cmd.Topic, "delayed", cmd.ID}, needs: "admin on " + cmd.Topic}
	if err := hub.call(ctx, call, nil); err != nil {
		return err
	}
	_, err = fmt.Fprintf(std.out, "cancelled the delayed event %q\n", cmd.ID)
	return err
}
