package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"eventhub/jetstream"
)

// groupCmd is `eventhub group`.
type groupCmd struct {
	List     groupListCmd     `cmd:"" help:"List the groups of a topic, or of all topics."`
	Show     groupShowCmd     `cmd:"" help:"Show a group."`
	Seek     groupSeekCmd     `cmd:"" help:"Move a group back or forward in its topic."`
	Repair   groupRepairCmd   `cmd:"" help:"Move a group that gets no events any more to a new consumer, at its place."`
	Pause    groupPauseCmd    `cmd:"" help:"Stop the deliveries to a group, on all hubs."`
	Resume   groupResumeCmd   `cmd:"" help:"End a pause."`
	Delete   groupDeleteCmd   `cmd:"" help:"Delete a group with its position."`
	Bookmark groupBookmarkCmd `cmd:"" help:"Store positions of a group, to go back to them later."`
}

// groupFlags name a group of the running hub.
type groupFlags struct {
	opsFlags

	Topic string `arg:"" help:"Topic."`
	Group string `arg:"" help:"Group."`
}

// called names the group for people.
func (f *groupFlags) called() string {
	return "the group " + strconv.Quote(f.Group) + " of " + f.Topic
}

// call asks the hub about the group. rest follows the group in the path.
func (f *groupFlags) call(ctx context.Context, method string, body, into any, rest ...string) error {
	if err := errors.Join(jetstream.ValidTopic(f.Topic), jetstream.ValidGroup(f.Group)); err != nil {
		return err
	}
	hub, err := f.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	needs := "admin on " + f.Topic
	if method == http.MethodGet {
		needs = "subscribe or " + needs
	}
	return hub.call(ctx, opsCall{method: method, path: append([]string{"groups", f.Topic, f.Group}, rest...), body: body, needs: needs}, into)
}

// done prints what was done.
func done(std streams, what string) error {
	if _, err := fmt.Fprintln(std.out, what); err != nil {
		return &outputError{err}
	}
	return nil
}

// groupListCmd is `eventhub group list`.
type groupListCmd struct {
	opsFlags

	Topic string `arg:"" optional:"" help:"Topic. Default: all topics."`
}

// groupsAtOnce is how many groups are asked for at a time.
const groupsAtOnce = 200

// Run prints a line for each group.
func (cmd *groupListCmd) Run(ctx context.Context, std streams) error {
	hub, err := cmd.hub()
	if err != nil {
		return err
	}
	defer hub.close()
	rows := [][]string{{"TOPIC", "GROUP", "PENDING", "IN FLIGHT", "OLDEST", "STATE"}}
	call := opsCall{method: http.MethodGet, path: []string{"groups"}, query: url.Values{"limit": {strconv.Itoa(groupsAtOnce)}}, needs: "subscribe or admin on " + cmd.Topic}
	if cmd.Topic != "" {
		if err := jetstream.ValidTopic(cmd.Topic); err != nil {
			return err
		}
		call.query.Set("topic", cmd.Topic)
	}
	for {
		var page struct {
			Groups []jetstream.GroupInfo `json:"groups"`
			Next   string                `json:"next"`
		}
		if err := hub.call(ctx, call, &page); err != nil {
			return err
		}
		for i := range page.Groups {
			g := &page.Groups[i]
			rows = append(rows, []string{g.Topic, g.Group, strconv.FormatUint(g.Pending, 10), strconv.FormatUint(g.InFlight, 10), ageOf(g), stateOf(g)})
		}
		if page.Next == "" {
			break
		}
		call.query.Set("next", page.Next)
	}
	return printTable(std.out, rows)
}

// ageOf is how old the oldest unsettled event is.
func ageOf(g *jetstream.GroupInfo) string {
	if g.OldestUnackedMS == 0 {
		return "-"
	}
	return (time.Duration(g.OldestUnackedMS) * time.Millisecond).Round(time.Second).String()
}

func stateOf(g *jetstream.GroupInfo) string {
	switch {
	case g.Stuck > 0:
		return "stuck since " + time.UnixMilli(g.Stuck).UTC().Format(time.RFC3339)
	case g.Paused:
		return "paused"
	case g.Waiting > 0 || g.Members > 0 || g.InFlight > 0:
		return "active"
	}
	return "no members"
}

// groupShowCmd is `eventhub group show`.
type groupShowCmd struct{ groupFlags }

