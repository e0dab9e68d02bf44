package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"golang.org/x/time/rate"

	eventhub "eventhub/sdk/go"
)

// maxLine is the maximum length of an input line in bytes. The hub's own limit is lower, and its
// error states that limit.
const maxLine = 16 << 20

// maxPubBurst is the maximum number of lines sent in a burst. A hub that was stalled receives a
// burst and all publishes in flight at once; together they stay below the number of frames that a
// connection may send at once.
const maxPubBurst = 512

// maxUnanswered is how many publishes wait for their answers at most, sent or not.
const maxUnanswered = 1024

// pubCmd is `eventhub pub`.
type pubCmd struct {
	hubFlags

	Topic   string            `arg:"" help:"Topic."`
	Payload string            `arg:"" optional:"" default:"-" help:"Payload as JSON; - reads one payload per line from standard input."`
	ID      string            `name:"id" help:"Id of the event. Publishing the same id again stores nothing."`
	Key     string            `help:"Key of the event."`
	Remove  bool              `help:"Remove the key from a compacted topic by publishing a tombstone."`
	Delay   time.Duration     `placeholder:"DURATION" help:"Store the events so much later, such as 90s or 36h. DELETE /delayed/TOPIC/ID cancels an event."`
	At      *int64            `placeholder:"TS" help:"Store the events at this time in epoch milliseconds. A time that has passed means now."`
	Rate    int               `default:"9000" help:"Maximum lines per second. By default, the hub accepts 10000 frames per second from a connection."`
	Header  map[string]string `mapsep:"none" placeholder:"NAME=VALUE" help:"Header of the event; may be repeated."`
}

// Run publishes payloads and prints one id per line, in the order of the payloads. It stops at the
// first failure.
func (cmd *pubCmd) Run(ctx context.Context, std streams) error {
	opts := eventhub.PublishOptions{ID: cmd.ID, Key: cmd.Key, Headers: cmd.Header, DelayMS: cmd.Delay.Milliseconds(), At: cmd.At}
	switch {
	case cmd.Delay < 0:
		return fmt.Errorf("--delay %v: must not be negative", cmd.Delay)
	case cmd.Delay != 0 && cmd.At != nil:
		return errors.New("--delay and --at are two ways to say when; give one")
	case cmd.Delay != cmd.Delay.Truncate(time.Millisecond):
		opts.DelayMS++ // never early
	}
	if cmd.Remove {
		if cmd.Key == "" || cmd.Payload != "-" {
			return errors.New("--remove requires a key and no payload; use eventhub pub TOPIC --key=KEY --remove")
		}
		cmd.Payload, opts.Tombstone = "null", true
	}
	if cmd.Payload == "-" {
		if cmd.ID != "" {
			return errors.New("--id requires a single event; pass its payload as an argument")
		}
		if cmd.Rate < 1 {
			return fmt.Errorf("--rate %d: must be at least 1", cmd.Rate)
		}
		return cmd.lines(ctx, std, opts)
	}
	payload := []byte(cmd.Payload)
	if err := checkJSON(payload); err != nil {
		return fmt.Errorf("the payload %w", err)
	}
	c, err := cmd.connect(ctx, std.say)
	if err != nil {
		return err
	}
	id, err := c.Publish(ctx, cmd.Topic, json.RawMessage(payload), opts)
	if err := errors.Join(err, closeClient(ctx, c)); err != nil {
		return fmt.Errorf("publish to %s: %w", cmd.Topic, err)
	}
	_, err = fmt.Fprintln(std.out, id)
	return err
}

// errLeft is returned when publishing stops before all lines were read.
var errLeft = errors.New("interrupted; some lines may not have been published")

// answer is the result of a line.
type answer struct {
	line int
	id   string
	err  error
}

// lines publishes each line of standard input. Publishes overlap, but ids are printed in order.
func (cmd *pubCmd) lines(ctx context.Context, std streams, opts eventhub.PublishOptions) (err error) {
	c, err := cmd.connect(ctx, std.say)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer func() { err = errors.Join(err, closeClient(ctx, c)) }()
	// While there is no hub, there are no answers either: the end of ctx ends the waiting for them.
	stop := context.AfterFunc(ctx, func() { _ = closeClient(ctx, c) })
	defer stop()

	// The queue has an entry for each publish without an answer, so its capacity is the client's
	// limit.
	queue := make(chan chan answer, maxUnanswered)
	printed := make(chan error, 1)
	go func() { // the function waits for printed
		err := printIDs(std.out, cmd.Topic, queue)
		cancel() // a failure stops the reader
		for range queue {
			continue // unblocks the reader
		}
		printed <- err
	}()
	// Pacing prevents rate-limit errors. A refused line could only be sent again after later lines,
	// out of order.
	pace := rate.NewLimiter(rate.Limit(cmd.Rate), min(cmd.Rate, maxPubBurst))
	readErr := eachLine(ctx, std.in, func(line int, payload []byte) error {
		if err := checkJSON(payload); err != nil {
			return fmt.Errorf("line %d %w", line, err)
		}
		if err := pace.Wait(ctx); err != nil {
			return errLeft
		}
		ch := make(chan answer, 1)
		queue <- ch
		err := c.PublishAsync(ctx, cmd.Topic, json.RawMessage(payload), opts, func(id string, err error) { ch <- answer{line, id, err} })
		if err != nil {
			ch <- answer{line, "", err}
		}
		return nil
	})
	close(queue)
	if err := <-printed; err != nil {
		return err
	}
	return readErr
}

// printIDs prints the ids of answers in order as they arrive, and stops at the first failure.
func printIDs(w io.Writer, topic string, queue <-chan chan answer) error {
	out := bufio.NewWriter(w)
	for ch := range queue {
		var a answer
		select {
		case a = <-ch:
		default:
			// No answer is ready: show the ids so far.
			if err := out.Flush(); err != nil {
				return &outputError{err}
			}
			a = <-ch
		}
		if a.err != nil {
			return errors.Join(fmt.Errorf("publish line %d to %s: %w", a.line, topic, a.err), out.Flush())
		}
		if _, err := fmt.Fprintln(out, a.id); err != nil {
			return &outputError{err}
		}
	}
	return out.Flush()
}

// eachLine calls f for each non-blank line, numbered from 1, until f fails or ctx ends.
func eachLine(ctx context.Context, r io.Reader, f func(line int, text []byte) error) error {
	lines := make(chan []byte)
	ended := make(chan error, 1)
	// A read from a terminal cannot be interrupted. When ctx ends, this goroutine may remain until
	// the process exits.
	go func() {
		in := bufio.NewScanner(r)
		in.Buffer(nil, maxLine)
		for in.Scan() {
			select {
			case lines <- bytes.Clone(in.Bytes()):
			case <-ctx.Done():
				return
			}
		}
		ended <- in.Err()
	}()
	for line := 1; ; line++ {
		select {
		case <-ctx.Done():
			return errLeft
		case err := <-ended:
			if errors.Is(err, bufio.ErrTooLong) {
				return fmt.Errorf("line %d is longer than %d bytes", line, maxLine)
			}
			return err
		case text := <-lines:
			if text = bytes.TrimSpace(text); len(text) == 0 {
				continue
			}
			if err := f(line, text); err != nil {
				return err
			}
		}
	}
}

// checkJSON returns an error with the position of invalid JSON.
func checkJSON(text []byte) error {
	if json.Valid(text) {
		return nil
	}
	var v json.RawMessage
	return fmt.Errorf("is not valid JSON: %w", json.Unmarshal(text, &v))
}
