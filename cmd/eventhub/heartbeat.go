package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"eventhub/projections/process"
	eventhub "eventhub/sdk/go"
)

// heartbeatCmd is `eventhub heartbeat`.
type heartbeatCmd struct {
	hubFlags

	Top   int           `default:"5" help:"Number of processes to report, by highest CPU use."`
	PID   []int32       `name:"pid" help:"Report this process instead; may be repeated."`
	Every time.Duration `default:"1s" help:"Interval between heartbeats."`
}

// Run publishes heartbeats until ctx ends.
func (cmd *heartbeatCmd) Run(ctx context.Context, std streams) error {
	switch {
	case cmd.Every < 10*time.Millisecond:
		return errors.New("--every must be at least 10ms")
	case cmd.Top < 1:
		return errors.New("--top must be at least 1")
	}
	top := cmd.Top
	if len(cmd.PID) > 0 {
		top = 0
	}
	watch, err := newProcessWatch(ctx, top, cmd.PID)
	if err != nil {
		return err
	}
	c, err := cmd.connect(ctx, std.say)
	if err != nil {
		return err
	}
	std.say(fmt.Sprintf("publishing heartbeats to %s every %v", process.TopicHeartbeat, cmd.Every))
	err = publishHeartbeats(ctx, watch, cmd.Every, func(ctx context.Context, payload []byte) error {
		_, err := c.Publish(ctx, process.TopicHeartbeat, json.RawMessage(payload), eventhub.PublishOptions{})
		failure, ok := errors.AsType[*eventhub.Error](err)
		if ok && (failure.Retryable || failure.Code == eventhub.CodeOutcomeUnknown) && ctx.Err() == nil {
			std.say(err.Error() + "; going on")
			return nil
		}
		return err
	})
	return errors.Join(err, closeClient(ctx, c))
}

// publishHeartbeats publishes a heartbeat of each watched process, immediately and then at every
// interval, until ctx ends or a publish fails.
func publishHeartbeats(ctx context.Context, watch *processWatch, every time.Duration, publish func(context.Context, []byte) error) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		beats, err := watch.read(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		for _, h := range beats {
			payload, err := json.Marshal(h)
			if err != nil {
				return fmt.Errorf("encode heartbeat: %w", err)
			}
			if err := publish(ctx, payload); err != nil && ctx.Err() == nil {
				return fmt.Errorf("publish to %s: %w", process.TopicHeartbeat, err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}
