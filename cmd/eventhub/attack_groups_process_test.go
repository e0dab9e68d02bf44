//go:build unix

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"eventhub/projections/process"
	"eventhub/sdk/go/wire"
)

// groupAttacks are what a client can do with groups.
var groupAttacks = []attack{
	{name: "new groups", scopes: []string{"subscribe:heartbeat.received", "subscribe:dlq.mine.**"}, run: attackNewGroups, like: permittedJoins, check: checkNewGroups},
	{name: "a group with a TTL", scopes: []string{"subscribe:neighbour.bills"}, run: attackTTL, check: checkTTL},
	{name: "events of others", scopes: []string{"subscribe:neighbour.jobs"}, run: attackEvents, check: checkEvents},
	{name: "groups of others", scopes: []string{"subscribe:neighbour.jobs::mine", "subscribe:heartbeat.received"}, run: attackGroups},
}

// heldByOne is the most events that one principal holds on the hub that is attacked.
const heldByOne = 100

// attackNewGroups makes group after group, on the topic of the hub's projector and on the stream of
// all dead letters.
func attackNewGroups(ctx context.Context, a *attacker) {
	var made, refused atomic.Int64
	a.crowd(ctx, 4, func(worker, round int) {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		const atOnce, each = 32, 100 // as many as the hub carries out at a time, and more
		crowd(atOnce, func(i int) {
			for j := 0; j < each && ctx.Err() == nil; j++ {
				topic := "heartbeat.received"
				if j%2 == 0 {
					topic = "dlq.mine." + strconv.Itoa(i)
				}
				_, err := c.Subscribe(ctx, topic, fmt.Sprintf("g-%d-%d-%d-%d", worker, round, i, j), wire.SubscribeOptions{}, func(wire.Event) {})
				if err == nil {
					made.Add(1)
				} else {
					refused.Add(1)
				}
			}
		})
	})
	a.report("%d groups made, %d refused", made.Load(), refused.Load())
}

// permittedJoins joins and leaves a few groups again and again.
func permittedJoins(ctx context.Context, a *attacker) {
	a.crowd(ctx, 4, func(int, int) {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		crowd(32, func(i int) {
			for ctx.Err() == nil {
				topic := "heartbeat.received"
				if i%2 == 0 {
					topic = "dlq.mine." + strconv.Itoa(i)
				}
				s, err := c.Subscribe(ctx, topic, "permitted-"+strconv.Itoa(i), wire.SubscribeOptions{}, func(wire.Event) {})
				if err == nil {
					err = s.Unsubscribe(ctx)
				}
				if err != nil && ctx.Err() == nil {
					a.report("%v", err)
					return
				}
			}
		})
	})
}

// checkNewGroups wants others to make groups on both streams, and the projector to project.
func checkNewGroups(t *testing.T, f *floodedHub) {
	t.Helper()
	alice := f.hub.dialWith(f.sign(t, "alice", "subscribe:heartbeat.received", "subscribe:dlq.**"))
	for _, topic := range []string{"heartbeat.received", "dlq.others"} {
		if _, err := alice.Subscribe(t.Context(), topic, "alices", wire.SubscribeOptions{}, func(wire.Event) {}); err != nil {
			t.Errorf("the group of another client on %s: %v", topic, err)
		}
	}
	publishTo(t, f.hub.dial(), process.TopicHeartbeat, `{"pid":7,"name":"x","host":"h","cpu_pct":0,"mem_mb":0}`)
	waitFor(t, "the heartbeat is projected", func() bool {
		status, _ := askWith(t.Context(), nodeToken, http.MethodGet, f.hub.http+"/snap/process.state/h:x:7", nil)
		return status == http.StatusOK
	})
	if status, text := askWith(t.Context(), nodeToken, http.MethodGet, f.hub.ops+"/readyz", nil); status != http.StatusOK || !strings.Contains(text, `"projector":"ok"`) {
		t.Errorf("/readyz: %d %s", status, text)
	}
}

// attackTTL makes the group of the neighbour before the neighbour does, so that it ends soon after
// its last member has left.
func attackTTL(ctx context.Context, a *attacker) {
	c := a.dial(ctx)
	if c == nil {
		return
	}
	defer c.Abort()
	_, err := c.Subscribe(ctx, "neighbour.bills", "billing", wire.SubscribeOptions{GroupTTLMS: 5000}, func(wire.Event) {})
	a.report("the group was made: %v", err)
	<-ctx.Done()
}

