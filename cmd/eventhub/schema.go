package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"eventhub/jetstream/schema/compat"
	"eventhub/jetstream/schema/typescript"
	"eventhub/jetstream/schemas"
)

// schemaCmd is `eventhub schema`.
type schemaCmd struct {
	List     schemaListCmd     `cmd:"" help:"List the versions of the schema of a topic, or the topics that have schemas."`
	Show     schemaShowCmd     `cmd:"" help:"Print a version."`
	Check    schemaCheckCmd    `cmd:"" help:"Compare a file with the versions of a topic, and store nothing."`
	Put      schemaPutCmd      `cmd:"" help:"Register a file as the next version."`
	Apply    schemaApplyCmd    `cmd:"" help:"Register the versions in a directory that are not registered yet."`
	Types    schemaTypesCmd    `cmd:"" help:"Print the types of topics for the TypeScript client."`
	AsyncAPI schemaAsyncAPICmd `cmd:"" name:"asyncapi" help:"Print an AsyncAPI document with the schemas of topics."`
	Diff     schemaDiffCmd     `cmd:"" help:"Say how two versions differ for documents of each other."`
}

// errIncompatible ends a command whose comparison found something.
var errIncompatible = errors.New("the version is not compatible")

// schemaFlags select a topic of a hub.
type schemaFlags struct {
	httpFlags

	Topic string `arg:"" help:"Topic."`
}

// call asks for a path below that of the topic, and reads the answer.
func (f *schemaFlags) call(ctx context.Context, method, path string, body []byte, answer any) error {
	if err := f.ask(ctx, method, "/schemas/"+url.PathEscape(f.Topic)+path, body, answer); err != nil {
		return fmt.Errorf("schemas of %s: %w", f.Topic, err)
	}
	return nil
}

// ask asks for a path, and reads the answer.
func (f httpFlags) ask(ctx context.Context, method, path string, body []byte, answer any) error {
	hub, err := f.hub(false)
	if err != nil {
		return err
	}
	defer hub.close()
	res, err := hub.send(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err == nil {
		err = json.Unmarshal(text, answer)
	}
	if err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}

// namedSchema is a topic that has schemas.
type namedSchema struct {
	Topic  string
	Latest int
	TS     int64
}

// schemaTopics returns all topics whose schemas the token may see, in order.
func (f httpFlags) schemaTopics(ctx context.Context) (all []namedSchema, err error) {
	const page = "1000"
	for next := ""; ; {
		var list struct {
			Topics []namedSchema
			Next   string
		}
		if err := f.ask(ctx, http.MethodGet, "/schemas?"+url.Values{"limit": {page}, "next": {next}}.Encode(), nil, &list); err != nil {
			return nil, fmt.Errorf("topics that have schemas: %w", err)
		}
		all = append(all, list.Topics...)
		if list.Next == "" {
			return all, nil
		}
		if list.Next <= next {
			return nil, errors.New("topics that have schemas: the next page does not come after this one")
		}
		next = list.Next
	}
}

// schemaListCmd is `eventhub schema list`.
type schemaListCmd struct {
	httpFlags

	Topic string `arg:"" optional:"" help:"Topic. Default: all topics that have schemas."`
}

// Run prints a line per version, or a line per topic.
func (cmd *schemaListCmd) Run(ctx context.Context, std streams) error {
	if cmd.Topic != "" {
		return cmd.versions(ctx, std)
	}
	all, err := cmd.schemaTopics(ctx)
	if err != nil {
		return err
	}
	rows := [][]string{{"TOPIC", "LATEST", "REGISTERED"}}
	for _, t := range all {
		rows = append(rows, []string{t.Topic, strconv.Itoa(t.Latest), time.UnixMilli(t.TS).UTC().Format(time.RFC3339)})
	}
	return printTable(std.out, rows)
}

// versions prints a line per version.
func (cmd *schemaListCmd) versions(ctx context.Context, std streams) error {
	of := schemaFlags{cmd.httpFlags, cmd.Topic}
	var list struct {
		Mode, Compatibility string
		Versions            []struct {
			Version       int
			TS            int64
			Forced, Casts bool
			Description   string
		}
	}
	if err := of.call(ctx, http.MethodGet, "", nil, &list); err != nil {
		return err
	}
	rows := [][]string{{"VERSION", "REGISTERED", "CASTS", "FORCED", "DESCRIPTION"}}
	yes := map[bool]string{true: "yes", false: "no"}
	for _, v := range list.Versions {
		rows = append(rows, []string{strconv.Itoa(v.Version), time.UnixMilli(v.TS).UTC().Format(time.RFC3339), yes[v.Casts], yes[v.Forced], v.Description})
	}
	if _, err := fmt.Fprintf(std.out, "mode %s, compatibility %s\n", list.Mode, list.Compatibility); err != nil {
		return err
	}
	return printTable(std.out, rows)
}

// schemaShowCmd is `eventhub schema show`.
type schemaShowCmd struct {
	schemaFlags

	Version string `arg:"" optional:"" default:"latest" help:"Version, or latest."`
	Whole   bool   `help:"Print the casts and the description, too."`
}

// Run prints the schema.
func (cmd *schemaShowCmd) Run(ctx context.Context, std streams) error {
	var whole json.RawMessage
	if err := cmd.call(ctx, http.MethodGet, "/"+url.PathEscape(cmd.Version), nil, &whole); err != nil {
		return err
	}
	text := whole
	if !cmd.Whole {
		var v struct{ Schema json.RawMessage }
		if err := json.Unmarshal(whole, &v); err != nil {
			return err
		}
		text = v.Schema
	}
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return err
	}
	_, err := fmt.Fprintln(std.out, b.String())
	return err
}

