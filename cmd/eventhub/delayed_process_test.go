//go:build unix

package main

import (
	"flag"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// The long form is -delayed.events=100000.
var delayedEvents = flag.Int("delayed.events", 500, "delayed events that wait over a restart, in each variant")

// Delayed events wait while their hub, and the NATS server, are killed or stopped when half of them
// are due. None is stored early, none is lost, and none is stored twice.
func TestDelayedEventsOverRestarts(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*node){
		"the hub is killed with its server":     (*node).kill,
		"the hub ends in order with its server": (*node).terminate,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			data := "--data=" + t.TempDir()
			start := func() *node {
				return startNode(t, data, "--nats-listen=127.0.0.1:0", "--ack-wait=2s", "--limit-frames=off", "--limit-principal-delayed=1000000")
			}
			hub := start()
			overRestart(t, hub, func() (*node, string) { end(hub); hub = start(); return hub, hub.nats })
		})
	}
	t.Run("one of two hubs and the NATS server are killed", func(t *testing.T) {
		t.Parallel()
		server := natstest.Start(t)
		flags := []string{"--nats-url=" + server.URL(), "--ack-wait=2s", "--limit-frames=off", "--limit-principal-delayed=1000000"}
		hub, other := startNode(t, flags...), startNode(t, flags...)
		overRestart(t, hub, func() (*node, string) {
			hub.kill()
			server.Kill()
			server.Start()
			awaitStore(t, other)
			return other, server.URL()
		})
	})
}

// awaitStore waits until a hub is connected to NATS again.
func awaitStore(t *testing.T, hub *node) {
	t.Helper()
	deadline := time.After(patience)
	for {
		resp, err := http.Get(hub.ops + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-deadline:
			t.Fatal("the hub is not ready")
		}
	}
}

// overRestart has events come due while restart runs, which returns the hub that is asked
// afterwards and the URL of its NATS.
func overRestart(t *testing.T, hub *node, restart func() (*node, string)) {
	t.Helper()
	n := *delayedEvents
	lead := time.Second + time.Duration(n)*time.Second/2_500
	spread := 2*time.Second + time.Duration(n)*time.Second/2_500
	began := time.Now()
	due := func(i int) time.Time { return began.Add(lead + time.Duration(i)*spread/time.Duration(n)) }

	c := hub.dial()
	var mu sync.Mutex
	at := make(map[string]int64, n) // when each is due
	var answered sync.WaitGroup
	for i := range n {
		ms := due(i).UnixMilli()
		answered.Add(1)
		err := c.PublishAsync("later", strconv.AppendInt(nil, int64(i), 10), wire.PublishOptions{At: &ms}, func(id string, err error) {
			defer answered.Done()
			if err != nil {
				t.Errorf("publish %d: %v", i, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			at[id] = ms
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	answered.Wait()
	took := time.Since(began)
	if took > lead {
		t.Logf("the first events were due before the last was answered, which took %v", took)
	}
	<-time.After(time.Until(due(n / 2)))
	down := time.Now()
	hub, url := restart()
	up := time.Now()

	c = hub.dial()
	audit := subscribeTo(t, c, "later", "audit", wire.SubscribeOptions{From: "earliest", MaxInFlight: 10_000})
	seen := make(map[string]int, n)
	var late, lateInBetween []time.Duration
	take := func(e wire.Event) {
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
		seen[e.ID]++
		ms, known := at[e.ID]
		if !known {
			t.Errorf("%s (%s) was never answered", e.ID, e.Payload)
			return
		}
		wait := time.Duration(e.TS-ms) * time.Millisecond
		if wait < 0 {
			t.Errorf("%s was stored %v early", e.ID, -wait)
		}
		if when := time.UnixMilli(ms); when.After(down.Add(-time.Second)) && when.Before(up.Add(2*time.Second)) {
			lateInBetween = append(lateInBetween, wait)
		} else {
			late = append(late, wait)
		}
	}
	for len(seen) < n {
		select {
		case e := <-audit.events:
			take(e)
		case <-time.After(patience):
			t.Fatalf("%d of %d events are stored", len(seen), n)
		}
	}
	dueSettled(t, url)
	marker := publishTo(t, c, "later", `"marker"`)
	for e := audit.next(); e.ID != marker; e = audit.next() {
		take(e)
	}
	for id, times := range seen {
		if times != 1 {
			t.Errorf("%s is stored %d times", id, times)
		}
	}
	t.Logf("%d events: published in %v; lateness %s; due from a second before the stop to 2 s after the start, %v later: %s",
		n, took.Round(time.Millisecond), quantiles(late), up.Sub(down).Round(time.Millisecond), quantiles(lateInBetween))
}

// dueSettled waits until no event that was due is in the hands of a hub any more: what a dead hub
// held comes to another after the AckWait, and could be stored twice until then.
func dueSettled(t *testing.T, url string) {
	t.Helper()
	nc, err := nats.Connect(url, nats.Token(nodeToken))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "all events that were due are settled", func() bool {
		c, err := js.Consumer(t.Context(), "eventhub_delayed", "due")
		if err != nil {
			t.Fatal(err)
		}
		info := c.CachedInfo()
		return info.NumPending == 0 && info.NumAckPending == 0
	})
}

func quantiles(d []time.Duration) string {
	if len(d) == 0 {
		return "of none"
	}
	slices.Sort(d)
	at := func(q int) string { return d[(len(d)-1)*q/100].String() }
	return "p50 " + at(50) + ", p99 " + at(99) + ", max " + at(100) + " of " + strconv.Itoa(len(d))
}
