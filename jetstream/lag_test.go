package jetstream

import (
	"bytes"
	"context"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// TestReadsBesideAReplicaThatIsBehind kills a follower, stores much without it, and reads what was
// stored last while it catches up: a read may fail, and must not be told that there is nothing.
func TestReadsBesideAReplicaThatIsBehind(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 3)
	b := openRemote(t, Config{URL: c.nodes[0].URL(), Replicas: 3})
	publishUntil := func(id string) {
		t.Helper()
		c.until("the event "+id+" is stored", func(ctx context.Context) bool {
			_, err := b.Publish(ctx, "orders", []byte("1"), PublishOptions{ID: id, Key: "k"})
			return err == nil
		})
	}
	publishUntil("first")
	c.healthy("orders")
	info, err := c.info(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	down := 1
	if info.Cluster.Leader == c.nodes[down].Name() {
		down = 2
	}
	c.nodes[down].Kill()
	p := b.NewPublisher()
	large := bytes.Repeat([]byte("1"), 64<<10)
	for range 500 {
		if err := p.PublishAsync(t.Context(), "orders", large, PublishOptions{}, func(_ event.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	since := time.Now()
	publishUntil("wanted")
	c.nodes[down].Start()
	failed := 0
	for found := 0; found < 100; {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		ids, complete, err := b.History("orders").FindIDs(ctx, IDSearch{Key: "k", IDs: []string{"wanted"}, Since: since.Add(-time.Second)})
		scanned := 0
		if err == nil {
			err = b.History("orders").Scan(ctx, ScanOptions{From: FromAfterID("first"), Key: "k"}, func(*event.Event) error { scanned++; return nil })
		}
		cancel()
		switch {
		case err != nil:
			if failed++; failed == 1_000 {
				t.Fatal(err)
			}
		case !ids["wanted"] || !complete || scanned != 1:
			t.Fatalf("found %v, complete %v, and %d events by a scan; %d reads were right before, %d failed", ids, complete, scanned, found, failed)
		default:
			found++
		}
	}
	t.Logf("%d reads failed", failed)
}