// Run prints what the hub knows of the group.
func (cmd *groupShowCmd) Run(ctx context.Context, std streams) error {
	var g jetstream.GroupInfo
	if err := cmd.call(ctx, http.MethodGet, nil, &g); err != nil {
		return err
	}
	last := "-"
	if g.LastTS != 0 {
		last = cmp.Or(g.LastID, "(removed)") + "  " + time.UnixMilli(g.LastTS).UTC().Format(time.RFC3339)
	}
	ttl := "-"
	if g.TTLMS > 0 {
		ttl = (time.Duration(g.TTLMS) * time.Millisecond).String()
	}
	return printTable(std.out, [][]string{
		{"topic", g.Topic},
		{"group", g.Group},
		{"state", stateOf(&g)},
		{"settled up to", last},
		{"pending", strconv.FormatUint(g.Pending, 10)},
		{"in flight", strconv.FormatUint(g.InFlight, 10)},
		{"redelivered", strconv.FormatUint(g.Redelivered, 10)},
		{"oldest unsettled", ageOf(&g)},
		{"members of this hub", strconv.Itoa(g.Members)},
		{"requests that wait", strconv.Itoa(g.Waiting)},
		{"ttl", ttl},
		{"generation", strconv.Itoa(g.Generation)},
	})
}

// groupSeekCmd is `eventhub group seek`.
type groupSeekCmd struct {
	groupFlags
	yesFlag

	To       string `help:"earliest or latest." enum:"earliest,latest," default:""`
	TS       *int64 `name:"ts" help:"The first event stored at or after this time in epoch milliseconds."`
	AfterID  string `name:"after-id" help:"The event after the one with this id."`
	Back     int    `help:"So many events before the oldest unsettled one."`
	Bookmark string `help:"A bookmark of the group."`
	DryRun   bool   `name:"dry-run" help:"Only say how many events would be delivered again or skipped."`
}

// body returns the request, and names the position for people.
func (cmd *groupSeekCmd) body() (body map[string]any, where string, err error) {
	named := 0
	name := func(to, what, field string, value any) {
		named++
		body, where = map[string]any{"to": to}, what
		if field != "" {
			body[field] = value
		}
	}
	if cmd.To != "" {
		name(cmd.To, map[string]string{"earliest": "the oldest event", "latest": "the end of the topic"}[cmd.To], "", nil)
	}
	if cmd.TS != nil {
		name("ts", "events stored from "+time.UnixMilli(*cmd.TS).UTC().Format(time.RFC3339Nano)+" on", "ts", *cmd.TS)
	}
	if cmd.AfterID != "" {
		name("afterId", "the event after "+cmd.AfterID, "afterId", cmd.AfterID)
	}
	if cmd.Back != 0 {
		name("back", strconv.Itoa(cmd.Back)+" events back", "n", cmd.Back)
	}
	if cmd.Bookmark != "" {
		name("bookmark", "the bookmark "+strconv.Quote(cmd.Bookmark), "name", cmd.Bookmark)
	}
	if named != 1 {
		return nil, "", errors.New("name one position: --to earliest, --to latest, --ts, --after-id, --back or --bookmark")
	}
	return body, where, nil
}

// movedBy is the answer to a seek.
type movedBy struct {
	Redelivered, Skipped uint64
	AtMost               bool
}

func (m movedBy) String() string {
	most := ""
	if m.AtMost {
		most = "at most "
	}
	return fmt.Sprintf("%s%d events delivered again, %s%d skipped", most, m.Redelivered, most, m.Skipped)
}

// Run moves the group.
func (cmd *groupSeekCmd) Run(ctx context.Context, std streams) error {
	body, where, err := cmd.body()
	if err != nil {
		return err
	}
	seek := func(dry bool) (m movedBy, err error) {
		body["dry_run"] = dry
		return m, cmd.call(ctx, http.MethodPut, body, &m, "cursor")
	}
	var m movedBy
	if cmd.DryRun || !cmd.Yes {
		if m, err = seek(true); err != nil {
			return err
		}
		if cmd.DryRun {
			return done(std, m.String())
		}
		if err := cmd.confirm(std, fmt.Sprintf("move %s to %s: %v", cmd.called(), where, m)); err != nil {
			return err
		}
	}
	if m, err = seek(false); err != nil {
		return err
	}
	return done(std, fmt.Sprintf("moved %s to %s: %v", cmd.called(), where, m))
}

// groupRepairCmd is `eventhub group repair`.
type groupRepairCmd struct {
	groupFlags
	yesFlag

	DryRun bool `name:"dry-run" help:"Only say how many events would be delivered again."`
}

// repairedBy is the answer to a repair.
type repairedBy struct {
	Redelivered uint64
	AtMost      bool
}

func (r repairedBy) String() string {
	if r.AtMost {
		return fmt.Sprintf("at most %d settled events delivered again", r.Redelivered)
	}
	return fmt.Sprintf("%d settled events delivered again", r.Redelivered)
}

// Run repairs the group.
func (cmd *groupRepairCmd) Run(ctx context.Context, std streams) error {
	repair := func(dry bool) (r repairedBy, err error) {
		return r, cmd.call(ctx, http.MethodPost, map[string]any{"dry_run": dry}, &r, "repair")
	}
	if cmd.DryRun || !cmd.Yes {
		would, err := repair(true)
		if err != nil {
			return err
		}
		what := "move " + cmd.called() + " to a new consumer, end its leases and deliver what is not settled; " + would.String()
		if would.AtMost {
			what += ", and none if NATS tells which are settled"
		}
		if cmd.DryRun {
			return done(std, "would "+what)
		}
		if err := cmd.confirm(std, what); err != nil {
			return err
		}
	}
	did, err := repair(false)
	if err != nil {
		return err
	}
	return done(std, fmt.Sprintf("repaired %s: %v", cmd.called(), did))
}

