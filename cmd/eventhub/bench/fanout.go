package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/nats-io/nats.go"
)

// Fanout is `eventhub bench fanout`.
type Fanout struct {
	load
	rounds

	Via      string        `default:"ws" enum:"ws,native,native-ws" help:"Way to reach the stream: ${enum}."`
	Groups   int           `default:"100" help:"Groups with one member each. Over WebSocket, each member has a separate connection."`
	Rate     float64       `help:"Events published per second, on schedule, with latency measured from the time each event was due. Default: as fast as --in-flight allows."`
	GroupTTL time.Duration `name:"group-ttl" help:"Use groups in memory that are deleted after this time without a member. Default: durable groups."`
	Baseline int           `name:"baseline-groups" help:"Compare with this number of groups on the same side."`

	PublishInFlight   int `name:"publish-in-flight" help:"Maximum number of unconfirmed publishes. A small number keeps the groups near the end of the stream; a large one builds up a backlog, which is delivered in bulk. Default: --in-flight."`
	NativeConnections int `name:"native-connections" default:"4" help:"Connections shared by native members."`
}

// Help returns the detailed help text.
func (*Fanout) Help() string {
	return `Measures one publisher and several groups. Each group receives and acknowledges every event. --n counts deliveries, so --n divided
by --groups events are published. The time ends when the server has processed all acknowledgements. --connections is not
used.

  eventhub bench fanout --groups 1000 --compare native
  eventhub bench fanout --groups 1000 --group-ttl 1m --baseline-groups 2`
}

// Run runs the benchmark.
func (cmd *Fanout) Run(ctx context.Context, env Env, target *Target) error {
	switch {
	case cmd.Groups < 1 || cmd.Groups > maxGroups || cmd.Baseline < 0 || cmd.Baseline > maxGroups:
		return fmt.Errorf("--groups and --baseline-groups must be 1 to %d", maxGroups)
	case cmd.Rate < 0:
		return fmt.Errorf("--rate %v: must not be negative", cmd.Rate)
	case cmd.PublishInFlight < 0 || cmd.PublishInFlight > 10_000:
		return fmt.Errorf("--publish-in-flight %d: must be 1 to 10000", cmd.PublishInFlight)
	case cmd.NativeConnections < 1:
		return errors.New("--native-connections must be at least 1")
	case cmd.GroupTTL != 0 && cmd.GroupTTL < time.Second:
		return fmt.Errorf("--group-ttl %v: must be at least 1s", cmd.GroupTTL)
	case cmd.Baseline > 0 && cmd.Compare != "":
		return errors.New("--baseline-groups excludes --compare")
	}
	sides := cmd.sidesOf(cmd.Via)
	if cmd.Baseline > 0 {
		sides = append(sides, side{via: cmd.Via, groups: cmd.Baseline})
	}
	sides[0].groups = cmd.Groups
	if cmd.Compare != "" {
		sides[1].groups = cmd.Groups
	}
	if err := allowFiles(cmd.Groups + spareFiles); err != nil {
		return err
	}
	metrics := throughputSet
	if cmd.Rate > 0 {
		metrics = latencySet
	}
	return measure(ctx, env, target, plan{name: "fanout", sides: sides, rounds: &cmd.rounds, load: &cmd.load, metrics: metrics}, func(b *run) roundFunc {
		return func(ctx context.Context, s side, topic string, n int) (*Result, error) {
			return cmd.round(ctx, b, s, topic, max(1, n/s.groups))
		}
	})
}

// maxGroups is the maximum number of groups.
const maxGroups = 10_000

// round publishes events and counts them in every group.
func (cmd *Fanout) round(ctx context.Context, b *run, s side, topic string, events int) (*Result, error) {
	before, err := b.prepare(ctx, s.via, topic)
	if err != nil {
		return nil, err
	}
	if before > 0 {
		return nil, fmt.Errorf("topic %s already holds %d events; choose another (--topic)", topic, before)
	}
	p, err := b.openPublishers(ctx, s.via, 1, publishing{
		topic: topic, inFlight: cmp.Or(cmd.PublishInFlight, cmd.InFlight), batch: 1, native: "inbox",
	})
	if err != nil {
		return nil, err
	}
	defer p.close()

	times := &sharedTimes{all: newTimes(8)}
	failed := make(chan error, 1)
	tallies := make([]*tally, s.groups)
	how := func(i int) subscribing {
		t := newTally(events)
		t.fail, tallies[i] = failed, t
		return subscribing{
			topic: topic, group: fmt.Sprintf("bench-%d", i), from: "earliest", inFlight: cmd.InFlight, ttl: cmd.GroupTTL,
			handle: times.stamped(i), counted: t.mark, failed: t.failed,
		}
	}
	members, closeConns, err := cmd.join(ctx, b, s, how)
	if err != nil {
		return nil, err
	}
	defer closeConns()
	defer members.close()

	m, err := b.sys.newMeter(s.via)
	if err != nil {
		return nil, err
	}
	late := newHistogram()
	if cmd.Rate > 0 {
		err = p.onSchedule(ctx, events, cmd.Size, cmd.Rate, ids{}, late)
	} else {
		err = p.flatOut(ctx, events, cmd.Size, ids{})
	}
	if err != nil {
		return nil, err
	}
	if err := waitAll(ctx, failed, tallies...); err != nil {
		return nil, err
	}
	if err := b.settleAll(ctx, s.via, topic, members); err != nil {
		return nil, err
	}
	result := &Result{Published: events, N: events * s.groups, backlog: cmd.Rate == 0}
	for _, t := range tallies {
		result.Redelivered += t.again.Load()
	}
	if err := m.stop(result.N, result); err != nil {
		return nil, err
	}
	result.Quantiles = newQuantiles(times.all...)
	if cmd.Rate > 0 {
		result.Late = newQuantiles(late).P99
	}
	return result, b.verifyStored(ctx, s.via, topic, events)
}

// join creates the groups and their members.
func (cmd *Fanout) join(ctx context.Context, b *run, s side, how func(i int) subscribing) (members subscribers, closeConns func(), err error) {
	if !isNative(s.via) {
		members, err = b.openSubscribers(ctx, s.via, s.groups, how)
		return members, func() {}, err
	}
	var conns []*nats.Conn
	closeConns = func() {
		for _, nc := range conns {
			nc.Close()
		}
	}
	for range min(cmd.NativeConnections, s.groups) {
		nc, err := b.sys.connect(s.via)
		if err != nil {
			closeConns()
			return nil, nil, err
		}
		conns = append(conns, nc)
	}
	for i := range s.groups {
		member, err := consume(ctx, conns[i%len(conns)], how(i))
		if err != nil {
			members.close()
			closeConns()
			return nil, nil, err
		}
		members = append(members, member)
	}
	return members, closeConns, nil
}

// sharedTimes are histograms shared by many goroutines, because each histogram takes 200 KiB.
type sharedTimes struct {
	mu  [8]sync.Mutex
	all []*hdrhistogram.Histogram
}

// stamped returns a handler that records the time since each event was due.
func (s *sharedTimes) stamped(i int) func([]byte, int64) (int, error) {
	i %= len(s.all)
	return func(payload []byte, _ int64) (int, error) {
		seq, at, err := readStamp(payload)
		if err == nil {
			took := now() - at
			s.mu[i].Lock()
			record(s.all[i], took)
			s.mu[i].Unlock()
		}
		return seq, err
	}
}
