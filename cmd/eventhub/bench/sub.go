package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Sub is `eventhub bench sub`.
type Sub struct {
	load
	rounds

	Via      string        `default:"ws" enum:"ws,native,native-ws" help:"The way to the stream: ${enum}."`
	Group    string        `default:"bench" help:"The group; the connections are its members."`
	GroupTTL time.Duration `name:"group-ttl" help:"Use a group that disappears when it has had no member for so long; it is kept in memory. Default: a durable one."`
	Fill     string        `default:"own" enum:"own,ws,native" help:"Who publishes the events: own is the side that is measured, so that nats.go reads what nats.go wrote; ws and native are the same for both."`
	Live     bool          `help:"Publish nothing: wait for --n events that others publish from now on, such as eventhub bench pub in another terminal."`

	AckBatch int `name:"payload-ack-batch" help:"Over WebSocket: acknowledge up to so many events with one frame. Default: one frame for each."`
}

// Help is shown by --help.
func (*Sub) Help() string {
	return `Measures deliveries a second of events that were stored before, each acknowledged on its own. The time ends when the
server has worked off the acks, where that can be seen natively, and else when the hub has taken them. The quantiles are
those of an event's age at its delivery, which with stored events mostly says how long ago they were published.

  eventhub bench sub --compare native
  eventhub bench sub --payload-ack-batch 256
  eventhub bench sub --url ws://127.0.0.1:8090 --live --n 1000`
}

// Run measures.
func (cmd *Sub) Run(ctx context.Context, env Env, target *Target) error {
	switch {
	case cmd.AckBatch < 0 || cmd.AckBatch > 1000:
		return fmt.Errorf("--payload-ack-batch %d: 0 to 1000 are allowed", cmd.AckBatch)
	case cmd.GroupTTL != 0 && cmd.GroupTTL < time.Second:
		return fmt.Errorf("--group-ttl %v: it must be at least 1s", cmd.GroupTTL)
	case cmd.Live && (target.URL == "" || cmd.Compare != "" || cmd.Rounds > 1 || isNative(cmd.Via)):
		return errors.New("--live waits for what others publish to one running hub: give --url, and no --compare, --rounds or --via")
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

// fillWindow bounds the bytes in flight while a topic is filled: a server that waits for its disk refuses more than 128 MiB.
const fillWindow = 64 << 20

// fill stores events 0 to n-1.
func (cmd *Sub) fill(ctx context.Context, b *run, via, topic string, n int) error {
	by := via
	if cmd.Fill != "own" {
		by = cmd.Fill
	}
	if by != via && isNative(via) && b.sys.native.url != b.sys.natsURL {
		return errors.New("the hub cannot publish to a nats-server of its own: leave --fill, or give --external-nats")
	}
	before, err := b.prepare(ctx, by, topic)
	if err != nil {
		return err
	}
	if before > 0 {
		return fmt.Errorf("topic %s holds %d events already: choose another (--topic), or --live", topic, before)
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
			topic: topic, group: cmd.Group, from: from, inFlight: cmd.InFlight, ackBatch: cmd.AckBatch, ttl: cmd.GroupTTL,
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
	members.close() // they may still get what others publish
	result.Quantiles = newQuantiles(ages...)
	return result, nil
}

// handler records the age of events.
func (cmd *Sub) handler(age *hdrhistogram.Histogram) func([]byte, int64) (int, error) {
	if cmd.Live {
		return func(_ []byte, stored int64) (int, error) {
			record(age, time.Now().UnixNano()-stored*int64(time.Millisecond))
			return 0, nil
		}
	}
	return stamped(age)
}

// stamped records how long ago events were due.
func stamped(age *hdrhistogram.Histogram) func([]byte, int64) (int, error) {
	return func(payload []byte, _ int64) (int, error) {
		seq, at, err := readStamp(payload)
		if err == nil {
			record(age, now()-at)
		}
		return seq, err
	}
}

// newTimes makes a histogram for each of n goroutines.
func newTimes(n int) []*hdrhistogram.Histogram {
	all := make([]*hdrhistogram.Histogram, n)
	for i := range all {
		all[i] = newHistogram()
	}
	return all
}

// subscribers are the members of a round.
type subscribers []subscriber

// openSubscribers connects n members; how says what the one with a number does.
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

// close disconnects, and waits for the handlers. What matters has been settled before. It may be called twice.
func (s subscribers) close() {
	for _, one := range s {
		_ = one.close()
	}
}

// settleAll returns when the acks are worked off: as the server says where it can be asked, and else as the hub does.
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
			return fmt.Errorf("the acks were not taken: %w", err)
		}
	}
	return nil
}