// checkTTL makes such a group once more, whose time is short. The group stays once its owner has
// joined it, for however long the owner is away.
func checkTTL(t *testing.T, f *floodedHub) {
	t.Helper()
	const n = 10
	const ttl = time.Second // the shortest
	attacker := f.hub.dialWith(f.sign(t, "attacker-a-group-with-a-TTL", "subscribe:neighbour.bills"))
	if _, err := attacker.Subscribe(t.Context(), "neighbour.bills", "reminders", wire.SubscribeOptions{GroupTTLMS: ttl.Milliseconds()}, func(wire.Event) {}); err != nil {
		t.Fatal(err)
	}
	token := f.sign(t, "neighbour", "*:neighbour.**")
	events := make(chan wire.Event, n)
	join := func() *wire.Conn {
		c := f.hub.dialWith(token)
		if _, err := c.Subscribe(t.Context(), "neighbour.bills", "reminders", wire.SubscribeOptions{}, func(e wire.Event) { events <- e }); err != nil {
			t.Fatal(err)
		}
		return c
	}
	owner := join()
	attacker.Abort()
	if err := owner.Close(); err != nil {
		t.Fatal(err)
	}
	publisher := f.hub.dialWith(token)
	for i := range n {
		publishTo(t, publisher, "neighbour.bills", strconv.Itoa(i))
	}
	f.pass(3 * ttl)
	join()
	came := make(map[string]bool) // one that was on its way to the owner before comes later
	for len(came) < n {
		select {
		case e := <-events:
			if err := e.Ack(); err != nil {
				t.Error(err)
			}
			came[string(e.Payload)] = true
		case <-time.After(patience):
			t.Fatalf("the owner of the group has lost %d of %d events", n-len(came), n)
		}
	}
}

// attackEvents joins the group of the neighbour, takes all that it gets, and settles nothing.
func attackEvents(ctx context.Context, a *attacker) {
	var held atomic.Int64
	for range 2 {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		_, err := c.Subscribe(ctx, "neighbour.jobs", "workers", wire.SubscribeOptions{MaxInFlight: 10_000, BatchSize: 10_000, AckTimeoutMS: 43_200_000}, func(wire.Event) { held.Add(1) })
		if err != nil {
			a.report("subscribe: %v", err)
		}
	}
	<-ctx.Done()
	a.report("%d events held", held.Load())
}

// checkEvents lets the attack take events once more while the neighbour works. The neighbour gets
// all but the few that one principal may hold at once, and these when the attacker has gone.
func checkEvents(t *testing.T, f *floodedHub) {
	t.Helper()
	const n = 1000
	token := f.sign(t, "neighbour", "*:neighbour.**")
	p := startAttackers(t, attackTarget{WS: f.hub.url, HTTP: f.hub.http, Ops: f.hub.ops, Plans: []attackPlan{{Name: "events of others", Token: f.sign(t, "attacker-events", "subscribe:neighbour.jobs")}}})
	publisher := f.hub.dialWith(token)
	for range n {
		publishTo(t, publisher, "neighbour.jobs", "1")
	}
	var settled atomic.Int64
	worker := f.hub.dialWith(token)
	if _, err := worker.Subscribe(t.Context(), "neighbour.jobs", "workers", wire.SubscribeOptions{From: "earliest"}, func(e wire.Event) {
		if err := e.Ack(); err != nil {
			t.Error(err)
		}
		settled.Add(1)
	}); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the neighbour has what the attacker may not hold", func() bool { return settled.Load() >= n-heldByOne })
	p.stop()
	waitFor(t, "the neighbour has all", func() bool { return settled.Load() >= n })
}

// attackGroups tries to join groups that its token does not name, and one of the hub's own.
func attackGroups(ctx context.Context, a *attacker) {
	tries := [][2]string{{"neighbour.jobs", "workers"}, {"neighbour.jobs", "mine2"}, {"neighbour.jobs", "*"}, {process.TopicHeartbeat, process.Group}}
	refused := 0
	a.crowd(ctx, 1, func(int, int) {
		c := a.dial(ctx)
		if c == nil {
			return
		}
		defer c.Abort()
		for _, try := range tries {
			_, err := c.Subscribe(ctx, try[0], try[1], wire.SubscribeOptions{}, func(wire.Event) {})
			switch {
			case err == nil:
				a.report("joined %s::%s", try[0], try[1])
				_ = syscall.Kill(os.Getpid(), syscall.SIGABRT) // the test notices
			case strings.Contains(err.Error(), "forbidden"):
				refused++
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	})
	a.report("refused %d times", refused)
}
