package bench

import (
	"context"
	"errors"
	"fmt"
)

// Latency is `eventhub bench latency`.
type Latency struct {
	load
	rounds

	Via   string  `default:"ws" enum:"ws,native,native-ws" help:"Way to reach the stream: ${enum}."`
	Rate  float64 `default:"5000" help:"Events per second."`
	Group string  `default:"bench" help:"Group."`

	NativePublisher string `name:"native-publisher" default:"async" enum:"async,inbox" help:"How native clients publish."`
}

// Help returns the detailed help text.
func (*Latency) Help() string {
	return `Publishes on schedule, regardless of the answers (open loop), and measures from the time an event was due until its handler is
called. So if the hub stalls, the waiting time of every delayed event counts. Publishers and
subscribers have separate connections, --connections of each kind.

The embedded server of a hub has no WebSocket listener. --compare native-ws starts a nats-server as a separate process, or
uses the one of --external-nats.

  eventhub bench latency --compare native-ws --n 25000`
}

// Run runs the benchmark.
func (cmd *Latency) Run(ctx context.Context, env Env, target *Target) error {
	if cmd.Rate <= 0 {
		return errors.New("--rate must be positive")
	}
	return measure(ctx, env, target, plan{name: "latency", sides: cmd.sidesOf(cmd.Via), rounds: &cmd.rounds, load: &cmd.load, metrics: latencySet}, func(b *run) roundFunc {
		return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
			return cmd.round(ctx, b, s.via, topic, n)
		}
	})
}

func (cmd *Latency) round(ctx context.Context, b *run, via, topic string, n int) (*Result, error) {
	before, err := b.prepare(ctx, via, topic)
	if err != nil {
		return nil, err
	}
	if before > 0 {
		return nil, fmt.Errorf("topic %s already holds %d events; choose another (--topic)", topic, before)
	}
	t, times := newTally(n), newTimes(cmd.Connections)
	members, err := b.openSubscribers(ctx, via, cmd.Connections, func(i int) subscribing {
		return subscribing{
			topic: topic, group: cmd.Group, from: "earliest", inFlight: cmd.InFlight,
			handle: stamped(times[i]), counted: t.mark, failed: t.failed,
		}
	})
	if err != nil {
		return nil, err
	}
	defer members.close()
	p, err := b.openPublishers(ctx, via, cmd.Connections, publishing{topic: topic, inFlight: cmd.InFlight, batch: 1, native: cmd.NativePublisher})
	if err != nil {
		return nil, err
	}
	defer p.close()
	m, err := b.sys.newMeter(via)
	if err != nil {
		return nil, err
	}
	late := newHistogram()
	if err := p.onSchedule(ctx, n, cmd.Size, cmd.Rate, ids{}, late); err != nil {
		return nil, err
	}
	if err := waitAll(ctx, nil, t); err != nil {
		return nil, err
	}
	if err := b.settleAll(ctx, via, topic, members); err != nil {
		return nil, err
	}
	result := &Result{N: n, Redelivered: t.again.Load()}
	if err := m.stop(n, result); err != nil {
		return nil, err
	}
	result.Quantiles, result.Late = newQuantiles(times...), newQuantiles(late).P99
	return result, b.verifyStored(ctx, via, topic, n)
}
