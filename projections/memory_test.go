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

// TestCacheIsBounded counts the bytes too, and keeps one state that is larger than all of it.
func TestCacheIsBounded(t *testing.T) {
	t.Parallel()
	full := 0
	c := newCache(10, 10_000, func() { full++ })
	for i := range 100 {
		c.put("k"+strconv.Itoa(i%20), cached{state: State{Value: bytes.Repeat([]byte("x"), 100*(i%7))}})
		if c.lru.Len() > 10 || c.bytes > 10_000 {
			t.Fatalf("it holds %d keys, %d bytes", c.lru.Len(), c.bytes)
		}
	}
	c.put("large", cached{state: State{Value: make([]byte, 20_000)}})
	if _, ok := c.get("large"); !ok || c.lru.Len() != 1 {
		t.Errorf("of a state that is too large for the cache it keeps %d (%v)", c.lru.Len(), ok)
	}
	c.drop("large")
	if c.bytes != 0 || full == 0 {
		t.Errorf("an empty cache counts %d bytes; it was full %d times", c.bytes, full)
	}
}
