package bench

import (
	"context"
	"errors"
	"fmt"
	"net/url"
)

// Ways to reach the stream from Node.
const (
	viaSDK    = "sdk"     // the TypeScript client of this repository
	viaNode   = "node"    // JSON frames over the hub's WebSocket
	viaNATSJS = "nats.js" // nats.js over the WebSocket listener of a nats-server
)

// Node is `eventhub bench node`.
type Node struct {
	Pub nodePub `cmd:"" help:"Measure publishing, in confirmed events per second."`
	Sub nodeSub `cmd:"" help:"Measure delivery with acknowledgement, in events per second."`
}

// Help returns the detailed help text.
func (*Node) Help() string {
	return `Compares two Node clients in alternating rounds: the TypeScript client of sdk/ with the hub, and nats.js with a nats-server, both
over WebSocket. With --plain, hand-written JSON frames replace the TypeScript client. Each client is one process with all its
connections. This requires Node 20 or newer, npm ci in the directory of the scripts, and npm ci and npm run build in sdk.

The embedded server of a hub has no WebSocket listener. nats.js gets a separate nats-server with the same settings,
and with the cache of subjects that nats-server has by default, or uses the one of --external-nats.

  eventhub bench node pub
  eventhub bench node sub`
}

// nodeRounds holds the flags of both Node benchmarks.
type nodeRounds struct {
	load

	Rounds  int    `default:"7" help:"Rounds of each side, after a warm-up round."`
	WarmUp  int    `name:"warm-up" default:"20000" help:"Maximum number of events of the warm-up round; 0 for no warm-up."`
	Plain   bool   `help:"Send hand-written JSON frames to the hub, instead of using the TypeScript client."`
	Scripts string `default:"cmd/eventhub/bench/node" type:"path" help:"Directory of the Node scripts, in a checkout of the sources."`
}

// nodePub is `eventhub bench node pub`.
type nodePub struct {
	nodeRounds

	NoAsyncTraces bool `name:"no-async-traces" help:"Open nats.js with noAsyncTraces, so that it prepares no stack trace for each request."`
}

// Run runs the benchmark.
func (cmd *nodePub) Run(ctx context.Context, env Env, target *Target) error {
	return cmd.measure(ctx, env, target, "pub", func(ctx context.Context, b *run, s *script, via, topic string, n int) (*Result, error) {
		before, err := b.prepare(ctx, via, topic)
		if err != nil {
			return nil, err
		}
		request, err := cmd.request(b, via, topic, n)
		if err != nil {
			return nil, err
		}
		request.NoAsyncTraces = cmd.NoAsyncTraces
		result := &Result{Published: n}
		if err := b.runScript(ctx, s, via, request, n, result, nil); err != nil {
			return nil, err
		}
		return result, b.verifyStored(ctx, via, topic, before+n)
	})
}

// nodeSub is `eventhub bench node sub`.
type nodeSub struct {
	nodeRounds

	Group    string `default:"bench" help:"Group, with the connections as members."`
	AckBatch int    `name:"payload-ack-batch" default:"128" help:"With --plain: maximum number of events acknowledged by one frame. nats.js sends one message per event."`
}

// Run runs the benchmark.
func (cmd *nodeSub) Run(ctx context.Context, env Env, target *Target) error {
	if cmd.AckBatch < 1 || cmd.AckBatch > 1000 {
		return fmt.Errorf("--payload-ack-batch %d: must be 1 to 1000", cmd.AckBatch)
	}
	return cmd.measure(ctx, env, target, "sub", func(ctx context.Context, b *run, s *script, via, topic string, n int) (*Result, error) {
		if err := cmd.fill(ctx, b, via, topic, n); err != nil {
			return nil, fmt.Errorf("fill the topic: %w", err)
		}
		request, err := cmd.request(b, via, topic, n)
		if err != nil {
			return nil, err
		}
		request.Group, request.AckBatch = cmd.Group, cmd.AckBatch
		if isNative(via) {
			request.Group = objectName(cmd.Group)
		}
		result := &Result{N: n}
		return result, b.runScript(ctx, s, via, request, n, result, func() error { return b.settleAll(ctx, via, topic, nil) })
	})
}

// fill stores events 0 to n-1 with Go clients of the same side. On the native side, it also creates
// the group.
func (cmd *nodeSub) fill(ctx context.Context, b *run, via, topic string, n int) error {
	filler, by := Sub{load: cmd.load, Fill: "own"}, viaWS
	if isNative(via) {
		by = viaNative
	}
	err := filler.fill(ctx, b, by, topic, n)
	if err != nil || !isNative(via) {
		return err
	}
	a, err := b.sys.admin(via)
	if err == nil {
		_, err = a.js.CreateConsumer(ctx, objectName(topic), consumerConfig(cmd.Group, 0))
	}
	return err
}

// nodeRound runs one round of a side with a running script.
type nodeRound func(ctx context.Context, b *run, s *script, via, topic string, n int) (*Result, error)

func (r *nodeRounds) measure(ctx context.Context, env Env, target *Target, kind string, once nodeRound) (err error) {
	if err := findNode(r.Scripts); err != nil {
		return err
	}
	scripts := make(map[string]*script) // keyed by side
	defer func() {
		for _, s := range scripts {
			// after an interruption, the script's error adds nothing
			if failed := s.close(); ctx.Err() == nil {
				err = errors.Join(err, failed)
			}
		}
	}()
	hub := viaSDK
	if r.Plain {
		hub = viaNode
	}
	p := plan{
		name: "node " + kind, sides: []side{{via: hub}, {via: viaNATSJS}}, load: &r.load, metrics: throughputSet,
		rounds: &rounds{Rounds: r.Rounds, WarmUp: r.WarmUp},
	}
	return measure(ctx, env, target, p, func(b *run) roundFunc {
		return func(ctx context.Context, of side, topic string, n int) (*Result, error) {
			s := scripts[of.via]
			if s == nil {
				var err error
				if s, err = startScript(ctx, r.Scripts, of.via, kind); err != nil {
					return nil, err
				}
				scripts[of.via] = s
			}
			return once(ctx, b, s, of.via, topic, n)
		}
	})
}

// request returns the parameters of a round for a script.
func (r *nodeRounds) request(b *run, via, topic string, n int) (*scriptRequest, error) {
	at := b.sys.wsURL
	if isNative(via) {
		u, err := url.Parse(b.sys.native.wsURL)
		if err != nil {
			return nil, fmt.Errorf("parse NATS URL %s: %w", redact(b.sys.native.wsURL), err)
		}
		u.User = nil // nats.js takes the token separately
		at = u.String()
	}
	return &scriptRequest{
		URL: at, Token: b.sys.token, Topic: topic, Subject: eventSubject(topic), Stream: objectName(topic),
		N: n, Size: r.Size, Connections: r.Connections, InFlight: r.InFlight,
	}, nil
}

// runScript measures a script from the time its connections are open until it is done and, if
// settled is not nil, settled returns.
func (b *run) runScript(ctx context.Context, s *script, via string, request *scriptRequest, n int, result *Result, settled func() error) error {
	request.Do = "open"
	if err := s.ask(ctx, request); err != nil {
		return err
	}
	m, err := b.sys.newMeterOf(via, s.cmd.Process.Pid)
	if err != nil {
		return err
	}
	if err := s.ask(ctx, &scriptRequest{Do: "run"}); err != nil {
		return err
	}
	if settled != nil {
		if err := settled(); err != nil {
			return err
		}
	}
	if err := m.stop(n, result); err != nil {
		return err
	}
	return s.ask(ctx, &scriptRequest{Do: "close"})
}
