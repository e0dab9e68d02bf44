//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"eventhub/sdk/go/wire"
)

// A principal makes so many processes by its heartbeats, over WebSocket and HTTP together. Its
// processes that exist are not limited.
func TestNewProcessesOfAPrincipal(t *testing.T) {
	t.Parallel()
	const burst = 3
	hub := startNode(t, "--data="+t.TempDir(), "--projector", fmt.Sprintf("--limit-new-processes=1/%d", burst))
	c := hub.dial()
	beat := func(pid int) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := c.Publish(ctx, "heartbeat.received", fmt.Appendf(nil, `{"pid":%d,"name":"n","host":"h"}`, pid), wire.PublishOptions{})
		return err
	}
	refused := 0
	for pid := range 100 * burst {
		err := beat(pid)
		if err == nil {
			continue
		}
		if e, ok := errors.AsType[*wire.Error](err); !ok || e.Code != "rate_limited" {
			t.Fatal(err)
		}
		refused++
	}
	if refused < 50*burst {
		t.Errorf("%d of %d processes were refused", refused, 100*burst)
	}
	for range 10 * burst {
		if err := beat(0); err != nil {
			t.Fatalf("a process that exists: %v", err)
		}
	}
}
