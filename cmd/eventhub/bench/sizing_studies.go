package bench

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"eventhub/sdk/go/wire"
)

// Limits of a round in a study.
const (
	sizingBytes    = 512 << 20 // bytes stored
	sizingInFlight = 1024      // events in flight over all connections
	sizingWindow   = 32 << 20  // bytes in flight over all connections
	sizingEvents   = 400_000
	sizingTTL      = time.Minute
	fewConnections = 50 // with fewer connections, garbage collection hides their memory use
)

// loadOf returns the load of a round for a payload size and a number of connections.
func loadOf(size, connections int) load {
	inFlight := min(sizingInFlight, sizingWindow/size) / connections
	return load{Topic: "bench.sizing", Size: size, Connections: connections, InFlight: max(1, inFlight)}
}

// payload measures throughput by payload size, replicas, and sync mode.
func (z *sizer) payload(ctx context.Context) error {
	for _, d := range z.durabilities {
		err := z.with(ctx, func(t *Target) { t.Replicas, t.Sync = d.replicas, d.sync }, func(b *run) error {
			for _, size := range z.sizes {
				l := loadOf(size, 4)
				pub := &Pub{load: l, Batch: 1}
				sub := &Sub{load: l, Group: "bench", Fill: "own"}
				most := min(sizingEvents, sizingBytes/size)
				for _, op := range []struct {
					name string
					once roundFunc
				}{
					{"pub", func(ctx context.Context, s side, topic string, n int) (*Result, error) {
						return pub.round(ctx, b, s.via, topic, n)
					}},
					{"sub", func(ctx context.Context, s side, topic string, n int) (*Result, error) {
						if err := sub.fill(ctx, b, s.via, topic, n); err != nil {
							return nil, err
						}
						return sub.round(ctx, b, s.via, topic, newTally(n))
					}},
				} {
					r, err := z.steady(ctx, b, op.once, side{via: viaWS}, 64, most)
					if err != nil {
						return fmt.Errorf("%s, %s, %d bytes: %w", op.name, d.name, size, err)
					}
					most = min(most, 2*r.n) // a delivery round must publish its events first
					r.series, r.x = op.name+" "+d.name, size
					if err := z.add(r); err != nil {
						return err
					}
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// rate measures latency and CPU use by event rate.
func (z *sizer) rate(ctx context.Context) error {
	return z.with(ctx, func(*Target) {}, func(b *run) error {
		for _, rate := range z.rates {
			cmd := &Latency{load: loadOf(256, 4), Rate: float64(rate), Group: "bench"}
			var results []*Result
			for range z.rounds {
				r, err := b.round(ctx, func(ctx context.Context, s side, topic string, n int) (*Result, error) {
					return cmd.round(ctx, b, s.via, topic, n)
				}, side{via: viaWS}, cmd.Topic, max(100, int(2*float64(rate)*z.budget.Seconds())))
				if err != nil {
					return fmt.Errorf("%d per second: %w", rate, err)
				}
				results = append(results, r)
			}
			r := rowOf(results)
			r.series, r.x = "latency", rate
			if err := z.add(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// connections measures memory and idle CPU use by number of connections, and publishing over them.
func (z *sizer) connections(ctx context.Context) error {
	for _, s := range []struct {
		name      string
		subscribe bool
		own       bool
		external  bool
	}{
		{name: "idle"},
		{name: "subscribed", subscribe: true},
		{name: "group each", subscribe: true, own: true},
		{name: "subscribed (NATS apart)", subscribe: true, external: true},
		{name: "group each (NATS apart)", subscribe: true, own: true, external: true},
	} {
		for _, n := range z.extent.connections {
			if s.external && n != slices.Max(z.extent.connections) || s.subscribe && n < fewConnections {
				continue // one point, or a shorter curve, suffices
			}
			err := z.with(ctx, func(t *Target) { t.External = s.external }, func(b *run) error {
				cmd := &Connections{
					N: n, Via: viaWS, Subscribe: s.subscribe, Topic: "bench.sizing", Groups: (n + membersPerGroup - 1) / membersPerGroup,
					For: z.idle, Settle: z.settle,
				}
				if s.own {
					cmd.Groups, cmd.GroupTTL = n, sizingTTL
				}
				idle, err := cmd.measure(ctx, b)
				if err != nil {
					return err
				}
				err = z.add(row{
					series: s.name, x: n, memoryMiB: idle.AfterKiB / 1024, eachKiB: cmp.Or(idle.HubKiB, idle.KiBPerConnection), idleCPU: idle.CPU,
				})
				if err != nil || idle.NATSKiB == 0 {
					return err
				}
				return z.add(row{series: s.name + ": NATS", x: n, eachKiB: idle.NATSKiB})
			})
			if err != nil {
				return fmt.Errorf("%d %s: %w", n, s.name, err)
			}
		}
	}
	for _, n := range z.extent.connections {
		err := z.with(ctx, func(*Target) {}, func(b *run) error {
			pub := &Pub{load: loadOf(256, n), Batch: 1}
			r, err := z.steady(ctx, b, func(ctx context.Context, s side, topic string, events int) (*Result, error) {
				return pub.round(ctx, b, s.via, topic, events)
			}, side{via: viaWS}, max(1000, 10*n), sizingEvents)
			if err != nil {
				return err
			}
			r.series, r.x = "publishers", n
			return z.add(r)
		})
		if err != nil {
			return fmt.Errorf("%d publishers: %w", n, err)
		}
	}
	return nil
}

// groups measures fan-out by number of groups, and the cost of unused groups.
func (z *sizer) groups(ctx context.Context) error {
	for _, kind := range []struct {
		name string
		ttl  time.Duration
	}{{"durable", 0}, {"with TTL", sizingTTL}} {
		for _, n := range z.extent.groups {
			err := z.with(ctx, func(*Target) {}, func(b *run) error {
				cmd := &Fanout{load: loadOf(256, 4), Via: viaWS, GroupTTL: kind.ttl, PublishInFlight: 4}
				r, err := z.steady(ctx, b, func(ctx context.Context, s side, topic string, deliveries int) (*Result, error) {
					return cmd.round(ctx, b, s, topic, max(1, deliveries/s.groups))
				}, side{via: viaWS, groups: n}, max(1000, 10*n), sizingEvents)
				if err != nil {
					return err
				}
				r.series, r.x = "fan-out "+kind.name, n
				return z.add(r)
			})
			if err != nil {
				return fmt.Errorf("fan-out to %d groups, %s: %w", n, kind.name, err)
			}
		}
		err := z.atRest(ctx, "at rest "+kind.name, z.extent.groups, func(ctx context.Context, _ *run, c *wire.Conn, i int) error {
			sub, err := c.Subscribe(ctx, "bench.sizing", fmt.Sprintf("bench-%d", i), wire.SubscribeOptions{
				GroupTTLMS: (10 * kind.ttl).Milliseconds(),
			}, func(wire.Event) {})
			if err != nil {
				return err
			}
			return sub.Unsubscribe(ctx)
		})
		if err != nil {
			return fmt.Errorf("groups at rest, %s: %w", kind.name, err)
		}
	}
	return nil
}

// topics measures publishing to several topics in turn, and the cost of unused topics.
func (z *sizer) topics(ctx context.Context) error {
	for _, n := range z.extent.topics {
		err := z.with(ctx, func(*Target) {}, func(b *run) error {
			results, err := z.spread(ctx, b, n)
			if err != nil {
				return err
			}
			r := rowOf(results)
			r.series, r.x = "pub", n
			return z.add(r)
		})
		if err != nil {
			return fmt.Errorf("%d topics: %w", n, err)
		}
	}
	err := z.atRest(ctx, "at rest", z.extent.topics, func(ctx context.Context, b *run, c *wire.Conn, i int) error {
		topic := fmt.Sprintf("bench.sizing.%d", i)
		_, err := b.prepare(ctx, viaNative, topic)
		if err == nil {
			_, err = c.Publish(ctx, topic, []byte(`{}`), wire.PublishOptions{})
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("topics at rest: %w", err)
	}
	return nil
}

// manyTopics publishes to several topics in turn.
type manyTopics struct {
	*wsPublisher
	topics []string
	next   int
}

func (m *manyTopics) send(payload []byte, id string, due int64) error {
	m.topic = m.topics[m.next%len(m.topics)]
	m.next++
	return m.wsPublisher.send(payload, id, due)
}

// spread publishes to n topics over four connections, with each connection publishing to all
// topics. The results exclude the warm-up.
func (z *sizer) spread(ctx context.Context, b *run, n int) ([]*Result, error) {
	l := loadOf(256, 4)
	topics := make([]string, n)
	for i := range topics {
		topics[i] = fmt.Sprintf("%s.%d", l.Topic, i)
		// create the stream natively: the hub limits the topics that a client may create
		if _, err := b.prepare(ctx, viaNative, topics[i]); err != nil {
			return nil, err
		}
	}
	p := &publishers{}
	defer p.close()
	for i := range l.Connections {
		w, err := b.sys.newWSPublisher(ctx, publishing{inFlight: l.InFlight}, nil)
		if err != nil {
			return nil, err
		}
		p.all = append(p.all, &manyTopics{wsPublisher: w, topics: topics, next: i * n / l.Connections})
	}
	events := 4 * n
	var results []*Result
	// the first round warms up; the second determines the number of events per round
	for i := range z.rounds + 2 {
		m, err := b.sys.newMeter(viaWS)
		if err != nil {
			return nil, err
		}
		if err := p.flatOut(ctx, events, l.Size, ids{}); err != nil {
			return nil, err
		}
		r := &Result{Via: viaWS, Published: events}
		if err := m.stop(events, r); err != nil {
			return nil, err
		}
		switch i {
		case 0:
			events = max(10_000, 10*n)
		case 1:
			events = min(max(events, int(r.MPS*z.budget.Seconds())), sizingEvents)
		default:
			results = append(results, r)
		}
	}
	return results, nil
}

// atRest creates increasing numbers of unused items and measures their cost in memory, disk space,
// and CPU use.
func (z *sizer) atRest(ctx context.Context, series string, counts []int, makeOne func(ctx context.Context, b *run, c *wire.Conn, i int) error) error {
	return z.with(ctx, func(*Target) {}, func(b *run) error {
		servers, err := b.sys.servers(viaWS)
		if err != nil {
			return err
		}
		c, err := b.sys.dial(ctx, 1)
		if err != nil {
			return err
		}
		defer c.Close() //nolint:errcheck // every request was answered
		// The first item allocates what all items share.
		if err := makeOne(ctx, b, c, 0); err != nil {
			return err
		}
		memory, _, err := settledKiB(ctx, servers, z.settle)
		if err != nil {
			return err
		}
		disk, err := diskKiB(b.sys.dir)
		if err != nil {
			return err
		}
		made := 1
		for _, n := range counts {
			if n == 1 {
				continue
			}
			for ; made < n; made++ {
				if err := makeOne(ctx, b, c, made); err != nil {
					return err
				}
			}
			r := row{series: series, x: n}
			memoryNow, _, err := settledKiB(ctx, servers, z.settle)
			if err != nil {
				return err
			}
			diskNow, err := diskKiB(b.sys.dir)
			if err != nil {
				return err
			}
			r.memoryMiB, r.eachKiB, r.eachDiskKiB = memoryNow/1024, (memoryNow-memory)/float64(n-1), (diskNow-disk)/float64(n-1)
			if r.idleCPU, err = idleCPU(ctx, servers, z.idle); err != nil {
				return err
			}
			if err := z.add(r); err != nil {
				return err
			}
		}
		return nil
	})
}

// diskKiB returns the total size of all files in a directory.
func diskKiB(dir string) (float64, error) {
	sum := 0.0
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			sum += float64(info.Size()) / 1024
		}
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read the size of %s: %w", dir, err)
	}
	return sum, nil
}
