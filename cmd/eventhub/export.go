package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
	"time"
)

const (
	// exportPage is how many events are asked for at a time: as many at most are read again after
	// an interruption.
	exportPage = 100_000
	// exportBuffer is how many bytes of an answer are read at a time.
	exportBuffer = 256 << 10
)

// rangeFlags select stored events.
type rangeFlags struct {
	httpFlags

	Topic         string            `arg:"" help:"Topic."`
	Key           string            `help:"Only events of this key."`
	Header        map[string]string `mapsep:"none" placeholder:"NAME=VALUE" help:"Only events with this header; may be repeated."`
	SchemaVersion versionFlag       `placeholder:"N" help:"Version of the schema in which events come, or latest. An event that cannot be cast has an error instead of a payload."`
	Compress      bool              `help:"Let the hub compress its answers (gzip)."`
}

func (f *rangeFlags) query() url.Values {
	q := url.Values{"topic": {f.Topic}}
	if f.Key != "" {
		q.Set("key", f.Key)
	}
	if f.SchemaVersion != 0 {
		q.Set("schemaVersion", f.SchemaVersion.String())
	}
	for name, value := range f.Header {
		q.Add("header", name+":"+value)
	}
	return q
}

// exportCmd is `eventhub export`.
type exportCmd struct {
	rangeFlags

	FromTS  *int64 `name:"from-ts" help:"Only events stored at or after this time in epoch milliseconds."`
	ToTS    *int64 `name:"to-ts" help:"Only events stored at or before this time in epoch milliseconds. Default: now."`
	AfterID string `name:"after-id" help:"Only events after the one with this id, to continue an earlier export."`
	Limit   int    `help:"Stop after this many events; 0 for all."`
}

// Run writes the events as one record a line.
func (cmd *exportCmd) Run(ctx context.Context, std streams) error {
	if cmd.Limit < 0 {
		return errors.New("--limit must not be negative; 0 exports all events")
	}
	q := cmd.query()
	q.Set("ndjson", "1")
	q.Set("tombstones", "1")
	if cmd.FromTS != nil {
		q.Set("fromTs", strconv.FormatInt(*cmd.FromTS, 10))
	}
	if cmd.ToTS != nil {
		q.Set("toTs", strconv.FormatInt(*cmd.ToTS, 10))
	}
	if cmd.AfterID != "" {
		q.Set("afterId", cmd.AfterID)
	}
	x := &exporter{query: q, left: cmd.Limit, progress: newTally(std.err, "exported"), line: func(b []byte) error {
		if _, err := std.out.Write(b); err != nil {
			return &outputError{err}
		}
		return nil
	}}
	var err error
	if x.hub, err = cmd.hub(cmd.Compress); err != nil {
		return err
	}
	defer x.hub.close()
	err = x.run(ctx)
	if x.began {
		x.progress.end()
	}
	if out, ok := errors.AsType[*outputError](err); ok && errors.Is(out, syscall.EPIPE) {
		return nil // the reader closed the pipe
	}
	if err != nil && ctx.Err() != nil {
		if x.progress.events == 0 {
			return errors.New("interrupted before the first event; nothing was written, repeat the command")
		}
		return errors.New("interrupted; continue with --after-id and the id of the last line")
	}
	return err
}

// exporter reads a range page by page. After an interruption it goes on where it was.
type exporter struct {
	hub      *httpHub
	query    url.Values
	size     int // of a page; exportPage by default
	left     int // events still to be read; 0 for all, if limit is
	progress *tally
	line     func([]byte) error // receives whole lines
	began    bool               // an answer has begun
}

func (x *exporter) run(ctx context.Context) error {
	limited := x.left > 0
	for {
		size := cmp.Or(x.size, exportPage)
		if limited {
			size = min(size, x.left)
		}
		n, next, err := x.page(ctx, size)
		if err != nil || n < size {
			return err
		}
		if x.left -= n; limited && x.left == 0 {
			return nil
		}
		if next == "" {
			return errors.New("the answer has no trailer Event-Last-Position; let proxies between here and the hub pass it on")
		}
		x.query.Set("afterId", next)
	}
}

// page reads a page, and returns the number of its events and the position behind it.
func (x *exporter) page(ctx context.Context, size int) (n int, next string, err error) {
	var wait backoff
	x.query.Set("limit", strconv.Itoa(size))
	for {
		before := n
		next, err = x.read(ctx, &n)
		switch {
		case err == nil:
			return n, next, nil
		case ctx.Err() != nil || !x.began || !mayPass(err):
			return n, "", err
		case n > before:
			wait = backoff{}
		}
		if !wait.pause(ctx, x.progress.say, err) {
			return n, "", ctx.Err()
		}
	}
}

