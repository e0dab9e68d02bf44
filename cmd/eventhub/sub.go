package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"sync"
	"syscall"
	"time"

	eventhub "eventhub/sdk/go"
)

// leaveTimeout is the timeout for unsubscribing at the end.
const leaveTimeout = 2 * time.Second

// untilEndIdle is how long --until-end waits for an event: its last one may be with another member,
// or acknowledged.
const untilEndIdle = 3 * time.Second

// defaultInFlight is how many events are leased at a time by default.
const defaultInFlight = 100

// subCmd is `eventhub sub`.
type subCmd struct {
	httpFlags

	Topic         string        `arg:"" help:"Topic."`
	Group         string        `required:"" help:"Group to join; created if it does not exist."`
	From          string        `default:"latest" enum:"latest,earliest,ts,afterId" help:"Start of a new group: ${enum}."`
	TS            *int64        `name:"ts" help:"Epoch milliseconds, for --from ts."`
	AfterID       string        `name:"after-id" help:"Id of an event, for --from afterId."`
	NoAck         bool          `help:"Do not acknowledge events, so that the group keeps them."`
	Count         int           `help:"Stop after this many events; 0 never stops."`
	UntilEnd      bool          `name:"until-end" help:"Stop after the event that was the topic's newest at the start, or when no event has come for 3s."`
	MaxInFlight   int           `help:"Maximum number of events leased at a time."`
	AckTimeout    time.Duration `help:"Duration of a lease."`
	SchemaVersion versionFlag   `placeholder:"N" help:"Version of the schema in which events come, or latest. An event that cannot be cast is a failed attempt."`
	MaxAttempts   *int          `help:"Number of failed attempts after which an event is dead-lettered; 0 for never."`
}

func (cmd *subCmd) options() (eventhub.SubscribeOptions, error) {
	switch {
	case cmd.From == eventhub.FromTS && cmd.TS == nil:
		return eventhub.SubscribeOptions{}, errors.New("--from ts requires --ts with epoch milliseconds")
	case cmd.From == eventhub.FromAfterID && cmd.AfterID == "":
		return eventhub.SubscribeOptions{}, errors.New("--from afterId requires --after-id with the id of an event")
	case cmd.TS != nil && cmd.From != eventhub.FromTS:
		return eventhub.SubscribeOptions{}, errors.New("--ts requires --from ts")
	case cmd.AfterID != "" && cmd.From != eventhub.FromAfterID:
		return eventhub.SubscribeOptions{}, errors.New("--after-id requires --from afterId")
	case cmd.Count < 0:
		return eventhub.SubscribeOptions{}, errors.New("--count must not be negative; 0 never stops")
	}
	inFlight := cmd.MaxInFlight
	if inFlight == 0 {
		inFlight = defaultInFlight
		if cmd.Count > 0 {
			inFlight = min(cmd.Count, inFlight) // lease no more events than will be printed
		}
	}
	return eventhub.SubscribeOptions{
		From: cmd.From, TS: cmd.TS, AfterID: cmd.AfterID, Manual: true,
		MaxInFlight: inFlight, AckTimeout: cmd.AckTimeout, MaxAttempts: cmd.MaxAttempts, SchemaVersion: eventhub.SchemaVersion(cmd.SchemaVersion),
	}, nil
}

// end returns the id of the topic's newest event, for --until-end; "" if the topic has none.
func (cmd *subCmd) end(ctx context.Context) (string, error) {
	if !cmd.UntilEnd {
		return "", nil
	}
	hub, err := cmd.hub(false)
	if err != nil {
		return "", err
	}
	defer hub.close()
	res, err := hub.get(ctx, http.MethodGet, "/replay", url.Values{"topic": {cmd.Topic}, "limit": {"1"}})
	if err != nil {
		return "", err
	}
	_ = res.Body.Close()
	return res.Header.Get("Event-Newest-Id"), nil
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
	end, err := cmd.end(ctx)
	if err != nil || cmd.UntilEnd && end == "" {
		return err
	}
	c, err := cmd.connect(ctx, std.say)
	if err != nil {
		return err
	}
	p := &printer{cmd: cmd, std: std, left: left, over: make(chan error, 1), end: end}
	for again := true; again; {
		again, err = cmd.follow(ctx, std, c, opts, p)
	}
	err = errors.Join(err, closeClient(ctx, c))
	if out, ok := errors.AsType[*outputError](err); ok && errors.Is(out, syscall.EPIPE) {
		return nil // the reader closed the pipe
	}
	return err
}

