//go:build unix

package main

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// quietFor is how long after the end of all traffic all figures are equal.
const quietFor = 5 * time.Second

// unsteady is traffic of random events, acks, nacks and leases that end.
type unsteady struct {
	t      *testing.T
	topics []string
	groups []string
	still  atomic.Bool // members keep what they have
	stop   chan struct{}
	wg     sync.WaitGroup
}

// join has members of all groups on a hub, and a publisher. Errors are those of a hub or a server
// that was killed.
func (u *unsteady) join(hub *node, seed uint64) {
	u.t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	c := hub.dial()
	var mu sync.Mutex
	never := 0
	for _, topic := range u.topics {
		for _, group := range u.groups {
			opts := wire.SubscribeOptions{From: "earliest", MaxInFlight: 20, AckTimeoutMS: 1_000, MaxAttempts: &never}
			ctx, cancel := context.WithTimeout(u.t.Context(), 2*patience)
			_, err := c.Subscribe(ctx, topic, group, opts, func(e wire.Event) {
				mu.Lock()
				what := random.IntN(10)
				mu.Unlock()
				switch {
				case u.still.Load() || what == 0: // the lease ends
				case what == 1:
					_ = e.Nack("random", wire.DefaultBackoff)
				default:
					_ = e.Ack()
				}
			})
			cancel()
			if err != nil {
				u.t.Fatal(err)
			}
		}
	}
	u.wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-u.stop:
				return
			case <-c.Done():
				return
			case <-time.After(5 * time.Millisecond):
			}
			_ = c.PublishAsync(u.topics[n%len(u.topics)], []byte(strconv.Itoa(n)), wire.PublishOptions{}, func(string, error) {})
		}
	})
}

// TestFiguresAreEqual kills a hub and a server of three under random traffic, with a group that was
// moved, a paused one, and events that were put back. 5 s after the traffic has ended, the figures
// of the consumers are those in /lag, in /metrics and on the page, at both hubs.
func TestFiguresAreEqual(t *testing.T) {
	t.Parallel()
	nodes := natstest.StartCluster(t, 3)
	v := natstest.Look(t, natstest.URLs(nodes)...)
	v.Replicating(3)
	flags := []string{"--nats-url=" + strings.Join(natstest.URLs(nodes), ","), "--replicas=3", "--ack-wait=10s"}
	hubs := []*node{startNode(t, flags...), startNode(t, flags...)}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)

	// a group with events that were put back, of which none is delivered
	c := hubs[0].dial()
	one := 1
	refused := subscribeTo(t, c, "letters", "failing", wire.SubscribeOptions{From: "earliest", MaxAttempts: &one})
	publishNumbers(t, c, "letters", 5)
	for _, e := range refused.take(5) {
		if err := e.Nack("no", wire.DefaultBackoff); err != nil {
			t.Fatal(err)
		}
	}
	v.Until("the dead letters are stored", func(context.Context) bool {
		_, body := request(t, http.MethodGet, hubs[0].ops+"/dlq/counts?topic=letters", nodeToken)
		return strings.Contains(body, `"total":5`)
	})
	c.Abort()
	if status, body := request(t, http.MethodPost, hubs[0].ops+"/dlq/redrive?topic=letters&group=failing", nodeToken); status != http.StatusOK || !strings.Contains(body, `"done":5`) {
		t.Fatalf("redrive: %d %s", status, body)
	}

	u := &unsteady{t: t, topics: []string{"first", "second"}, groups: []string{"billing", "shipping"}, stop: make(chan struct{})}
	defer u.wg.Wait()
	ended := sync.OnceFunc(func() { close(u.stop) })
	defer ended()
	u.join(hubs[0], seed)
	u.join(hubs[1], seed+1)
	change := func(method, path, body string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, hubs[0].ops+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+nodeToken)
		for end := time.Now().Add(3 * patience); ; {
			if r.Body, err = r.GetBody(); err != nil {
				t.Fatal(err)
			}
			answer, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = answer.Body.Close()
			if answer.StatusCode < 300 {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s %s: %d", method, path, answer.StatusCode)
			}
			<-time.After(100 * time.Millisecond)
		}
	}
	pass := func() { <-time.After(time.Duration(200+rand.IntN(400)) * time.Millisecond) }
	pass()
	change(http.MethodPut, "/groups/first/billing/cursor", `{"to":"earliest"}`)
	pass()
	hubs[1].kill()
	killed := nodes[rand.IntN(3)]
	killed.Kill()
	pass()
	change(http.MethodPost, "/groups/second/shipping/pause", "")
	killed.Start()
	hubs[1] = startNode(t, flags...)
	u.join(hubs[1], seed+2)
	pass()
	u.still.Store(true)
	ended()
	u.wg.Wait()
	<-time.After(quietFor)

	// The consumers may still move on by themselves where a machine is slow. Figures count while
	// they stand still.
	now := func() map[groupName]groupFigures {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		figures, err := serverFigures(ctx, v)
		if err != nil {
			t.Logf("the servers: %v", err)
		}
		return figures
	}
	end := time.Now().Add(6 * patience)
	for before := now(); ; before = now() {
		said := figuresOf(t, hubs, before)
		want := text(t, before)
		if before == nil || text(t, now()) != want {
			if time.Now().After(end) {
				t.Fatal("the consumers move on")
			}
			<-time.After(scrapeEvery)
			continue
		}
		for where, got := range said {
			if got != want {
				t.Errorf("the server has\n%s\nand %s has\n%s", want, where, got)
			}
		}
		if len(before) != 5 || before[groupName{"letters", "failing"}] != (groupFigures{pending: 5}) {
			t.Errorf("the groups are %v", before)
		}
		return
	}
}

// figuresOf returns what hubs say of groups, by where they say so.
func figuresOf(t *testing.T, hubs []*node, groups map[groupName]groupFigures) map[string]string {
	t.Helper()
	said := make(map[string]string)
	for i, hub := range hubs {
		name := "of hub " + strconv.Itoa(i)
		_, body := request(t, http.MethodGet, hub.ops+"/metrics", nodeToken)
		said["/metrics "+name] = text(t, metricFigures(t, body))
		said["/groups "+name] = text(t, hub.listedFigures())
		lags := make(map[groupName]groupFigures)
		for at := range groups {
			lag := hub.lagOf(at)
			lags[at] = groupFigures{lag.Pending, lag.InFlight}
			if lag.Backlog > 0 != (lag.LagMS > 0) {
				t.Errorf("%v has %+v %s", at, lag, name)
			}
		}
		said["/lag "+name] = text(t, lags)
	}
	return said
}

// text is figures as JSON, in order.
func text(t *testing.T, figures map[groupName]groupFigures) string {
	t.Helper()
	all := make(map[string][2]uint64)
	for at, f := range figures {
		all[at.topic+" "+at.group] = [2]uint64{f.pending, f.inFlight}
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
