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

// leaveTimeout bounds the goodbye to the hub.
const leaveTimeout = 2 * time.Second

// subCmd is `eventhub sub`.
type subCmd struct {
	hubFlags

	Topic       string        `arg:"" help:"The topic."`
	Group       string        `required:"" help:"The group to join; it is made if it is new."`
	From        string        `default:"latest" enum:"latest,earliest,ts,afterId" help:"Where a new group starts: ${enum}."`
	TS          *int64        `name:"ts" help:"Epoch milliseconds, for --from ts."`
	AfterID     string        `name:"after-id" help:"An event's id, for --from afterId."`
	NoAck       bool          `help:"Do not acknowledge: the events stay with the group."`
	Count       int           `help:"End after so many events. 0: never."`
	MaxInFlight int           `help:"The most events leased at a time."`
	AckTimeout  time.Duration `help:"The length of a lease."`
	MaxAttempts *int          `help:"The attempt whose failure dead-letters an event; 0: none."`
}

func (cmd *subCmd) options() (client.SubscribeOptions, error) {
	switch {
	case cmd.From == "ts" && cmd.TS == nil:
		return client.SubscribeOptions{}, errors.New("--from ts needs --ts: give epoch milliseconds")
	case cmd.From == "afterId" && cmd.AfterID == "":
		return client.SubscribeOptions{}, errors.New("--from afterId needs --after-id: give an event's id")
	case cmd.TS != nil && cmd.From != "ts":
		return client.SubscribeOptions{}, errors.New("--ts needs --from ts: without it, it would not count")
	case cmd.AfterID != "" && cmd.From != "afterId":
		return client.SubscribeOptions{}, errors.New("--after-id needs --from afterId: without it, it would not count")
	case cmd.Count < 0:
		return client.SubscribeOptions{}, errors.New("--count is negative: give a number of events, or 0 for no end")
	}
	inFlight := cmd.MaxInFlight
	if inFlight == 0 && cmd.Count > 0 {
		inFlight = min(cmd.Count, 100) // what will not be printed need not be leased
	}
	return client.SubscribeOptions{
		From: cmd.From, TS: cmd.TS, AfterID: cmd.AfterID,
		MaxInFlight: inFlight, AckTimeoutMS: cmd.AckTimeout.Milliseconds(), MaxAttempts: cmd.MaxAttempts,
	}, nil
}

// Run prints events until it has Count of them, ctx ends, or nobody reads them any more.
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
			return fmt.Errorf("subscribing to %s: %w", cmd.Topic, err)
		}
		say(fmt.Sprintf("subscribed to %s as %s", cmd.Topic, cmd.Group))
		select {
		case err = <-p.over:
		case <-c.Done():
			err = c.Err()
		case <-ctx.Done():
		}
		left = p.stop()
		// What was not acknowledged goes to other members at once. A connection that has ended says nothing new.
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
		defer cancel()
		_ = sub.Unsubscribe(leave)
		return err
	})
	if out, ok := errors.AsType[*outputError](err); ok && errors.Is(out, syscall.EPIPE) {
		return nil // the reader has had enough
	}
	return err
}

// printer writes the events of one connection.
type printer struct {
	cmd  *subCmd
	std  streams
	over chan error // receives once: nil after the last event, else why no more can be printed

	mu   sync.Mutex
	left int
	done bool
}

// print writes one event and acknowledges it then, not before.
func (p *printer) print(ev client.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return
	}
	// A payload keeps the publisher's line breaks; outside of strings, and strings have none, a blank means the same.
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
			return // the connection has ended, which is noticed elsewhere
		}
	}
	if p.left--; p.left == 0 {
		p.done = true
		p.over <- nil
	}
}

// stop ends the printing and returns how many events are left to print.
func (p *printer) stop() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = true
	return p.left
}
