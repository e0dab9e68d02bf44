package jetstream

import (
	"slices"
	"strings"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/topics"
)

// TestBuiltinTopicsAreCreated creates the topics of the built-in rules, once, and says which cannot
// be created.
func TestBuiltinTopicsAreCreated(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "heartbeat.received", Family: "beats"}}})
	makeStream(t, b, natsjs.StreamConfig{Name: "other", Subjects: []string{"event.process.state"}})
	for range 2 {
		err := b.Admin().CreateBuiltinTopics(t.Context())
		if err == nil || !strings.Contains(err.Error(), "stream other already stores event.process.state") || strings.Count(err.Error(), "\n") != 0 {
			t.Errorf("the error is %v", err)
		}
	}
	inv, err := takeInventory(t.Context(), b.core)
	if err != nil {
		t.Fatal(err)
	}
	got := slices.DeleteFunc(inv.names(), func(name string) bool { return strings.HasPrefix(name, "KV_eventhub") })
	if want := []string{"KV_latest_process_state_snapshot", "dlq", "other", "process=2Estate=2Esnapshot"}; !slices.Equal(got, want) {
		t.Errorf("streams %v, want %v", got, want)
	}
}

// TestTopicCreate creates a topic as its first use would, and again.
func TestTopicCreate(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "state", Compaction: true}}})
	for range 2 {
		for topic, streams := range map[string][]string{"orders.placed": {"orders=2Eplaced"}, "state": {"state", "KV_latest_state"}, "dlq.orders": {"dlq"}} {
			if err := b.Admin().Topic(topic).Create(t.Context()); err != nil {
				t.Fatal(err)
			}
			for _, name := range streams {
				if _, err := b.conn.FindStream(t.Context(), name); err != nil {
					t.Errorf("stream %s: %v", name, err)
				}
			}
		}
	}
	if err := b.Admin().Topic("a b").Create(t.Context()); err == nil {
		t.Error("a topic that is none is created")
	}
	// One that was deleted meanwhile is created again.
	if err := b.conn.JS.DeleteStream(t.Context(), "orders=2Eplaced"); err != nil {
		t.Fatal(err)
	}
	if err := b.Admin().Topic("orders.placed").Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.conn.FindStream(t.Context(), "orders=2Eplaced"); err != nil {
		t.Error(err)
	}
}
