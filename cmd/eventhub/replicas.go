package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"eventhub/jetstream"
)

// replicasCmd is `eventhub topics replicas`.
type replicasCmd struct {
	storeFlags

	Count int `arg:"" name:"count" help:"Copies of each stream, 1 to 5."`
}

// Run changes the number of copies of every stream of the hubs, one after the other.
func (cmd *replicasCmd) Run(ctx context.Context, std streams) error {
	if cmd.NATSURL == "" {
		return errors.New("copies need a cluster; set its address (--nats-url, NATS_URL)")
	}
	return cmd.with(ctx, std, false, func(bus *jetstream.Bus) error {
		changes, err := bus.Admin().NATS().PlanReplicas(ctx, cmd.Count)
		if err != nil {
			return err
		}
		for i, c := range changes {
			began := time.Now()
			if err := bus.Admin().NATS().SetReplicas(ctx, c); err != nil {
				return fmt.Errorf("%w; %d of %d streams are changed, repeat the command to go on", err, i, len(changes))
			}
			if _, err := fmt.Fprintf(std.out, "%s: %d to %d, in %v\n", c.Stream, c.Have, c.Want, time.Since(began).Round(time.Millisecond)); err != nil {
				return &outputError{err}
			}
		}
		_, err = io.WriteString(std.out, "all streams have "+copiesText(cmd.Count)+"; set EVENTHUB_REPLICAS for new ones\n")
		return err
	})
}

// copiesText is a number of copies, for people.
func copiesText(n int) string {
	if n == 1 {
		return "1 copy"
	}
	return fmt.Sprintf("%d copies", n)
}
