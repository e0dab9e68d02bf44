package projections

import (
	"context"
	"strconv"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/schemas"
)

// BenchmarkKeyed projects stored events of 1,000 keys, with one instance and with two on hubs of
// their own. An operation is an event whose state was saved.
func BenchmarkKeyed(b *testing.B) {
	for _, instances := range []int{1, 2} {
		b.Run(strconv.Itoa(instances)+" instances", func(b *testing.B) {
			url := startNATS(b)
			bus := openBus(b, jetstream.Config{URL: url})
			pub := bus.NewPublisher()
			for i := range b.N {
				opts := jetstream.PublishOptions{Key: "k" + strconv.Itoa(i%1000)}
				if err := pub.PublishAsync(b.Context(), topicCounts, []byte("1"), opts, func(_ jetstream.Receipt, err error) {
					if err != nil {
						b.Error(err)
					}
				}); err != nil {
					b.Fatal(err)
				}
			}
			if err := pub.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			count := func(_ context.Context, state []byte, _ *jetstream.Event) ([]byte, error) {
				n, _ := strconv.Atoi(string(state)) // of a new key: 0
				return strconv.AppendInt(nil, int64(n+1), 10), nil
			}
			b.ResetTimer()
			for range instances {
				run(b, JetStream(openBus(b, jetstream.Config{URL: url})), Projection{From: jetstream.FromEarliest, Apply: count})
			}
			workedOff(b, JetStream(bus), "counter")
		})
	}
}

// BenchmarkDualWrite copies stored events of 1,000 keys in another version, with one instance and
// with two on hubs of their own. An operation is an event that was cast, stored and settled.
func BenchmarkDualWrite(b *testing.B) {
	for _, instances := range []int{1, 2} {
		b.Run(strconv.Itoa(instances)+" instances", func(b *testing.B) {
			url := startNATS(b)
			bus := openBus(b, jetstream.Config{URL: url, Topics: sourceRules()})
			registerVersions(b, bus)
			pub := bus.NewPublisher()
			for i := range b.N {
				opts := jetstream.PublishOptions{Key: "k" + strconv.Itoa(i%1000), Headers: map[string]string{schemas.VersionHeader: "1"}}
				if err := pub.PublishAsync(b.Context(), topicSource, []byte(`{"n":1}`), opts, func(_ jetstream.Receipt, err error) {
					if err != nil {
						b.Error(err)
					}
				}); err != nil {
					b.Fatal(err)
				}
			}
			if err := pub.Flush(b.Context()); err != nil {
				b.Fatal(err)
			}
			b.ResetTimer()
			for range instances {
				startDualWrite(b, JetStream(openBus(b, jetstream.Config{URL: url, Topics: sourceRules()})), []int{2}, nil)
			}
			copiedAll(b, bus)
		})
	}
}
