//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
	eventhub "eventhub/sdk/go"
)

// rolling is a group whose members hold what they get until the end of a round.
type rolling struct {
	t       *testing.T
	hubs    []*node
	relays  []*relay
	clients []*eventhub.Client
	flags   []string

	mu      sync.Mutex
	runs    map[string]int // handlers that have begun, by payload
	highest map[string]int // attempts
	done    map[string]bool
	holding int
	release chan struct{}
}

// rollingRound is how many events are held while something restarts.
const rollingRound = 30

func startRolling(t *testing.T, flags ...string) *rolling {
	t.Helper()
	r := &rolling{t: t, flags: flags, runs: make(map[string]int), highest: make(map[string]int), done: make(map[string]bool)}
	for range 3 {
		hub := startNode(t, flags...)
		r.hubs = append(r.hubs, hub)
		r.relays = append(r.relays, startRelay(t, strings.TrimPrefix(hub.url, "ws://")))
	}
	for _, at := range r.relays {
		client, err := eventhub.Connect(t.Context(), "ws://"+at.listener.Addr().String(), eventhub.Options{
			Token: nodeToken, MinPause: 10 * time.Millisecond, MaxPause: 100 * time.Millisecond,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })
		opts := eventhub.SubscribeOptions{From: eventhub.FromEarliest, MaxAttempts: new(int), MaxInFlight: rollingRound, Concurrency: rollingRound}
		if _, err := client.Subscribe(t.Context(), "orders", "g", opts, r.handle); err != nil {
			t.Fatal(err)
		}
		r.clients = append(r.clients, client)
	}
	return r
}

// handle holds an event until the round ends, or the lease is lost.
func (r *rolling) handle(ctx context.Context, d *eventhub.Delivery) error {
	payload := string(d.Payload)
	r.mu.Lock()
	r.runs[payload]++
	r.highest[payload] = max(r.highest[payload], d.Attempt)
	r.holding++
	release := r.release
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.holding--
	}()
	select {
	case <-release:
	case <-ctx.Done():
		return ctx.Err()
	}
	r.mu.Lock()
	r.done[payload] = true
	r.mu.Unlock()
	return nil
}

// round publishes, restarts something while all events are held, and wants each event to be
// delivered at most twice.
func (r *rolling) round(n int, restart func()) {
	r.t.Helper()
	r.mu.Lock()
	r.release = make(chan struct{})
	r.mu.Unlock()
	var stored []string
	for i := range rollingRound {
		payload := strconv.Itoa(n*rollingRound + i)
		if err := r.publish(r.clients[i%3], payload); err != nil {
			r.t.Fatalf("event %s: %v", payload, err)
		}
		stored = append(stored, payload)
	}
	r.held(stored)
	restart()
	// what is published after the restart, by the client of every hub
	for i, c := range r.clients {
		payload := strconv.Itoa(-(n*3 + i + 1))
		if err := r.publish(c, payload); err != nil {
			r.t.Fatalf("event %s: %v", payload, err)
		}
		stored = append(stored, payload)
	}
	r.held(stored)
	close(r.release)
	again := 0
	eventually(r.t, "all events of the round are settled", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, payload := range stored {
			if !r.done[payload] {
				return false
			}
		}
		return r.holding == 0
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, payload := range stored {
		if r.runs[payload] > 2 || r.highest[payload] > 2 {
			r.t.Errorf("round %d: event %s was delivered %d times, up to attempt %d", n, payload, r.runs[payload], r.highest[payload])
		}
		again += r.runs[payload] - 1
	}
	r.t.Logf("round %d: %d of %d events were delivered again", n, again, len(stored))
}

func (r *rolling) publish(c *eventhub.Client, payload string) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*patience)
	defer cancel()
	_, err := c.Publish(ctx, "orders", json.RawMessage(payload), eventhub.PublishOptions{})
	return err
}

// held waits until handlers have all these events.
func (r *rolling) held(stored []string) {
	r.t.Helper()
	state := ""
	defer func() {
		if r.t.Failed() {
			r.t.Log(state)
		}
	}()
	eventually(r.t, "all events are held", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		state = fmt.Sprintf("%d of %d events are held", r.holding, len(stored))
		missing := slices.DeleteFunc(slices.Clone(stored), func(payload string) bool { return r.runs[payload] > 0 })
		state += fmt.Sprintf("; %v never were", missing)
		return r.holding >= len(stored) && len(missing) == 0
	})
}

// Hubs are restarted one after the other while members hold events: no event is lost, and each
// lease costs at most one redelivery.
func TestRollingRestartOfHubs(t *testing.T) {
	t.Parallel()
	r := startRolling(t, "--nats-url="+runNATS(t), "--drain-grace=100ms")
	for i := range r.hubs {
		r.round(i, func() {
			r.hubs[i].terminate()
			r.hubs[i] = startNode(t, r.flags...)
			r.relays[i].mu.Lock()
			r.relays[i].target = strings.TrimPrefix(r.hubs[i].url, "ws://")
			r.relays[i].mu.Unlock()
		})
	}
}

// The servers of a cluster are restarted one after the other while members hold events.
func TestRollingRestartOfServers(t *testing.T) {
	t.Parallel()
	servers := natstest.StartCluster(t, 3)
	view := natstest.Look(t, natstest.URLs(servers)...)
	r := startRolling(t, "--nats-url="+strings.Join(natstest.URLs(servers), ","), "--replicas=3", "--ack-wait=5s", "--drain-grace=100ms")
	for i, s := range servers {
		view.Replicating(3)
		r.round(i, func() {
			s.Stop()
			s.Start()
			view.Replicating(3)
		})
	}
}