// draftFlags are a version that is to come.
type draftFlags struct {
	schemaFlags

	File string `arg:"" type:"existingfile" help:"File with a JSON Schema 2020-12."`
	Up   string `type:"existingfile" placeholder:"FILE" help:"File with the operations that turn documents of the version before into ones of this version."`
	Down string `type:"existingfile" placeholder:"FILE" help:"File with the operations for the other way."`
}

// body reads the files.
func (f *draftFlags) body(more map[string]any) ([]byte, error) {
	for name, path := range map[string]string{"schema": f.File, "up": f.Up, "down": f.Down} {
		if path == "" {
			continue
		}
		text, err := os.ReadFile(path) //nolint:gosec // the user names the file
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", name, err)
		}
		if !json.Valid(text) {
			return nil, fmt.Errorf("%s in %s is not JSON", name, path)
		}
		more[name] = json.RawMessage(text)
	}
	return json.Marshal(more)
}

// printReport prints what a comparison found.
func printReport(w io.Writer, r *schemas.Report) error {
	if len(r.Up) > 0 {
		if _, err := fmt.Fprintf(w, "cast for defaults: %s\n", r.Up); err != nil {
			return err
		}
	}
	if len(r.Down) > 0 {
		if _, err := fmt.Fprintf(w, "cast back: %s\n", r.Down); err != nil {
			return err
		}
	}
	for _, f := range r.Findings {
		if _, err := fmt.Fprintf(w, "%s: %s\n", f.Direction, f); err != nil {
			return err
		}
	}
	if r.Compatible {
		_, err := fmt.Fprintf(w, "compatible (%s; %d documents tried)\n", r.Mode, r.Documents)
		return err
	}
	return nil
}

// schemaCheckCmd is `eventhub schema check`.
type schemaCheckCmd struct {
	draftFlags
}

// Run prints the findings. It fails if there are any.
func (cmd *schemaCheckCmd) Run(ctx context.Context, std streams) error {
	body, err := cmd.body(map[string]any{})
	if err != nil {
		return err
	}
	var report schemas.Report
	if err := cmd.call(ctx, http.MethodPost, "/check", body, &report); err != nil {
		return err
	}
	if err := printReport(std.out, &report); err != nil {
		return err
	}
	if !report.Compatible {
		return errIncompatible
	}
	return nil
}

