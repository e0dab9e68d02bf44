package tracing

import (
	"fmt"
	"sync/atomic"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"eventhub/jetstream"
)

// variants are buses without a tracer, with one for which nothing is sampled, and with one for
// which everything is. Spans that end go nowhere: what sending them costs is not measured here.
func variants(b *testing.B, run func(b *testing.B, bus *jetstream.Bus)) {
	b.Helper()
	for _, v := range []struct {
		name    string
		sampler sdktrace.Sampler
	}{{"off", nil}, {"unsampled", sdktrace.NeverSample()}, {"sampled", sdktrace.AlwaysSample()}} {
		b.Run(v.name, func(b *testing.B) {
			var tracer jetstream.Tracer
			if v.sampler != nil {
				made, err := New(Config{Provider: sdktrace.NewTracerProvider(sdktrace.WithSampler(v.sampler)), OpenSpans: 1 << 20})
				if err != nil {
					b.Fatal(err)
				}
				tracer = made
			}
			run(b, openBus(b, tracer))
		})
	}
}

// publishAll publishes n events.
func publishAll(b *testing.B, bus *jetstream.Bus, n int) {
	b.Helper()
	p := bus.NewPublisher()
	payload := []byte(`{"some":"payload"}`)
	var failed atomic.Int64
	for range n {
		if err := p.PublishAsync(b.Context(), "bench", payload, jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				failed.Add(1)
			}
		}); err != nil {
			b.Fatal(err)
		}
	}
	if err := p.Flush(b.Context()); err != nil || failed.Load() > 0 {
		b.Fatal(fmt.Errorf("%d publishes failed: %w", failed.Load(), err))
	}
}

func BenchmarkPublish(b *testing.B) {
	variants(b, func(b *testing.B, bus *jetstream.Bus) {
		b.Helper()
		publishAll(b, bus, 1)
		b.ReportAllocs()
		b.ResetTimer()
		publishAll(b, bus, b.N)
	})
}

func BenchmarkDeliverAndAck(b *testing.B) {
	variants(b, func(b *testing.B, bus *jetstream.Bus) {
		b.Helper()
		publishAll(b, bus, b.N)
		left := atomic.Int64{}
		left.Store(int64(b.N))
		done := make(chan struct{})
		b.ReportAllocs()
		b.ResetTimer()
		_, err := bus.Subscribe(b.Context(), "bench", "g", jetstream.SubscribeOptions{From: jetstream.FromEarliest, MaxInFlight: 1_000, BatchSize: 1_000}, func(h *jetstream.Held) {
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
		<-done
	})
}
