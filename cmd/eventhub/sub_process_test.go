//go:build unix

package main

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// The event that is being printed when the command is interrupted is acknowledged, so it is not
// printed again.
func TestInterruptedSubAcknowledgesWhatItPrints(t *testing.T) {
	t.Parallel()
	hub := startNode(t)
	c := hub.dial()
	first := publishTo(t, c, "orders", "1")
	second := publishTo(t, c, "orders", "2")
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	printed := ""
	out := writerFunc(func(p []byte) (int, error) {
		printed += string(p)
		interrupt()
		// A command that left the group here would have done so within moments.
		for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
			if _, text := askWith(t.Context(), nodeToken, http.MethodGet, hub.ops+"/connections", nil); strings.Contains(text, `"group":"printer"`) {
				continue
			}
			t.Error("the command leaves its group while it prints")
			break
		}
		return len(p), nil
	})
	cmd := subCmd{Topic: "orders", Group: "printer", From: "earliest"}
	cmd.URL, cmd.Token = hub.url, nodeToken
	if err := cmd.Run(ctx, streams{out: out, err: io.Discard}); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(printed, first) || strings.Contains(printed, second) {
		t.Errorf("the command printed %s, want the first event alone", printed)
	}
	b := subscribeTo(t, c, "orders", "printer", wire.SubscribeOptions{})
	if e := b.next(); e.ID != second || e.Attempt != 1 && e.Attempt != 2 {
		t.Errorf("the next member gets %s, attempt %d, want the second event", e.Record, e.Attempt)
	}
}
