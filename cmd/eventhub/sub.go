package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"syscall"
	"time"

	"eventhub/facade/client"
)

// leaveTimeout is the timeout for unsubscribing at the end.
const leaveTimeout = 2 * time.Second

// subCmd is `eventhub sub`.
type subCmd struct {
	hubFlags

	Topic       string        `arg:"" help:"Topic."`
	Group       string        `required:"" help:"Group to join; created if it does not exist."`
	From        string        `default:"latest" enum:"latest,earliest,ts,afterId" help:"Start of a new group: ${enum}."`
	TS          *int64        `name:"ts" help:"Epoch milliseconds, for --from ts."`
	AfterID     string        `name:"after-id" help:"Id of an event, for --from afterId."`
	NoAck       bool          `help:"Do not acknowledge events, so that the group keeps them."`
	Count       int           `help:"Stop after this many events; 0 never stops."`
	MaxInFlight int           `help:"Maximum number of events leased at a time."`
	AckTimeout  time.Duration `help:"Duration of a lease."`
	MaxAttempts *int          `help:"Number of failed attempts after which an event is dead-lettered; 0 for never."`
}

func (cmd *subCmd) options() (client.SubscribeOptions, error) {
	switch {
	case cmd.From == "ts" && cmd.TS == nil:
		return client.SubscribeOptions{}, errors.New("--from ts requires --ts with epoch milliseconds")
	case cmd.From == "afterId" && cmd.AfterID == "":
		return client.SubscribeOptions{}, errors.New("--from afterId requires --after-id with the id of an event")
	case cmd.TS != nil && cmd.From != "ts":
		return client.SubscribeOptions{}, errors.New("--ts requires --from ts")
	case cmd.AfterID != "" && cmd.From != "afterId":
		return client.SubscribeOptions{}, errors.New("--after-id requires --from afterId")
	case cmd.Count < 0:
		return client.SubscribeOptions{}, errors.New("--count must not be negative; 0 never stops")
	}
	inFlight := cmd.MaxInFlight
	if inFlight == 0 && cmd.Count > 0 {
		inFlight = min(cmd.Count, 100) // lease no more events than will be printed
	}
	return client.SubscribeOptions{
		From: cmd.From, TS: cmd.TS, AfterID: cmd.AfterID,
		MaxInFlight: inFlight, AckTimeoutMS: cmd.AckTimeout.Milliseconds(), MaxAttempts: cmd.MaxAttempts,
	}, nil
}

// Run prints events until Count is reached, ctx ends, or standard output is closed.
func (cmd *subCmd) Run(ctx context.Context, std streams) error {
	opts, err := cmd.options()
	if err != nil {
		return err
	}
	left := cmd.Count
	if left == 0 {
		left = math.MaxInt
	}
	say := func(text string) { _, _ = fmt.Fprintln(std.err, "eventhub: "+text) }
	err = cmd.keep(ctx, say, func(ctx context.Context, c *client.Client) error {
		p := &printer{cmd: cmd, std: std, left: left, over: make(chan error, 1)}
		sub, err := c.Subscribe(ctx, cmd.Topic, cmd.Group, opts, p.print)
		if err != nil {
			return fmt.Errorf("subscribe to %s: %w", cmd.Topic, err)
		}
		say(fmt.Sprintf("subscribed to %s as %s", cmd.Topic, cmd.Group))
		select {
		case err = <-p.over:
		case <-c.Done():
			err = c.Err()
		case <-sub.Done():
			if err = c.Err(); err == nil {
				err = fmt.Errorf("group %s of topic %s was deleted", cmd.Group, cmd.Topic)
			}
		case <-ctx.Done():
		}
		left = p.stop()
		// Unsubscribe, so that events which were not acknowledged go to other members at once. An
		// error of an ended connection adds nothing.
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
		defer cancel()
		_ = sub.Unsubscribe(leave)
		return err
	})
	if out, ok := errors.AsType[*outputError](err); ok && errors.Is(out, syscall.EPIPE) {
		return nil // the reader closed the pipe
	}
	return err
}

// printer prints the events of one connection.
type printer struct {
	cmd  *subCmd
	std  streams
	over chan error // receives once: nil after the last event, otherwise the output error

	mu   sync.Mutex
	left int
	done bool
}

// print writes one event and then acknowledges it.
func (p *printer) print(ev client.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return
	}
	// A payload may contain line breaks, but only between JSON tokens, where a space is equivalent.
	for i, c := range ev.Record {
		if c == '\n' || c == '\r' {
			ev.Record[i] = ' '
		}
	}
	if _, err := p.std.out.Write(append(ev.Record, '\n')); err != nil {
		p.done = true
		p.over <- &outputError{err}
		return
	}
	if !p.cmd.NoAck {
		if err := ev.Ack(); err != nil {
			return // the connection has ended, which Run notices
		}
	}
	if p.left--; p.left == 0 {
		p.done = true
		p.over <- nil
	}
}

// stop ends the printing and returns the number of events left to print.
func (p *printer) stop() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = true
	return p.left
}