// groupPauseCmd is `eventhub group pause`.
type groupPauseCmd struct{ groupFlags }

// Run pauses the group.
func (cmd *groupPauseCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.call(ctx, http.MethodPost, nil, nil, "pause"); err != nil {
		return err
	}
	return done(std, "paused "+cmd.called())
}

// groupResumeCmd is `eventhub group resume`.
type groupResumeCmd struct{ groupFlags }

// Run ends the pause of the group.
func (cmd *groupResumeCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.call(ctx, http.MethodPost, nil, nil, "resume"); err != nil {
		return err
	}
	return done(std, "resumed "+cmd.called())
}

// groupDeleteCmd is `eventhub group delete`.
type groupDeleteCmd struct {
	groupFlags
	yesFlag
}

// Run deletes the group.
func (cmd *groupDeleteCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.confirm(std, "delete "+cmd.called()+" with its position and its bookmarks"); err != nil {
		return err
	}
	if err := cmd.call(ctx, http.MethodDelete, nil, nil); err != nil {
		return err
	}
	return done(std, "deleted "+cmd.called())
}

// groupBookmarkCmd is `eventhub group bookmark`.
type groupBookmarkCmd struct {
	List   bookmarkListCmd   `cmd:"" help:"List the bookmarks of a group."`
	Save   bookmarkSaveCmd   `cmd:"" help:"Store the present position of a group, with its unsettled events."`
	Delete bookmarkDeleteCmd `cmd:"" help:"Delete a bookmark."`
}

// bookmarkFlags name a bookmark.
type bookmarkFlags struct {
	groupFlags

	Name string `arg:"" help:"Name of the bookmark."`
}

func (f *bookmarkFlags) bookmark() string {
	return "the bookmark " + strconv.Quote(f.Name) + " of " + f.called()
}

// bookmarkListCmd is `eventhub group bookmark list`.
type bookmarkListCmd struct{ groupFlags }

// Run prints a line for each bookmark.
func (cmd *bookmarkListCmd) Run(ctx context.Context, std streams) error {
	var list struct {
		Bookmarks []jetstream.Bookmark `json:"bookmarks"`
	}
	if err := cmd.call(ctx, http.MethodGet, nil, &list, "bookmarks"); err != nil {
		return err
	}
	rows := [][]string{{"NAME", "MADE", "UNSETTLED", "EXACT"}}
	for _, m := range list.Bookmarks {
		rows = append(rows, []string{m.Name, time.UnixMilli(m.MadeMS).UTC().Format(time.RFC3339), strconv.FormatUint(m.Unsettled, 10), strconv.FormatBool(m.Exact)})
	}
	return printTable(std.out, rows)
}

// bookmarkSaveCmd is `eventhub group bookmark save`.
type bookmarkSaveCmd struct {
	bookmarkFlags
	yesFlag
}

// Run stores the bookmark.
func (cmd *bookmarkSaveCmd) Run(ctx context.Context, std streams) error {
	if !cmd.Yes {
		var known jetstream.Bookmark
		err := cmd.call(ctx, http.MethodGet, nil, &known, "bookmarks", cmd.Name)
		if said, ok := errors.AsType[*httpError](err); err != nil && (!ok || said.status != http.StatusNotFound) {
			return err
		}
		if err == nil {
			if err := cmd.confirm(std, "replace "+cmd.bookmark()); err != nil {
				return err
			}
		}
	}
	var made jetstream.Bookmark
	if err := cmd.call(ctx, http.MethodPut, nil, &made, "bookmarks", cmd.Name); err != nil {
		return err
	}
	what := "saved " + cmd.bookmark() + ", with " + strconv.FormatUint(made.Unsettled, 10) + " unsettled events"
	if !made.Exact {
		what += "; some of them wait for a new delivery, so the group will also get events again that it has settled meanwhile"
	}
	return done(std, what)
}

// bookmarkDeleteCmd is `eventhub group bookmark delete`.
type bookmarkDeleteCmd struct {
	bookmarkFlags
	yesFlag
}

// Run deletes the bookmark.
func (cmd *bookmarkDeleteCmd) Run(ctx context.Context, std streams) error {
	if err := cmd.confirm(std, "delete "+cmd.bookmark()); err != nil {
		return err
	}
	if err := cmd.call(ctx, http.MethodDelete, nil, nil, "bookmarks", cmd.Name); err != nil {
		return err
	}
	return done(std, "deleted "+cmd.bookmark())
}
