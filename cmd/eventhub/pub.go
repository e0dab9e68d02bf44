package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"golang.org/x/time/rate"

	"eventhub/facade/client"
)

// maxLine is the longest line read from standard input. The hub's own limit is lower; it answers with its number.
const maxLine = 16 << 20

// maxPubBurst is how many lines are sent at once. Together with the publishes in flight, which a hub that stood still finds
// all at once, they are fewer than the frames that a connection may send at once.
const maxPubBurst = 512

// pubCmd is `eventhub pub`.
type pubCmd struct {
	hubFlags

	Topic   string            `arg:"" help:"The topic."`
	Payload string            `arg:"" optional:"" default:"-" help:"The payload as JSON; - reads one payload a line from standard input."`
	ID      string            `name:"id" help:"The event's id: publishing it again stores nothing."`
	Key     string            `help:"The event's key."`
	Remove  bool              `help:"Remove the key from a compacted topic: publish a tombstone, without a payload."`
	Rate    int               `default:"9000" help:"Lines a second at most, so that the hub refuses none; it takes 10000 of a connection unless configured."`
	Header  map[string]string `mapsep:"none" placeholder:"NAME=VALUE" help:"A header of the event; may be repeated."`
}

// Run publishes and prints an id a line, in the order of the payloads. It ends at the first failure.
func (cmd *pubCmd) Run(ctx context.Context, std streams) error {
	opts := client.PublishOptions{ID: cmd.ID, Key: cmd.Key, Headers: cmd.Header}
	if cmd.Remove {
		if cmd.Key == "" || cmd.Payload != "-" {
			return errors.New("--remove takes a key and no payload: eventhub pub TOPIC --key=KEY --remove")
		}
		cmd.Payload, opts.Tombstone = "null", true
	}
	if cmd.Payload == "-" {
		if cmd.ID != "" {
			return errors.New("--id names one event: give its payload as an argument")
		}
		if cmd.Rate < 1 {
			return fmt.Errorf("--rate %d: it must be at least 1", cmd.Rate)
		}
		return cmd.lines(ctx, std, opts)
	}
	payload := []byte(cmd.Payload)
	if err := checkJSON(payload); err != nil {
		return fmt.Errorf("the payload %w", err)
	}
	c, err := cmd.dial(ctx)
	if err != nil {
		return err
	}
	id, err := c.Publish(ctx, cmd.Topic, payload, opts)
	if err := errors.Join(err, c.Close()); err != nil {
		return fmt.Errorf("publishing to %s: %w", cmd.Topic, err)
	}
	_, err = fmt.Fprintln(std.out, id)
	return err
}

// errLeft is how publishing lines ends before all were read.
var errLeft = errors.New("interrupted: lines may be left that were not published")

// answer is what became of a line.
type answer struct {
	line int
	id   string
	err  error
}

// lines publishes each line of standard input. Publishes overlap; ids are printed in order.
func (cmd *pubCmd) lines(ctx context.Context, std streams, opts client.PublishOptions) (err error) {
	c, err := cmd.dial(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	// The queue holds an entry for each publish in flight, so the client's own bound is also that of the queue.
	queue := make(chan chan answer, client.DefaultPublishInFlight)
	printed := make(chan error, 1)
	go func() { // owned by this function, which waits for printed
		err := printIDs(std.out, cmd.Topic, queue)
		cancel() // a failure ends the reading
		for range queue {
			continue // makes room for a reader that waits
		}
		printed <- err
	}()
	// A line that was refused for coming too fast would come after others if it were sent again: better none is.
	pace := rate.NewLimiter(rate.Limit(cmd.Rate), min(cmd.Rate, maxPubBurst))
	//nolint:contextcheck // PublishAsync does not wait for the hub
	readErr := eachLine(ctx, std.in, func(line int, payload []byte) error {
		if err := checkJSON(payload); err != nil {
			return fmt.Errorf("line %d %w", line, err)
		}
		if err := pace.Wait(ctx); err != nil {
			return errLeft
		}
		ch := make(chan answer, 1)
		queue <- ch
		err := c.PublishAsync(cmd.Topic, payload, opts, func(id string, err error) { ch <- answer{line, id, err} })
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

// printIDs prints the ids of answers as they come due, and stops at the first failure.
func printIDs(w io.Writer, topic string, queue <-chan chan answer) error {
	out := bufio.NewWriter(w)
	for ch := range queue {
		var a answer
		select {
		case a = <-ch:
		default:
			// Nothing is due: show what there is.
			if err := out.Flush(); err != nil {
				return &outputError{err}
			}
			a = <-ch
		}
		if a.err != nil {
			return errors.Join(fmt.Errorf("publishing line %d to %s: %w", a.line, topic, a.err), out.Flush())
		}
		if _, err := fmt.Fprintln(out, a.id); err != nil {
			return &outputError{err}
		}
	}
	return out.Flush()
}

// eachLine calls f with each line that is not blank, numbered from 1, until f fails or ctx ends.
func eachLine(ctx context.Context, r io.Reader, f func(line int, text []byte) error) error {
	lines := make(chan []byte)
	ended := make(chan error, 1)
	// Nothing interrupts a read from a terminal: when ctx ends, this goroutine is left to the end of the process.
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

// checkJSON says where text is no JSON.
func checkJSON(text []byte) error {
	if json.Valid(text) {
		return nil
	}
	var v json.RawMessage
	return fmt.Errorf("is not valid JSON: %w", json.Unmarshal(text, &v))
}
