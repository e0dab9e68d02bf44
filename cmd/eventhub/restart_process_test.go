//go:build unix

package main

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// Three rolling restarts of two hubs lose nothing and dead-letter nothing, although members give up
// after one attempt: a hub that is told to end hands its leases back.
func TestRollingRestartsDeadLetterNothing(t *testing.T) {
	t.Parallel()
	const topic = "rolling"
	flags := []string{"--nats-url=" + runNATS(t), "--ack-wait=5s", "--drain-grace=200ms"}
	hubs := [2]*node{startNode(t, flags...), startNode(t, flags...)}
	w := &workers{t: t, topic: topic, done: map[int]bool{}, finish: make(chan struct{})}
	w.join(hubs[0])
	w.join(hubs[1])

	sent := 0
	publish := func(hub *node) {
		t.Helper()
		c := hub.dial()
		for range 50 {
			publishTo(t, c, topic, strconv.Itoa(sent))
			sent++
		}
	}
	publish(hubs[0])
	for round := range 3 {
		old := round % 2
		publish(hubs[1-old])
		hubs[old].terminate()
		publish(hubs[1-old])
		hubs[old] = startNode(t, flags...)
		w.join(hubs[old])
	}
	close(w.finish) // what is held is settled now
	w.waitFor(sent)

	c := hubs[0].dial()
	dead := subscribeTo(t, c, "dlq."+topic, "d", wire.SubscribeOptions{From: "earliest"})
	dead.onlyMarker(c, "dlq."+topic)
}

// workers are members of a group, one a hub. They acknowledge at once, but for every tenth event,
// which they hold until their hub or the test ends.
type workers struct {
	t      *testing.T
	topic  string
	finish chan struct{}

	mu   sync.Mutex
	done map[int]bool
}

func (w *workers) join(hub *node) {
	w.t.Helper()
	one := 1
	c := hub.dial()
	_, err := c.Subscribe(w.t.Context(), w.topic, "g", wire.SubscribeOptions{From: "earliest", MaxAttempts: &one}, func(e wire.Event) {
		n, err := strconv.Atoi(string(e.Payload))
		if err != nil {
			w.t.Error(err)
			return
		}
		if n%10 == 0 && e.Attempt == 1 {
			go w.hold(c, e, n)
			return
		}
		w.settle(e, n)
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// hold settles the event at the end of the test; it is the hub's again when the connection ends
// before.
func (w *workers) hold(c *wire.Conn, e wire.Event, n int) {
	select {
	case <-w.finish:
		w.settle(e, n)
	case <-c.Done():
	case <-w.t.Context().Done():
	}
}

func (w *workers) settle(e wire.Event, n int) {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	if e.AckWait(ctx) != nil {
		return // the hub ended; the event comes again
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done[n] = true
}

// waitFor waits until all numbers below n are settled.
func (w *workers) waitFor(n int) {
	w.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(patience)
	for {
		w.mu.Lock()
		left := n - len(w.done)
		w.mu.Unlock()
		if left == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-limit:
			w.t.Fatalf("%d of %d events were not settled", left, n)
		}
	}
}
