package bench

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	psutil "github.com/shirou/gopsutil/v4/process"
)

const (
	// spareFiles is the maximum number of files that a process has open besides its connections.
	spareFiles = 1000
	// dialing is the number of connections opened at a time.
	dialing = 32
	// membersPerGroup is the maximum number of members of a group, because the server limits the
	// pull requests that wait at a consumer.
	membersPerGroup = 1000
	// groupsPerTopic is the server's limit on consumers per stream.
	groupsPerTopic = 1000
)

// Memory counts as settled when settleSamples samples, taken settleEvery apart, differ by at most
// the fraction settleBand.
const (
	settleEvery   = 500 * time.Millisecond
	settleSamples = 8
	settleBand    = 0.005
)

// Connections is `eventhub bench connections`.
type Connections struct {
	N         int           `env:"N" default:"1000" help:"Connections."`
	Via       string        `default:"ws" enum:"ws,native,native-ws" help:"Kind of connection: ${enum}."`
	Subscribe bool          `help:"Subscribe each connection to --topic, to which nothing is published."`
	Topic     string        `env:"TOPIC" default:"bench.topic" help:"Topic of the subscriptions."`
	Groups    int           `help:"Groups of the subscriptions, 1,000 per topic. Default: one per 1,000 connections."`
	GroupTTL  time.Duration `name:"group-ttl" help:"Use groups that are deleted after this time without a member. Default: durable groups."`
	For       time.Duration `default:"10s" help:"Duration of the idle CPU measurement."`
	Settle    time.Duration `default:"30s" help:"Maximum time for memory to settle. Go collects garbage at least every two minutes; 150s includes that."`
}

// Idle is the cost of idle connections.
type Idle struct {
	Via         string `json:"via"`
	Connections int    `json:"connections"`
	Subscribed  bool   `json:"subscribed"`
	// MS is the time to open all connections, in milliseconds.
	MS float64 `json:"ms"`
	// Memory is the resident memory of all servers together. Settled is false if memory was still
	// changing after --settle.
	BeforeKiB        float64 `json:"before_rss_kib"`
	AfterKiB         float64 `json:"after_rss_kib"`
	KiBPerConnection float64 `json:"rss_kib_per_connection"`
	Settled          bool    `json:"settled"`
	// HubKiB and NATSKiB are the shares of the hub and of the nats-servers, if those are separate
	// processes.
	HubKiB  float64 `json:"hub_rss_kib_per_connection,omitempty"`
	NATSKiB float64 `json:"nats_rss_kib_per_connection,omitempty"`
	// CPU is the CPU use of the servers in percent of one core.
	CPU float64 `json:"idle_cpu_percent"`
}

// Help returns the detailed help text.
func (*Connections) Help() string {
	return `Opens idle connections and measures the resident memory of the servers before and after, each time once it has settled,
then their CPU use. Before the first measurement, the hub serves a few connections.

  eventhub bench connections --n 10000
  eventhub bench connections --n 10000 --subscribe --settle 150s
  eventhub bench connections --n 10000 --subscribe --groups 10000 --group-ttl 1m
  eventhub bench connections --n 10000 --subscribe --external-nats
  eventhub bench connections --n 10000 --via native-ws`
}

