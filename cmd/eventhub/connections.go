package main

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"text/tabwriter"
	"time"

	"eventhub/facade"
	"eventhub/ops"
)

// connectionsOf shows the connections of a facade to operators.
type connectionsOf struct{ server *facade.Server }

// List implements ops.Connections.
func (c connectionsOf) List(after string, limit int, filter ops.ConnectionFilter) (list []ops.Connection, more bool) {
	open, more := c.server.Connections(after, limit, facade.ConnectionFilter(filter))
	list = make([]ops.Connection, len(open))
	for i := range open {
		o := &open[i]
		subs := make([]ops.Subscription, len(o.Subscriptions))
		for n, sub := range o.Subscriptions {
			subs[n] = ops.Subscription(sub)
		}
		list[i] = ops.Connection{
			ID: o.ID, Kind: string(o.Kind), Principal: o.Principal, Remote: o.Remote, SinceMS: o.Since.UnixMilli(), QueuedBytes: o.QueuedBytes, Subscriptions: subs,
		}
	}
	return list, more
}

// Close implements ops.Connections.
func (c connectionsOf) Close(id string) bool { return c.server.CloseConnection(id) }

// connectionsCmd is `eventhub connections`.
type connectionsCmd struct {
	List  connectionsListCmd  `cmd:"" help:"List the connections of a hub: WebSockets, streams and pulls."`
	Close connectionsCloseCmd `cmd:"" help:"Close a connection of a hub."`
}

// connectionsListCmd is `eventhub connections list`.
type connectionsListCmd struct {
	opsFlags
}

// Run prints a line per connection, and one per subscription below it.
func (cmd *connectionsListCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	out := tabwriter.NewWriter(std.out, 0, 0, 2, ' ', 0)
	if _, err := fmt.Fprintln(out, "ID\tKIND\tPRINCIPAL\tADDRESS\tAGE\tQUEUED\tSUBSCRIPTIONS"); err != nil {
		return err
	}
	for next := ""; ; {
		var page struct {
			Now         int64            `json:"now"`
			Connections []ops.Connection `json:"connections"`
			Next        string           `json:"next"`
		}
		call := opsCall{
			method: http.MethodGet, path: []string{"connections"}, needs: "inspect on " + ops.ConnectionsTopic,
			query: url.Values{"limit": {"1000"}, "next": {next}},
		}
		if err := hub.call(ctx, call, &page); err != nil {
			return err
		}
		for i := range page.Connections {
			if err := printConnection(out, page.Now, &page.Connections[i]); err != nil {
				return err
			}
		}
		if next = page.Next; next == "" {
			return out.Flush()
		}
	}
}

func printConnection(out *tabwriter.Writer, now int64, c *ops.Connection) error {
	principal := c.Principal
	if principal == "" {
		principal = "(none yet)"
	}
	age := (time.Duration(now-c.SinceMS) * time.Millisecond).Round(time.Second)
	if _, err := fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%v\t%d\t%d\n", c.ID, c.Kind, principal, c.Remote, age, c.QueuedBytes, len(c.Subscriptions)); err != nil {
		return err
	}
	for _, s := range c.Subscriptions {
		state := strconv.Itoa(s.InFlight) + " of " + strconv.Itoa(s.MaxInFlight) + " in flight"
		if s.Paused {
			state += ", paused"
		}
		if _, err := fmt.Fprintf(out, "\t\t%s\t%s\t%s\t\t\n", s.Topic, s.Group, state); err != nil {
			return err
		}
	}
	return nil
}

// connectionsCloseCmd is `eventhub connections close`.
type connectionsCloseCmd struct {
	opsFlags
	yesFlag

	ID string `arg:"" help:"Id of the connection, as eventhub connections list shows it."`
}

// Run closes the connection.
func (cmd *connectionsCloseCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.confirm(std, "close the connection "+strconv.Quote(cmd.ID)); err != nil {
		return err
	}
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	if err := hub.call(ctx, opsCall{method: http.MethodDelete, path: []string{"connections", cmd.ID}, needs: "admin on " + ops.ConnectionsTopic}, nil); err != nil {
		return err
	}
	_, err = fmt.Fprintln(std.out, "closed the connection "+cmd.ID)
	return err
}
