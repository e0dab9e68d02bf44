//go:build !race

package projections

import (
	"bytes"
	"context"
	"flag"
	"runtime"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

var memoryKeys = flag.Int("memory.keys", 4_000, "how many keys the memory test has; 1000000 is the full form")

// TestMemory projects more keys than the cache holds, twice: the memory is bounded by the cache,
// however many keys there are.
func TestMemory(t *testing.T) {
	const cacheKeys, cacheBytes, slack = 2_000, 4 << 20, 12 << 20
	bus := openBus(t, jetstream.Config{URL: natstest.Start(t).URL()})
	payload := bytes.Repeat([]byte("7"), 200)
	pub := bus.NewPublisher()
	for i := range 2 * *memoryKeys {
		opts := jetstream.PublishOptions{Key: "key-" + strconv.Itoa(i%*memoryKeys)}
		if err := pub.PublishAsync(t.Context(), topicCounts, payload, opts, func(_ jetstream.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := pub.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	seen := newTally()
	began := time.Now()
	run(t, JetStream(bus), Projection{
		From: jetstream.FromEarliest, CacheKeys: cacheKeys, CacheBytes: cacheBytes, Observer: seen,
		Apply: func(_ context.Context, _ []byte, e *jetstream.Event) ([]byte, error) { return e.Payload, nil },
	})
	var most uint64
	for i := range 10 {
		goal := 2 * *memoryKeys * (i + 1) / 10
		pollFor(t, 10*time.Minute, "it comes on", func() bool { return seen.outcome(Applied) >= goal })
		most = max(most, heap())
	}
	workedOff(t, JetStream(bus), "counter")
	grown := int64(most) - int64(before)
	t.Logf("%d keys, cache of %d keys and %d MiB: the heap grew by %.1f MiB at most, in %v (%.0f events/s)", *memoryKeys, cacheKeys, cacheBytes>>20,
		float64(grown)/(1<<20), time.Since(began).Round(time.Millisecond), float64(2**memoryKeys)/time.Since(began).Seconds())
	if grown > cacheBytes+slack {
		t.Errorf("the heap grew by %d bytes, want %d at most", grown, cacheBytes+slack)
	}
	if seen.limit("projection_cache") == 0 {
		t.Error("nobody was told that the cache is full")
	}
	if n := seen.outcome(Applied); n != 2**memoryKeys {
		t.Errorf("%d events were applied, want %d", n, 2**memoryKeys)
	}
}
