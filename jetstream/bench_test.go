package jetstream

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// The benchmarks do the same work through the bus and through nats.go over TCP, on one embedded
// server: 256-byte payloads, file storage, four clients with 256 in flight each.
const (
	benchClients  = 4
	benchInFlight = 256
)

var benchPayload = []byte(`{"pad":"` + strings.Repeat("x", 256-10) + `"}`)

func benchBus(b *testing.B) *Bus {
	b.Helper()
	bus, err := Open(context.Background(), Config{Server: natstest.Embed(b, b.TempDir(), natstest.Listening("t")), Limits: Limits{SessionInFlight: benchInFlight}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = bus.Close() })
	if _, err := bus.Publish(b.Context(), "bench", benchPayload, PublishOptions{}); err != nil {
		b.Fatal(err)
	}
	return bus
}

func nativeClient(b *testing.B, bus *Bus) natsjs.JetStream {
	b.Helper()
	nc, err := nats.Connect(bus.Admin().NATS().URL(), nats.Token("t"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(benchInFlight),
		natsjs.WithPublishAsyncErrHandler(func(_ natsjs.JetStream, _ *nats.Msg, err error) { b.Error(err) }))
	if err != nil {
		b.Fatal(err)
	}
	return js
}

// inParallel runs f for each client with its share of b.N.
func inParallel(b *testing.B, f func(client, n int) error) {
	b.Helper()
	var wg sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for i := range benchClients {
		wg.Go(func() {
			if err := f(i, (b.N+i)/benchClients); err != nil {
				b.Error(err)
			}
		})
	}
	wg.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
}

func BenchmarkPublish(b *testing.B) {
	for _, given := range []bool{false, true} {
		b.Run(fmt.Sprintf("bus/id=%v", given), func(b *testing.B) {
			bus := benchBus(b)
			var failed atomic.Int64
			inParallel(b, func(client, n int) error {
				p := bus.NewPublisher()
				var opts PublishOptions
				for i := range n {
					if given {
						opts.ID = fmt.Sprintf("%d-%d", client, i)
					}
					if err := p.PublishAsync(b.Context(), "bench", benchPayload, opts, func(_ event.Receipt, err error) {
						if err != nil {
							failed.Add(1)
						}
					}); err != nil {
						return err
					}
				}
				return p.Flush(b.Context())
			})
			if failed.Load() > 0 {
				b.Fatalf("%d failed", failed.Load())
			}
		})
		b.Run(fmt.Sprintf("native/id=%v", given), func(b *testing.B) {
			bus := benchBus(b)
			clients := make([]natsjs.JetStream, benchClients)
			for i := range clients {
				clients[i] = nativeClient(b, bus)
			}
			inParallel(b, func(client, n int) error {
				for i := range n {
					var opts []natsjs.PublishOpt
					if given {
						opts = append(opts, natsjs.WithMsgID(fmt.Sprintf("%d-%d", client, i)))
					}
					if _, err := clients[client].PublishAsync("event.bench", benchPayload, opts...); err != nil {
						return err
					}
				}
				<-clients[client].PublishAsyncComplete()
				return nil
			})
		})
	}
}

func BenchmarkDeliverAndAck(b *testing.B) {
	fill := func(b *testing.B, bus *Bus) {
		b.Helper()
		p := bus.NewPublisher()
		for range b.N {
			if err := p.PublishAsync(b.Context(), "bench", benchPayload, PublishOptions{}, func(_ event.Receipt, err error) {
				if err != nil {
					b.Error(err)
				}
			}); err != nil {
				b.Fatal(err)
			}
		}
		if err := p.Flush(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("bus", func(b *testing.B) {
		bus := benchBus(b)
		fill(b, bus)
		var left atomic.Int64
		left.Store(int64(b.N))
		done := make(chan struct{})
		b.ReportAllocs()
		b.ResetTimer()
		for range benchClients {
			_, err := bus.Subscribe(b.Context(), "bench", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: benchInFlight, BatchSize: benchInFlight}, func(h *Held) {
				if d, ok := h.Begin(); !ok || d.Ack() != nil {
					b.Error("a delivery was lost")
				}
				if left.Add(-1) == 0 {
					close(done)
				}
			})
			if err != nil {
				b.Fatal(err)
			}
		}
		<-done
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
	b.Run("native", func(b *testing.B) {
		bus := benchBus(b)
		fill(b, bus)
		var left atomic.Int64
		left.Store(int64(b.N))
		done := make(chan struct{})
		b.ReportAllocs()
		b.ResetTimer()
		for range benchClients {
			c, err := nativeClient(b, bus).CreateOrUpdateConsumer(b.Context(), "bench", natsjs.ConsumerConfig{Durable: "g", AckPolicy: natsjs.AckExplicitPolicy, MaxAckPending: native.MaxAckPending})
			if err != nil {
				b.Fatal(err)
			}
			run, err := c.Consume(func(m natsjs.Msg) {
				n := left.Add(-1)
				if n < 0 {
					return // one more is stored than is asked for
				}
				if err := m.Ack(); err != nil {
					b.Error(err)
				}
				if n == 0 {
					close(done)
				}
			}, natsjs.PullMaxMessages(benchInFlight))
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(run.Stop)
		}
		<-done
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
}

// BenchmarkFanOut delivers each event to 1,000 groups.
func BenchmarkFanOut(b *testing.B) {
	const groups = 1_000
	for _, ttl := range []time.Duration{0, time.Minute} {
		b.Run(fmt.Sprintf("bus/ttl=%v", ttl), func(b *testing.B) {
			bus := benchBus(b)
			var left atomic.Int64
			left.Store(int64(b.N) * groups)
			done := make(chan struct{})
			for i := range groups {
				_, err := bus.Subscribe(b.Context(), "bench", fmt.Sprint("g", i), SubscribeOptions{GroupTTL: ttl}, func(h *Held) {
					if d, ok := h.Begin(); !ok || d.Ack() != nil {
						b.Error("a delivery was lost")
					}
					if left.Add(-1) == 0 {
						close(done)
					}
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			p := bus.NewPublisher()
			b.ResetTimer()
			for range b.N {
				if err := p.PublishAsync(b.Context(), "bench", benchPayload, PublishOptions{}, func(event.Receipt, error) {}); err != nil {
					b.Fatal(err)
				}
			}
			<-done
			b.ReportMetric(float64(b.N*groups)/b.Elapsed().Seconds(), "deliveries/s")
		})
	}
}
