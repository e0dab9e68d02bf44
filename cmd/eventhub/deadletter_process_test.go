//go:build unix

package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

// A hub that is killed while dead letters wait for their ration leaves notes: the hub that comes
// after it writes the letters, and delivers none of the events.
func TestKilledHubKeepsMaxAttempts(t *testing.T) {
	t.Parallel()
	const events = 6
	for _, embedded := range []bool{false, true} {
		t.Run(fmt.Sprintf("embedded server %v", embedded), func(t *testing.T) {
			url := ""
			flags := []string{"--data=" + t.TempDir(), "--ack-wait=2s"}
			if !embedded {
				url = runNATS(t)
				flags = []string{"--nats-url=" + url, "--ack-wait=2s"}
			}
			hub := startNode(t, append(slices.Clone(flags), "--limit-dead-letter-bytes=1/2000")...)
			c := hub.dial()
			two := 2
			opts := wire.SubscribeOptions{From: "earliest", MaxAttempts: &two}
			in := subscribeTo(t, c, "kept", "g", opts)
			for range events {
				publishTo(t, c, "kept", `"`+strings.Repeat("x", 1_000)+`"`)
			}
			for range 2 * events {
				e := in.next()
				if e.Attempt > 2 {
					t.Fatalf("attempt %d of 2", e.Attempt)
				}
				if err := e.Nack("no", 0); err != nil {
					t.Fatal(err)
				}
			}
			if embedded {
				// Until then, a killed server may forget deliveries.
				<-time.After(2 * settledFor)
			} else {
				waitForPending(t, url, "kept", "g", events-1) // one letter is within the ration
				waitForFailureNotes(t, url, events-1)
			}
			hub.kill()

			hub = startNode(t, flags...)
			c = hub.dial()
			dead := subscribeTo(t, c, "dlq.kept", "d", wire.SubscribeOptions{From: "earliest"})
			in = subscribeTo(t, c, "kept", "g", opts)
			seen := map[string]bool{}
			for _, e := range dead.take(events) {
				seen[e.ID] = true
				if !strings.Contains(string(e.Record), `"attempts":2`) || !strings.Contains(string(e.Record), `"err":"no"`) {
					t.Errorf("a letter is %s", e.Record)
				}
				if err := e.Ack(); err != nil {
					t.Fatal(err)
				}
			}
			if len(seen) != events {
				t.Errorf("%d letters, want %d", len(seen), events)
			}
			in.onlyMarker(c, "kept")
			dead.onlyMarker(c, "dlq.kept")
		})
	}
}

// waitForFailureNotes waits until a hub has noted how so many events failed.
func waitForFailureNotes(t *testing.T, url string, want int) {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the notes of failures", func() bool {
		kv, err := js.KeyValue(t.Context(), "eventhub_attempts")
		if err != nil {
			return false
		}
		keys, err := kv.Keys(t.Context())
		if err != nil {
			return false
		}
		n := 0
		for _, key := range keys {
			if e, err := kv.Get(t.Context(), key); err == nil && strings.Contains(string(e.Value()), `"failed"`) {
				n++
			}
		}
		return n >= want
	})
}