// read reads one answer. n is the number of the page's events that were read before, which are
// passed over, and then those that were read at the end.
func (x *exporter) read(ctx context.Context, n *int) (next string, err error) {
	res, err := x.hub.get(ctx, http.MethodGet, "/export", x.query)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	if err := x.begin(res); err != nil {
		return "", err
	}
	skip, buf, held := *n, make([]byte, exportBuffer), 0
	for {
		got, err := res.Body.Read(buf[held:])
		held += got
		end := bytes.LastIndexByte(buf[:held], '\n') + 1
		lines := buf[:end]
		for skip > 0 && len(lines) > 0 {
			lines = lines[bytes.IndexByte(lines, '\n')+1:]
			skip--
		}
		if len(lines) > 0 {
			if err := x.line(lines); err != nil {
				return "", err
			}
			count := bytes.Count(lines, []byte{'\n'})
			*n += count
			x.progress.add(count, len(lines))
		}
		held = copy(buf, buf[end:held])
		if held == len(buf) {
			if len(buf) >= maxLine {
				return "", fmt.Errorf("an event of %s is longer than %d bytes", x.query.Get("topic"), maxLine)
			}
			larger := make([]byte, 2*len(buf))
			copy(larger, buf)
			buf = larger
		}
		switch {
		case errors.Is(err, io.EOF):
			return res.Trailer.Get("Event-Last-Position"), nil
		case err != nil:
			return "", fmt.Errorf("the answer was cut off: %w", err)
		}
	}
}

// begin looks at the header of an answer. The range ends where the first answer began, also if it
// takes several.
func (x *exporter) begin(res *http.Response) error {
	if truncated := res.Header.Get("Event-Truncated") == "true"; truncated && x.began {
		return &httpError{http.StatusGone, "truncated", "the hub has removed events that come next; the export has a gap unless it begins again"}
	} else if truncated {
		x.progress.say("the beginning of this range is gone; the oldest event that is left is " + cmp.Or(res.Header.Get("Event-First-Id"), "none"))
	}
	if x.began {
		return nil
	}
	x.began = true
	if at, err := http.ParseTime(res.Header.Get("Date")); err == nil && !x.query.Has("toTs") {
		at = at.Add(time.Second) // Date has whole seconds
		x.query.Set("toTs", strconv.FormatInt(at.UnixMilli(), 10))
	}
	if position := res.Header.Get("Event-Position"); position != "" {
		x.query.Set("afterId", position)
	}
	return nil
}

// replayCmd is `eventhub replay`.
type replayCmd struct {
	rangeFlags

	From    string `default:"earliest" enum:"earliest,ts,afterId" help:"Start: ${enum}."`
	TS      *int64 `name:"ts" help:"Epoch milliseconds, for --from ts."`
	AfterID string `name:"after-id" help:"Id of an event, for --from afterId."`
	Limit   int    `default:"1000" help:"Maximum number of events."`
}

// Run prints the events as one record a line.
func (cmd *replayCmd) Run(ctx context.Context, std streams) error {
	switch {
	case (cmd.From == "ts") != (cmd.TS != nil):
		return errors.New("--from ts and --ts with epoch milliseconds go together")
	case (cmd.From == "afterId") != (cmd.AfterID != ""):
		return errors.New("--from afterId and --after-id with the id of an event go together")
	case cmd.Limit < 1:
		return errors.New("--limit must be at least 1")
	}
	q := cmd.query()
	q.Set("from", cmd.From)
	q.Set("limit", strconv.Itoa(cmd.Limit))
	if cmd.TS != nil {
		q.Set("ts", strconv.FormatInt(*cmd.TS, 10))
	}
	if cmd.AfterID != "" {
		q.Set("afterId", cmd.AfterID)
	}
	hub, err := cmd.hub(cmd.Compress)
	if err != nil {
		return err
	}
	defer hub.close()
	res, err := hub.get(ctx, http.MethodGet, "/replay", q)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if res.Header.Get("Event-Truncated") == "true" {
		_, _ = fmt.Fprintln(std.err, "eventhub: the beginning of this range is gone; the oldest event that is left is "+cmp.Or(res.Header.Get("Event-First-Id"), "none"))
	}
	err = printReplay(res.Body, std.out)
	if out, ok := errors.AsType[*outputError](err); ok && errors.Is(out, syscall.EPIPE) {
		return nil
	}
	return err
}

// printReplay prints the events of an answer as they come.
func printReplay(in io.Reader, out io.Writer) error {
	cut := func(err error) error { return fmt.Errorf("the answer was cut off: %w", err) }
	d := json.NewDecoder(in)
	for {
		name, err := d.Token()
		if err != nil {
			return cut(err)
		}
		if name == "events" {
			break
		}
	}
	if _, err := d.Token(); err != nil {
		return cut(err)
	}
	for d.More() {
		var record json.RawMessage
		if err := d.Decode(&record); err != nil {
			return cut(err)
		}
		if _, err := out.Write(append(unbroken(record), '\n')); err != nil {
			return &outputError{err}
		}
	}
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return cut(err)
		}
	}
}

// unbroken replaces line breaks in JSON, which lie between tokens only, by blanks.
func unbroken(record []byte) []byte {
	for i, c := range record {
		if c == '\n' || c == '\r' {
			record[i] = ' '
		}
	}
	return record
}
