package facade_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// The benchmarks do the same work through the hub's WebSocket and through nats.go over TCP, on the
// same embedded server: 256-byte JSON payloads, file storage, 4 connections, 256 in flight on each.
// Compare them within one run only.
const (
	benchConns    = 4
	benchInFlight = 256
)

func benchPayload() []byte {
	return []byte(`{"pid":12345,"name":"stt","host":"dev","cpu_pct":12.3,"mem_mb":256,"pad":"` + strings.Repeat("x", 256-77) + `"}`)
}

type benchHub struct {
	*testHub
	bus *jetstream.Bus
}

func startBench(b *testing.B) *benchHub {
	b.Helper()
	bus := openBus(b, func(c *jetstream.Config) { c.Server = natstest.Embed(b, b.TempDir(), natstest.Listening(testToken)) })
	return &benchHub{testHub: startHub(b, bus, unthrottled), bus: bus}
}

func (h *benchHub) dial(b *testing.B) *wire.Conn {
	b.Helper()
	c, err := wire.Dial(b.Context(), h.url, wire.Options{Token: testToken, PublishInFlight: benchInFlight})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return c
}

func (h *benchHub) native(b *testing.B) natsjs.JetStream {
	b.Helper()
	nc, err := nats.Connect(h.bus.Admin().NATS().URL(), nats.Token(testToken))
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

// split runs f in benchConns goroutines that share n between them.
func split(b *testing.B, n int, f func(i, n int) error) {
	b.Helper()
	var wg sync.WaitGroup
	for i := range benchConns {
		share := n / benchConns
		if i < n%benchConns {
			share++
		}
		wg.Go(func() {
			if err := f(i, share); err != nil {
				b.Error(err)
			}
		})
	}
	wg.Wait()
}

func BenchmarkPublish(b *testing.B) {
	h := startBench(b)
	payload := benchPayload()
	if _, err := h.bus.Publish(b.Context(), "bench.publish", payload, jetstream.PublishOptions{}); err != nil {
		b.Fatal(err)
	}
	b.Run("websocket", func(b *testing.B) {
		clients := make([]*wire.Conn, benchConns)
		for i := range clients {
			clients[i] = h.dial(b)
		}
		b.ReportAllocs()
		b.ResetTimer()
		split(b, b.N, func(i, n int) error {
			var failed atomic.Int64
			var wg sync.WaitGroup
			wg.Add(n)
			for range n {
				if err := clients[i].PublishAsync("bench.publish", payload, wire.PublishOptions{}, func(_ string, err error) {
					if err != nil {
						failed.Add(1)
					}
					wg.Done()
				}); err != nil {
					return err
				}
			}
			wg.Wait()
			if failed.Load() > 0 {
				return fmt.Errorf("%d publishes failed", failed.Load())
			}
			return nil
		})
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
	b.Run("native", func(b *testing.B) {
		conns := make([]natsjs.JetStream, benchConns)
		for i := range conns {
			conns[i] = h.native(b)
		}
		b.ReportAllocs()
		b.ResetTimer()
		split(b, b.N, func(i, n int) error {
			for range n {
				if _, err := conns[i].PublishAsync("event.bench.publish", payload); err != nil {
					return err
				}
			}
			<-conns[i].PublishAsyncComplete()
			return nil
		})
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
}

func BenchmarkDeliverAndAck(b *testing.B) {
	h := startBench(b)
	payload := benchPayload()
	stored := 0
	// store brings the topic to n events.
	store := func(b *testing.B, n int) {
		b.Helper()
		p := h.bus.NewPublisher()
		for ; stored < n; stored++ {
			if err := p.PublishAsync(b.Context(), "bench.deliver", payload, jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
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
	b.Run("websocket", func(b *testing.B) {
		store(b, b.N)
		clients := make([]*wire.Conn, benchConns)
		for i := range clients {
			clients[i] = h.dial(b)
		}
		group := freshTopic()
		var left atomic.Int64
		left.Store(int64(b.N))
		done := make(chan struct{})
		b.ReportAllocs()
		b.ResetTimer()
		for _, c := range clients {
			if _, err := c.Subscribe(b.Context(), "bench.deliver", group, wire.SubscribeOptions{From: "earliest", MaxInFlight: benchInFlight, BatchSize: benchInFlight}, func(e wire.Event) {
				n := left.Add(-1)
				if n < 0 {
					return // the topic may hold more than this run asks for
				}
				if err := e.Ack(); err != nil {
					b.Error(err)
				}
				if n == 0 {
					close(done)
				}
			}); err != nil {
				b.Fatal(err)
			}
		}
		<-done
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
	})
	b.Run("native", func(b *testing.B) {
		store(b, b.N)
		group := freshTopic()
		var left atomic.Int64
		left.Store(int64(b.N))
		done := make(chan struct{})
		b.ReportAllocs()
		b.ResetTimer()
		for range benchConns {
			js := h.native(b)
			c, err := js.CreateOrUpdateConsumer(b.Context(), "bench=2Edeliver", natsjs.ConsumerConfig{Durable: group, AckPolicy: natsjs.AckExplicitPolicy, MaxAckPending: 65_536})
			if err != nil {
				b.Fatal(err)
			}
			run, err := c.Consume(func(m natsjs.Msg) {
				n := left.Add(-1)
				if n < 0 {
					return
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
