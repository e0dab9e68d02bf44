package jetstream

import (
	"sync"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// errorCounts counts errors of JetStream.
type errorCounts struct {
	event.NopObserver
	mu     sync.Mutex
	counts map[int]int
}

func (c *errorCounts) JetStreamError(code int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = make(map[int]int)
	}
	c.counts[code]++
}

func (c *errorCounts) of(code int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[code]
}

// Errors of JetStream are counted by their number: of requests that nats.go makes, of the hub's own
// requests, and of publishes. Payloads that look like errors are none.
func TestJetStreamErrorsAreCounted(t *testing.T) {
	t.Parallel()
	seen := new(errorCounts)
	b := open(t, Config{Observer: seen, Topics: []topics.Rule{{Pattern: "small", MaxMsgs: 1, OnFull: topics.OnFullReject}}})
	const misleading = `{"error":{"code":500,"err_code":12345}}`
	if _, err := b.Publish(t.Context(), "t", []byte(misleading), PublishOptions{Key: "k"}); err != nil {
		t.Fatal(err)
	}
	events, err := b.History("t").Newest(t.Context(), 1)
	if err != nil || len(events) != 1 || string(events[0].Payload) != misleading {
		t.Fatalf("%v, %v", events, err)
	}

	before := seen.of(int(natsjs.JSErrCodeStreamNotFound))
	if _, err := b.conn.JS.Stream(t.Context(), "missing"); err == nil {
		t.Fatal("there is such a stream")
	}
	if _, err := b.conn.Link().Request(t.Context(), b.conn.API+"STREAM.INFO.missing", nil); err != nil {
		t.Fatal(err)
	}
	if n := seen.of(int(natsjs.JSErrCodeStreamNotFound)) - before; n < 2 {
		t.Errorf("%d streams that do not exist were counted, want 2", n)
	}
	take(t, b, "small", "g", SubscribeOptions{})
	publishAll(t, b, "small", "1")
	eventually(t, "the topic is full", func() bool {
		_, err := b.Publish(t.Context(), "small", []byte("2"), PublishOptions{})
		return isTopicFull(err)
	})
	if seen.of(10077) == 0 {
		t.Error("a publish that a full stream refused was not counted")
	}
	before = seen.of(event.NoResponders)
	if _, err := b.conn.Link().Request(t.Context(), "nobody.listens", nil); err != nil {
		t.Fatal(err)
	}
	if seen.of(event.NoResponders) == before {
		t.Error("a question without responders was not counted")
	}
	if seen.of(12345) != 0 {
		t.Error("a payload was taken for an error")
	}
}

// Streams are listed with what they store and with their bounds, and the disk with what it has
// left.
func TestStorageIsListed(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{
		{Pattern: "dropped", MaxBytes: 1 << 20}, {Pattern: "rejected", MaxBytes: 2 << 20, OnFull: topics.OnFullReject}, {Pattern: "f.**", Family: "family"},
	}})
	for _, topic := range []string{"dropped", "rejected", "f.a", "unbounded"} {
		publishAll(t, b, topic, "1")
	}
	all, err := b.Admin().NATS().Streams(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]StreamStorage{
		"dropped":   {Stream: "dropped", Topic: "dropped", MaxBytes: 1 << 20, OnFull: topics.OnFullDrop},
		"rejected":  {Stream: "rejected", Topic: "rejected", MaxBytes: 2 << 20, OnFull: topics.OnFullReject},
		"family":    {Stream: "family", OnFull: topics.OnFullDrop},
		"unbounded": {Stream: "unbounded", Topic: "unbounded", OnFull: topics.OnFullDrop},
	}
	for _, s := range all {
		if s.Bytes == 0 {
			t.Errorf("stream %s stores nothing", s.Stream)
		}
		s.Bytes = 0
		if s != want[s.Stream] {
			t.Errorf("got %+v, want %+v", s, want[s.Stream])
		}
		delete(want, s.Stream)
	}
	if len(want) > 0 {
		t.Errorf("not listed: %v", want)
	}
	info, err := b.Admin().NATS().Info(t.Context())
	if err != nil || info.FileLeft < 1<<20 || info.MemoryLeft != -1 || info.FileBytes == 0 {
		t.Errorf("NATS says of its storage: %+v, %v", info, err)
	}
}