// follow prints events until Count is reached, ctx ends, or the subscription does. It reports
// whether to subscribe again, because somebody deleted the group.
func (cmd *subCmd) follow(ctx context.Context, std streams, c *eventhub.Client, opts eventhub.SubscribeOptions, p *printer) (again bool, err error) {
	said := make(chan struct{}) // that the group was joined, which comes before its events
	// The end of ctx only ends the wait for the hub: what is being printed is acknowledged first.
	joined, leave := context.WithCancel(context.WithoutCancel(ctx))
	defer leave()
	joining := context.AfterFunc(ctx, leave)
	sub, err := c.Subscribe(joined, cmd.Topic, cmd.Group, opts, func(handling context.Context, d *eventhub.Delivery) error {
		select {
		case <-said:
		case <-handling.Done():
			return nil // the event goes to other members
		}
		select {
		case <-ctx.Done():
			return nil // likewise
		default:
		}
		return p.print(handling, d)
	})
	if !joining() {
		return false, nil // a normal stop
	}
	if err != nil {
		return false, fmt.Errorf("subscribe to %s: %w", cmd.Topic, err)
	}
	std.say(fmt.Sprintf("subscribed to %s as %s", cmd.Topic, cmd.Group))
	close(said)
	idle := time.NewTicker(untilEndIdle)
	defer idle.Stop()
	for waiting := true; waiting; {
		waiting = false
		select {
		case err = <-p.over:
		case <-sub.Done():
			failure, _ := errors.AsType[*eventhub.Error](sub.Err())
			switch {
			case failure == nil: // it ended with the client
			case failure.Code == "not_subscribed":
				std.say(fmt.Sprintf("group %s of topic %s was deleted; subscribing again", cmd.Group, cmd.Topic))
				return true, nil
			default:
				err = fmt.Errorf("subscription to %s ended: %w", cmd.Topic, failure)
			}
		case <-ctx.Done():
		case <-idle.C:
			waiting = !cmd.UntilEnd || p.moved()
		}
	}
	p.stop()
	// Events that were not acknowledged go to other members at once. An error of an ended
	// connection adds nothing.
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_ = sub.Unsubscribe(limited)
	return false, err
}

// printer prints events.
type printer struct {
	cmd  *subCmd
	std  streams
	over chan error // receives once: nil after the last event, otherwise the output error

	end string // the id after which the printing ends; "" for none

	mu   sync.Mutex
	came bool // an event has come since moved was called
	left int
	done bool
}

// print writes one event and then acknowledges it.
func (p *printer) print(_ context.Context, d *eventhub.Delivery) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return nil
	}
	if _, err := p.std.out.Write(append(unbroken(bytes.Clone(d.Record())), '\n')); err != nil {
		p.done = true
		p.over <- &outputError{err}
		return nil // Run receives the error; the event goes to other members
	}
	if !p.cmd.NoAck {
		d.Ack() // if its connection has ended, the client acknowledges on the next
	}
	p.came = true
	if p.left--; p.left == 0 || p.end != "" && d.ID == p.end {
		p.done = true
		p.over <- nil
	}
	return nil
}

// moved reports whether an event has come since the last call.
func (p *printer) moved() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	came := p.came
	p.came = false
	return came
}

// stop ends the printing.
func (p *printer) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = true
}