// Run runs the benchmark.
func (cmd *Connections) Run(ctx context.Context, env Env, target *Target) (err error) {
	if cmd.Groups == 0 {
		cmd.Groups = (cmd.N + membersPerGroup - 1) / membersPerGroup
	}
	switch {
	case cmd.N < 1 || cmd.N > 1_000_000:
		return fmt.Errorf("--n %d: must be 1 to 1000000", cmd.N)
	case cmd.Groups < 1 || cmd.Groups > cmd.N:
		return fmt.Errorf("--groups %d: must be 1 to the number of connections", cmd.Groups)
	case cmd.GroupTTL != 0 && cmd.GroupTTL < time.Second:
		return fmt.Errorf("--group-ttl %v: must be at least 1s", cmd.GroupTTL)
	case cmd.For < 100*time.Millisecond:
		return fmt.Errorf("--for %v: must be at least 100ms", cmd.For)
	case target.URL != "" && target.HubPID == 0 && !isNative(cmd.Via):
		return errors.New("--url requires --hub-pid to measure the memory of the hub")
	}
	if err := errors.Join(target.validate(), allowFiles(cmd.N+spareFiles)); err != nil {
		return err
	}
	sys, err := openSystem(ctx, env, target, needsOf([]side{{via: cmd.Via}}))
	if err != nil {
		return err
	}
	defer func() { err = ended(ctx, err, sys) }()
	b := &run{env: env, target: target, sys: sys}
	idle, err := cmd.measure(ctx, b)
	if err != nil {
		return err
	}
	if target.JSON {
		return printJSON(env.Out, idle)
	}
	with, moving, apart := "", "", ""
	if idle.Subscribed {
		with = " with a subscription"
	}
	if !idle.Settled {
		moving = " (still moving)"
	}
	if idle.NATSKiB != 0 {
		apart = fmt.Sprintf(", of which the hub has %.1f and NATS %.1f", idle.HubKiB, idle.NATSKiB)
	}
	_, err = fmt.Fprintf(env.Out, "%s  %d connections%s, opened in %.0f ms: %.1f KiB resident each (%.1f to %.1f MiB)%s%s, idle CPU %.2f %% of a core\nmeasured: %s\n",
		idle.Via, idle.Connections, with, idle.MS, idle.KiBPerConnection, idle.BeforeKiB/1024, idle.AfterKiB/1024, moving, apart, idle.CPU,
		sys.describe(side{via: cmd.Via}))
	return err
}

func (cmd *Connections) measure(ctx context.Context, b *run) (*Idle, error) {
	servers, err := b.sys.servers(cmd.Via)
	if err != nil {
		return nil, err
	}
	if cmd.Subscribe {
		for group := 0; group < cmd.Groups; group += groupsPerTopic {
			if _, err := b.prepare(ctx, cmd.Via, cmd.topicOf(group)); err != nil {
				return nil, err
			}
		}
	}
	// A few connections first, to exclude memory that all connections share.
	first, err := cmd.open(ctx, b, min(cmd.N, dialing))
	if err != nil {
		return nil, err
	}
	first.close()
	idle := &Idle{Via: cmd.Via, Connections: cmd.N, Subscribed: cmd.Subscribe}
	defer b.progress(fmt.Sprintf("%d connections, %s", cmd.N, cmd.Via))()
	if idle.BeforeKiB, _, err = settledKiB(ctx, servers, cmd.Settle); err != nil {
		return nil, err
	}
	hubBefore, err := residentKiB(servers[:1])
	if err != nil {
		return nil, err
	}
	begin := time.Now()
	all, err := cmd.open(ctx, b, cmd.N)
	if err != nil {
		return nil, err
	}
	defer all.close()
	idle.MS = round(float64(time.Since(begin))/1e6, 1)
	if idle.AfterKiB, idle.Settled, err = settledKiB(ctx, servers, cmd.Settle); err != nil {
		return nil, err
	}
	idle.KiBPerConnection = round((idle.AfterKiB-idle.BeforeKiB)/float64(cmd.N), 2)
	if len(servers) > 1 && !isNative(cmd.Via) {
		hubAfter, err := residentKiB(servers[:1]) // the hub comes first
		if err != nil {
			return nil, err
		}
		idle.HubKiB = round((hubAfter-hubBefore)/float64(cmd.N), 2)
		idle.NATSKiB = round(idle.KiBPerConnection-idle.HubKiB, 2)
	}
	if idle.CPU, err = idleCPU(ctx, servers, cmd.For); err != nil {
		return nil, err
	}
	return idle, all.alive()
}

