package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"eventhub/sdk/go/wire"
)

// Sub is `eventhub bench sub`.
type Sub struct {
	load
	rounds

	Via      string        `default:"ws" enum:"ws,native,native-ws" help:"Way to reach the stream: ${enum}."`
	Group    string        `default:"bench" help:"Group, with the connections as members."`
	GroupTTL time.Duration `name:"group-ttl" help:"Use a group in memory that is deleted after this time without a member. Default: a durable group."`
	Fill     string        `default:"own" enum:"own,ws,native" help:"Publisher of the events: own uses the measured side, so that nats.go reads what nats.go wrote; ws and native use the same publisher for both sides."`
	Live     bool          `help:"Publish nothing and wait for --n new events from other publishers, such as eventhub bench pub in another terminal."`

	version wire.SchemaVersion // in which events come

	AckBatch int `name:"payload-ack-batch" help:"Over WebSocket: maximum number of events acknowledged by one frame. Default: one frame per event."`
}

// Help returns the detailed help text.
func (*Sub) Help() string {
	return `Measures deliveries per second of stored events, each acknowledged individually. The time ends when the
server has processed the acknowledgements or, without native access, when the hub has accepted them. The quantiles
show the age of events at delivery, which for stored events mostly reflects when they were published.

  eventhub bench sub --compare native
  eventhub bench sub --payload-ack-batch 256
  eventhub bench sub --url ws://127.0.0.1:8090 --live --n 1000`
}

// Run runs the benchmark.
func (cmd *Sub) Run(ctx context.Context, env Env, target *Target) error {
	switch {
	case cmd.AckBatch < 0 || cmd.AckBatch > 1000:
		return fmt.Errorf("--payload-ack-batch %d: must be 0 to 1000", cmd.AckBatch)
	case cmd.GroupTTL != 0 && cmd.GroupTTL < time.Second:
		return fmt.Errorf("--group-ttl %v: must be at least 1s", cmd.GroupTTL)
	case cmd.Live && (target.URL == "" || cmd.Compare != "" || cmd.Rounds > 1 || isNative(cmd.Via)):
		return errors.New("--live waits for events of other publishers, so it requires --url and excludes --compare, --rounds and a native --via")
	}
	return measure(ctx, env, target, plan{name: "sub", sides: cmd.sidesOf(cmd.Via), rounds: &cmd.rounds, load: &cmd.load, metrics: throughputSet}, func(b *run) roundFunc {
		return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
			if cmd.Live {
				return cmd.round(ctx, b, s.via, topic, newCount(n))
			}
			if err := cmd.fill(ctx, b, s.via, topic, n); err != nil {
				return nil, fmt.Errorf("fill the topic: %w", err)
			}
			return cmd.round(ctx, b, s.via, topic, newTally(n))
		}
	})
}

// fillWindow is the maximum number of bytes in flight while a topic is filled. A server that waits
// for its disk refuses more than 128 MiB.
const fillWindow = 64 << 20

// fill stores events 0 to n-1.
func (cmd *Sub) fill(ctx context.Context, b *run, via, topic string, n int) error {
	by := via
	if cmd.Fill != "own" {
		by = cmd.Fill
	}
	if by != via && isNative(via) && b.sys.native.url != b.sys.natsURL {
		return errors.New("the hub cannot publish to the separate nats-server; leave out --fill or set --external-nats")
	}
	before, err := b.prepare(ctx, by, topic)
	if err != nil {
		return err
	}
	if before > 0 {
		return fmt.Errorf("topic %s already holds %d events; choose another (--topic) or use --live", topic, before)
	}
	p, err := b.openPublishers(ctx, by, cmd.Connections, publishing{
		topic: topic, inFlight: max(1, min(256, fillWindow/cmd.Size/cmd.Connections)), batch: 1, native: "inbox",
	})
	if err != nil {
		return err
	}
	defer p.close()
	if err := p.flatOut(ctx, n, cmd.Size, ids{}); err != nil {
		return err
	}
	return b.verifyStored(ctx, by, topic, n)
}

// round reads the topic.
func (cmd *Sub) round(ctx context.Context, b *run, via, topic string, t *tally) (*Result, error) {
	from := "earliest"
	if cmd.Live {
		from = "latest"
	}
	m, err := b.sys.newMeter(via)
	if err != nil {
		return nil, err
	}
	ages := newTimes(cmd.Connections)
	members, err := b.openSubscribers(ctx, via, cmd.Connections, func(i int) subscribing {
		return subscribing{
			topic: topic, group: cmd.Group, from: from, inFlight: cmd.InFlight, ackBatch: cmd.AckBatch, ttl: cmd.GroupTTL, version: cmd.version,
			handle: cmd.handler(ages[i]), counted: t.mark, failed: t.failed,
		}
	})
	if err != nil {
		return nil, err
	}
	defer members.close()
	if err := waitAll(ctx, nil, t); err != nil {
		return nil, err
	}
	if err := b.settleAll(ctx, via, topic, members); err != nil {
		return nil, err
	}
	result := &Result{N: int(t.want), Redelivered: t.again.Load(), backlog: !cmd.Live}
	if err := m.stop(int(t.want), result); err != nil {
		return nil, err
	}
	members.close() // stop handlers that still receive events from other publishers
	result.Quantiles = newQuantiles(ages...)
	return result, nil
}

// handler returns a handler that records the age of events.
func (cmd *Sub) handler(age *hdrhistogram.Histogram) func([]byte, int64) (int, error) {
	if cmd.Live {
		return func(_ []byte, stored int64) (int, error) {
			record(age, time.Now().UnixNano()-stored*int64(time.Millisecond))
			return 0, nil
		}
	}
	return stamped(age)
}

// stamped returns a handler that records the time since each event was due.
func stamped(age *hdrhistogram.Histogram) func([]byte, int64) (int, error) {
	return func(payload []byte, _ int64) (int, error) {
		seq, at, err := readStamp(payload)
		if err == nil {
			record(age, now()-at)
		}
		return seq, err
	}
}

// newTimes returns n histograms, one per goroutine.
func newTimes(n int) []*hdrhistogram.Histogram {
	all := make([]*hdrhistogram.Histogram, n)
	for i := range all {
		all[i] = newHistogram()
	}
	return all
}

// subscribers are the group members of a round.
type subscribers []subscriber

// openSubscribers connects n members. how returns the configuration of member i.
func (b *run) openSubscribers(ctx context.Context, via string, n int, how func(i int) subscribing) (subscribers, error) {
	var all subscribers
	for i := range n {
		s, err := b.sys.newSubscriber(ctx, via, how(i))
		if err != nil {
			all.close()
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// close disconnects the members and waits for their handlers. All events have been settled before.
// It may be called more than once.
func (s subscribers) close() {
	for _, one := range s {
		_ = one.close()
	}
}

// settleAll waits until the acknowledgements are processed, according to the server if it is
// accessible natively, otherwise according to the hub.
func (b *run) settleAll(ctx context.Context, via, topic string, members subscribers) error {
	a, err := b.sys.admin(via)
	if err != nil {
		return err
	}
	if a != nil && !b.exact {
		return a.settled(ctx, topic)
	}
	for _, s := range members {
		if err := s.settle(ctx); err != nil {
			return fmt.Errorf("settle acknowledgements: %w", err)
		}
	}
	return nil
}