// schemaPutCmd is `eventhub schema put`.
type schemaPutCmd struct {
	draftFlags

	Description string `help:"Description, for people."`
	Force       bool   `help:"Register the version although it is not compatible."`
}

// Run registers the version, and prints its number.
func (cmd *schemaPutCmd) Run(ctx context.Context, std streams) error {
	body, err := cmd.body(map[string]any{"description": cmd.Description, "force": cmd.Force})
	if err != nil {
		return err
	}
	var answer struct {
		Version int
		*schemas.Report
	}
	if err := cmd.call(ctx, http.MethodPost, "", body, &answer); err != nil {
		return cmd.explain(ctx, std, body, err)
	}
	if answer.Report == nil {
		_, err := fmt.Fprintf(std.out, "version %d says the same\n", answer.Version)
		return err
	}
	if err := printReport(std.out, answer.Report); err != nil {
		return err
	}
	_, err = fmt.Fprintf(std.out, "registered version %d\n", answer.Version)
	return err
}

// explain prints all that was found about a version that is refused: the error has the first
// finding only.
func (cmd *schemaPutCmd) explain(ctx context.Context, std streams, body []byte, refused error) error {
	if answer, ok := errors.AsType[*httpError](refused); !ok || answer.code != schemas.CodeConflict {
		return refused
	}
	var report schemas.Report
	if err := cmd.call(ctx, http.MethodPost, "/check", body, &report); err != nil || report.Compatible {
		return refused // also if another registered a version at the same time
	}
	return errors.Join(printReport(std.out, &report), refused)
}

// schemaDiffCmd is `eventhub schema diff`.
type schemaDiffCmd struct {
	schemaFlags

	Older string `arg:"" help:"Version."`
	Newer string `arg:"" optional:"" default:"latest" help:"Version, or latest."`
}

// Run compares two versions without their casts, both ways.
func (cmd *schemaDiffCmd) Run(ctx context.Context, std streams) error {
	var versions [2]struct{ Schema json.RawMessage }
	for i, version := range []string{cmd.Older, cmd.Newer} {
		if err := cmd.call(ctx, http.MethodGet, "/"+url.PathEscape(version), nil, &versions[i]); err != nil {
			return err
		}
	}
	older, newer := versions[0].Schema, versions[1].Schema
	for _, way := range []struct {
		name           string
		reader, writer json.RawMessage
	}{{"backward", newer, older}, {"forward", older, newer}} {
		r, err := compat.Includes(way.reader, way.writer, false)
		if err != nil {
			return err
		}
		if len(r.Findings) == 0 {
			if _, err := fmt.Fprintf(std.out, "%s: compatible\n", way.name); err != nil {
				return err
			}
		}
		for _, f := range r.Findings {
			if _, err := fmt.Fprintf(std.out, "%s: %s (%s)\n", way.name, f, compat.Rules[f.Rule]); err != nil {
				return err
			}
		}
	}
	return nil
}

// schemaTypesCmd is `eventhub schema types`.
type schemaTypesCmd struct {
	httpFlags

	Topics []string `arg:"" help:"Topics."`
}

// Run prints a module with the types of the latest versions.
func (cmd *schemaTypesCmd) Run(ctx context.Context, std streams) error {
	var topics []typescript.Topic
	for _, topic := range cmd.Topics {
		var v struct{ Schema json.RawMessage }
		of := schemaFlags{cmd.httpFlags, topic}
		if err := of.call(ctx, http.MethodGet, "/latest", nil, &v); err != nil {
			return err
		}
		topics = append(topics, typescript.Topic{Name: topic, Schema: v.Schema})
	}
	text, err := typescript.Declarations(topics)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(std.out, "// Written by eventhub schema types.\n%s", text)
	return err
}