// idleCPU returns the CPU use of the servers over a period, in percent of one core.
func idleCPU(ctx context.Context, servers []*psutil.Process, over time.Duration) (float64, error) {
	before, err := cpuSeconds(servers...)
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	select {
	case <-time.After(over):
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	after, err := cpuSeconds(servers...)
	return round(100*(after-before)/time.Since(begin).Seconds(), 2), err
}

// settledKiB waits until the memory of the processes settles, at most for the given time, and
// returns it in KiB.
func settledKiB(ctx context.Context, servers []*psutil.Process, most time.Duration) (kib float64, settled bool, err error) {
	ticker := time.NewTicker(settleEvery)
	defer ticker.Stop()
	end := time.Now().Add(most)
	var samples []float64
	for {
		kib, err := residentKiB(servers)
		if err != nil {
			return 0, false, err
		}
		samples = append(samples, kib)
		if len(samples) > settleSamples {
			samples = samples[1:]
		}
		low, high := math.Inf(1), 0.0
		for _, s := range samples {
			low, high = min(low, s), max(high, s)
		}
		if settled := len(samples) == settleSamples && high-low <= settleBand*high; settled || time.Now().After(end) {
			return kib, settled, nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return 0, false, ctx.Err()
		}
	}
}

// idleConn is an idle connection.
type idleConn struct {
	close func()
	err   func() error
}

type idleConns []idleConn

func (c idleConns) close() {
	var wg sync.WaitGroup
	for i := range dialing {
		wg.Go(func() {
			for n := i; n < len(c); n += dialing {
				if c[n].close != nil {
					c[n].close()
				}
			}
		})
	}
	wg.Wait()
}

// alive returns an error if a connection has ended.
func (c idleConns) alive() error {
	for _, one := range c {
		if err := one.err(); err != nil {
			return fmt.Errorf("a connection ended: %w", err)
		}
	}
	return nil
}

// open opens n connections, several at a time. The caller must close them.
func (cmd *Connections) open(ctx context.Context, b *run, n int) (idleConns, error) {
	all := make(idleConns, n)
	errs := make([]error, dialing)
	var next atomic.Int64
	var wg sync.WaitGroup
	for i := range dialing {
		wg.Go(func() {
			for at := int(next.Add(1)) - 1; at < n && errs[i] == nil; at = int(next.Add(1)) - 1 {
				all[at], errs[i] = cmd.openOne(ctx, b, at)
			}
		})
	}
	wg.Wait()
	if err := firstOf(errs); err != nil {
		all.close()
		return nil, err
	}
	return all, nil
}

// topicOf returns the topic of a group.
func (cmd *Connections) topicOf(group int) string {
	if cmd.Groups <= groupsPerTopic {
		return cmd.Topic
	}
	return fmt.Sprintf("%s.%d", cmd.Topic, group/groupsPerTopic)
}

func (cmd *Connections) openOne(ctx context.Context, b *run, i int) (idleConn, error) {
	group := i % cmd.Groups
	how := subscribing{
		topic: cmd.topicOf(group), group: fmt.Sprintf("bench-%d", group), from: "latest", inFlight: 100, ttl: cmd.GroupTTL,
		handle: func([]byte, int64) (int, error) { return 0, nil }, counted: func(int) {}, failed: func(error) {},
	}
	if isNative(cmd.Via) {
		nc, err := b.sys.connect(cmd.Via)
		if err != nil {
			return idleConn{}, err
		}
		if cmd.Subscribe {
			if _, err := consume(ctx, nc, how); err != nil { // ends with the connection
				nc.Close()
				return idleConn{}, err
			}
		}
		return idleConn{close: nc.Close, err: func() error {
			if nc.Status() != nats.CONNECTED {
				return errors.Join(nats.ErrConnectionClosed, nc.LastError())
			}
			return nil
		}}, nil
	}
	if cmd.Subscribe {
		w, err := b.sys.newWSSubscriber(ctx, how)
		if err != nil {
			return idleConn{}, err
		}
		return idleConn{close: func() { _ = w.close() }, err: w.client.Err}, nil
	}
	c, err := b.sys.dial(ctx, 1)
	if err != nil {
		return idleConn{}, err
	}
	return idleConn{close: func() { _ = c.Close() }, err: c.Err}, nil
}
