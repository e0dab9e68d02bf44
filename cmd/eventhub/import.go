package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/time/rate"

	eventhub "eventhub/sdk/go"
)

// maxDedupe is the maximum number of ids that --dedupe remembers.
const maxDedupe = 10_000_000

// importCmd is `eventhub import`.
type importCmd struct {
	httpFlags

	File         string `arg:"" help:"File with one event record per line, as eventhub export writes it; - for standard input."`
	Topic        string `help:"Publish all events to this topic. Default: the topic in each record."`
	Rate         int    `default:"9000" help:"Maximum events per second. By default, the hub accepts 10000 frames per second from a connection."`
	Dedupe       bool   `help:"Skip events whose ids the topics already have. The hub itself only remembers the ids of its duplicate window."`
	DedupeFromTS *int64 `name:"dedupe-from-ts" help:"With --dedupe, compare only with events stored at or after this time in epoch milliseconds. Default: all."`
}

// record is a line of an import.
type record struct {
	ID        string            `json:"id"`
	TS        *int64            `json:"ts"`
	Topic     string            `json:"topic"`
	Key       string            `json:"key"`
	SID       string            `json:"sid"`
	Headers   map[string]string `json:"headers"`
	CausedBy  []string          `json:"caused_by"`
	Tags      []string          `json:"tags"`
	Payload   json.RawMessage   `json:"payload"`
	Tombstone bool              `json:"tombstone"`
}

// importing is an import that runs.
type importing struct {
	cmd   *importCmd
	hub   *httpHub
	pace  *rate.Limiter
	known map[string]map[[16]byte]struct{} // hashes of the ids that topics have
	ids   int                              // in known
	told  *tally

	skipped, odd, renamed int
}

// Run publishes the records in their order, and stops at the first failure.
func (cmd *importCmd) Run(ctx context.Context, std streams) (err error) {
	switch {
	case cmd.Rate < 1:
		return fmt.Errorf("--rate %d: must be at least 1", cmd.Rate)
	case cmd.DedupeFromTS != nil && !cmd.Dedupe:
		return errors.New("--dedupe-from-ts requires --dedupe")
	}
	in := std.in
	if cmd.File != "-" {
		f, err := os.Open(cmd.File)
		if err != nil {
			return fmt.Errorf("file %s: %w", cmd.File, cause(err))
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	im := &importing{
		cmd: cmd, pace: rate.NewLimiter(rate.Limit(cmd.Rate), min(cmd.Rate, maxPubBurst)),
		known: make(map[string]map[[16]byte]struct{}), told: newTally(std.err, "imported"),
	}
	if im.hub, err = cmd.hub(false); err != nil {
		return err
	}
	defer im.hub.close()
	c, err := cmd.connect(ctx, std.say)
	if err != nil {
		return err
	}
	err = errors.Join(im.run(ctx, c, in), closeClient(ctx, c))
	im.told.end()
	im.told.say(fmt.Sprintf("skipped %d events that were there already and %d whose payload was not JSON; gave %d native events new ids", im.skipped, im.odd, im.renamed))
	return err
}

func (im *importing) run(ctx context.Context, c *eventhub.Client, in io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// While there is no hub, there are no answers either: the end of ctx ends the waiting for them.
	stop := context.AfterFunc(ctx, func() { _ = closeClient(ctx, c) })
	defer stop()
	queue := make(chan chan answer, maxUnanswered)
	failed := make(chan error, 1)
	go func() { // run waits for failed
		var first error
		for ch := range queue {
			if a := <-ch; a.err != nil && first == nil {
				first = fmt.Errorf("line %d: %w", a.line, a.err)
				cancel() // stops the reader
			}
		}
		failed <- first
	}()
	err := eachLine(ctx, in, func(line int, text []byte) error { return im.publish(ctx, c, queue, line, text) })
	close(queue)
	if first := <-failed; first != nil {
		return first
	}
	return err
}

// publish sends one record, or skips it.
func (im *importing) publish(ctx context.Context, c *eventhub.Client, queue chan<- chan answer, line int, text []byte) error {
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return fmt.Errorf("line %d is not an event record: %w", line, err)
	}
	topic := cmp.Or(im.cmd.Topic, r.Topic)
	switch {
	case topic == "" || r.ID == "" || r.Payload == nil:
		return fmt.Errorf("line %d is not an event record: id, topic and payload are required", line)
	case r.Headers["Event-Encoding"] != "":
		im.odd++
		return nil
	}
	if at := strings.LastIndexByte(r.ID, '@'); at > 0 {
		if _, err := strconv.ParseUint(r.ID[at+1:], 10, 64); err == nil {
			r.ID = "native:" + r.ID[:at] + ":" + r.ID[at+1:] // the hub reserves ids of that form
			im.renamed++
		}
	}
	there, err := im.there(ctx, topic, r.ID)
	if err != nil {
		return err
	}
	if there {
		im.skipped++
		return nil
	}
	if err := im.pace.Wait(ctx); err != nil {
		return errLeft
	}
	ch := make(chan answer, 1)
	queue <- ch
	opts := eventhub.PublishOptions{ID: r.ID, TS: r.TS, Key: r.Key, SID: r.SID, Headers: r.Headers, CausedBy: r.CausedBy, Tags: r.Tags, Tombstone: r.Tombstone}
	if err := c.PublishAsync(ctx, topic, r.Payload, opts, func(id string, err error) { ch <- answer{line, id, err} }); err != nil {
		ch <- answer{line, "", err}
	}
	im.told.add(1, len(text))
	return nil
}

// there reports whether a topic had an event with the id before the import, or earlier in it.
func (im *importing) there(ctx context.Context, topic, id string) (bool, error) {
	if !im.cmd.Dedupe {
		return false, nil
	}
	known := im.known[topic]
	if known == nil {
		known = make(map[[16]byte]struct{})
		im.known[topic] = known
		if err := im.scan(ctx, topic, known); err != nil {
			return false, err
		}
	}
	if _, ok := known[idHash(id)]; ok {
		return true, nil
	}
	return false, im.remember(known, id)
}

func (im *importing) remember(known map[[16]byte]struct{}, id string) error {
	if im.ids == maxDedupe {
		return fmt.Errorf("--dedupe remembers at most %d ids; give it less to compare (--dedupe-from-ts) or import fewer events at a time", maxDedupe)
	}
	im.ids++
	known[idHash(id)] = struct{}{}
	return nil
}

// scan reads the ids that a topic has.
func (im *importing) scan(ctx context.Context, topic string, known map[[16]byte]struct{}) error {
	f := rangeFlags{Topic: topic}
	q := f.query()
	q.Set("ndjson", "1")
	if im.cmd.DedupeFromTS != nil {
		q.Set("fromTs", strconv.FormatInt(*im.cmd.DedupeFromTS, 10))
	}
	told := newTally(im.told.out, "compared with "+topic+":")
	x := &exporter{hub: im.hub, query: q, progress: told, line: func(lines []byte) error {
		for text := range bytes.Lines(lines) {
			var r struct {
				ID string `json:"id"`
			}
			if err := json.Unmarshal(text, &r); err != nil {
				return fmt.Errorf("read the ids of %s: %w", topic, err)
			}
			if err := im.remember(known, r.ID); err != nil {
				return err
			}
		}
		return nil
	}}
	err := x.run(ctx)
	told.clear()
	return err
}

// idHash is a short form of an id.
func idHash(id string) [16]byte {
	sum := sha256.Sum256([]byte(id))
	return [16]byte(sum[:16])
}
