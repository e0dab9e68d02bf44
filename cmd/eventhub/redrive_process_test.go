//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

var (
	redriveLetters = flag.Int("redrive.letters", 150, "dead letters that are redriven while hubs are killed")
	redriveKills   = flag.Int("redrive.kills", 2, "how often a hub is killed meanwhile")
)

// redriveLimits let a test publish and refuse as fast as it can.
var redriveLimits = slices.Clip([]string{"--limit-frames=1000000/1000000", "--limit-settles=1000000/1000000", "--limit-topic-publishes=1000000/1000000", "--limit-principal-publishes=1000000/1000000"})

// askOps asks a hub's operations port, and gives the lines of the answer to line until that returns
// false, or the hub dies.
func askOps(t *testing.T, n *node, method, path string, line func(string) bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, n.ops+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+nodeToken)
	r.Header.Set("Accept", "application/x-ndjson")
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return // it was killed
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(res.Body)
		t.Fatalf("%s: %d %s", path, res.StatusCode, text)
	}
	in := bufio.NewScanner(res.Body)
	for in.Scan() && line(in.Text()) {
	}
}

func lettersLeft(t *testing.T, n *node) int {
	t.Helper()
	var counts struct{ Total int }
	askOps(t, n, http.MethodGet, "/dlq/counts", func(line string) bool {
		if err := json.Unmarshal([]byte(line), &counts); err != nil {
			t.Fatal(err)
		}
		return true
	})
	return counts.Total
}

// redriveUntil redrives all letters. With kill, it calls that once, a moment after so many were
// done, in the middle of a batch.
func redriveUntil(t *testing.T, n *node, after int, kill func()) {
	t.Helper()
	killed := kill == nil
	askOps(t, n, http.MethodPost, "/dlq/redrive?topic=redrive&all=1&rate=10000", func(line string) bool {
		var progress struct {
			Done  int
			Code  string
			Error string
		}
		if err := json.Unmarshal([]byte(line), &progress); err != nil || progress.Code != "" {
			t.Errorf("redrive: %s %v", line, err)
		}
		if !killed && progress.Done >= after {
			killed = true
			<-time.After(rand.N(20 * time.Millisecond))
			kill()
			return false
		}
		return true
	})
	if !killed {
		kill()
	}
}

// failAll makes a dead letter of each of n events, and returns the bystander, who has seen all of
// them.
func failAll(t *testing.T, hub *node, n int) {
	t.Helper()
	c := hub.dial()
	one := 1
	in := subscribeTo(t, c, "redrive", "g", wire.SubscribeOptions{From: "earliest", MaxAttempts: &one, MaxInFlight: 1000})
	ids := make(chan error, n)
	for i := range n {
		if err := c.PublishAsync("redrive", []byte(`{"n":`+strings.Repeat("1", 1+i%9)+`}`), wire.PublishOptions{Key: "k"}, func(_ string, err error) { ids <- err }); err != nil {
			t.Fatal(err)
		}
	}
	for range n {
		if err := <-ids; err != nil {
			t.Fatal(err)
		}
		e := in.next()
		if err := e.Nack("broken", 0); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.After(2 * time.Minute)
	for tick := time.Tick(50 * time.Millisecond); lettersLeft(t, hub) < n; {
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("%d letters of %d", lettersLeft(t, hub), n)
		}
	}
	c.Abort()
}

// copies returns how many copies were ever put back, and how many are left.
func copies(t *testing.T, url, token string) (stored, left uint64) {
	t.Helper()
	nc, err := nats.Connect(url, nats.Token(token))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), "EVENTHUB_PUTBACK")
	if err != nil {
		t.Fatal(err)
	}
	state := s.CachedInfo().State
	return state.LastSeq, state.Msgs
}

// The hub that redrives is killed again and again, and the redrive is repeated. Each event is put
// back once and delivered once, with attempt 1, to a member on another hub; no other group sees
// one.
func TestRedriveWhileItsHubIsKilled(t *testing.T) {
	t.Parallel()
	n := *redriveLetters
	url := runNATS(t)
	flags := append(redriveLimits, "--nats-url="+url)
	hub, other := startNode(t, flags...), startNode(t, flags...)
	failAll(t, hub, n)
	c := other.dial()
	bystander := subscribeTo(t, c, "redrive", "bystander", wire.SubscribeOptions{From: "latest"})
	in := subscribeTo(t, c, "redrive", "g", wire.SubscribeOptions{MaxInFlight: 100})
	began := time.Now()
	for kills := *redriveKills; kills > 0; kills-- {
		redriveUntil(t, hub, lettersLeft(t, hub)/(kills+1), hub.kill)
		hub = startNode(t, flags...)
	}
	redriveUntil(t, hub, 0, nil)
	seen := make(map[string]bool)
	for range n {
		e := in.next()
		if seen[e.ID] || e.Attempt != 1 {
			t.Errorf("event %s came with attempt %d; seen before: %v", e.ID, e.Attempt, seen[e.ID])
		}
		seen[e.ID] = true
		if err := e.AckWait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d letters, %d kills, %v", n, *redriveKills, time.Since(began).Round(time.Millisecond))
	in.onlyMarker(c, "redrive")
	bystander.next() // the same marker
	bystander.onlyMarker(c, "redrive")
	if left := lettersLeft(t, hub); left != 0 {
		t.Errorf("%d letters are left", left)
	}
	if stored, left := copies(t, url, ""); stored != uint64(n) || left != 0 {
		t.Errorf("%d copies were made, %d are left", stored, left)
	}
}

// A hub with its embedded server, the redrive and the members is killed again and again. Each event
// is put back once, and comes again only if its delivery was not settled.
func TestRedriveWhileItsServerIsKilled(t *testing.T) {
	t.Parallel()
	n := *redriveLetters
	flags := append(redriveLimits, "--data="+t.TempDir(), "--nats-listen=127.0.0.1:0")
	hub := startNode(t, flags...)
	failAll(t, hub, n)
	subscribeTo(t, hub.dial(), "redrive", "bystander", wire.SubscribeOptions{From: "latest"})

	var mu sync.Mutex
	acked, seen, delivered := make(map[string]time.Time), make(map[string]bool), 0
	killed := time.Time{} // the last time
	never := 0
	join := func() *wire.Conn {
		c := hub.dial()
		work := make(chan wire.Event, 1000)
		if _, err := c.Subscribe(t.Context(), "redrive", "g", wire.SubscribeOptions{MaxAttempts: &never, MaxInFlight: 100}, func(e wire.Event) { work <- e }); err != nil {
			t.Fatal(err)
		}
		go func() {
			for {
				select {
				case e := <-work:
					mu.Lock()
					delivered++
					seen[e.ID] = true
					if at, ok := acked[e.ID]; ok && at.Before(killed.Add(-settledFor)) {
						t.Errorf("event %s came again (attempt %d), acknowledged %v before the kill", e.ID, e.Attempt, killed.Sub(at))
					}
					mu.Unlock()
					if e.AckWait(context.Background()) == nil {
						mu.Lock()
						acked[e.ID] = time.Now()
						mu.Unlock()
					}
				case <-c.Done():
					return
				}
			}
		}()
		return c
	}
	began := time.Now()
	for kills := *redriveKills; kills > 0; kills-- {
		c := join()
		redriveUntil(t, hub, lettersLeft(t, hub)/(kills+1), func() {
			mu.Lock()
			killed = time.Now()
			mu.Unlock()
			hub.kill()
		})
		<-c.Done()
		hub = startNode(t, flags...)
	}
	c := join()
	redriveUntil(t, hub, 0, nil)
	deadline := time.After(2 * time.Minute)
	for tick := time.Tick(20 * time.Millisecond); ; {
		stored, left := copies(t, hub.nats, nodeToken)
		mu.Lock()
		came := len(seen)
		mu.Unlock()
		if left == 0 { // each was acknowledged, though the server may have died before its OK
			if came != n || stored != uint64(n) {
				t.Errorf("%d copies were made of %d letters, and %d events came", stored, n, came)
			}
			break
		}
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("%d of %d events came, %d copies are left of %d", came, n, left, stored)
		}
	}
	t.Logf("%d letters, %d kills, %d deliveries, %v", n, *redriveKills, delivered, time.Since(began).Round(time.Millisecond))
	if left := lettersLeft(t, hub); left != 0 {
		t.Errorf("%d letters are left", left)
	}
	c.Abort()
	c = hub.dial()
	subscribeTo(t, c, "redrive", "bystander", wire.SubscribeOptions{}).onlyMarker(c, "redrive")
}
