//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/sdk/go/wire"
)

var (
	dualEvents = flag.Int("dualwrite.events", 1_000, "events of each part of TestDualWriteIsExact; 100000 is the full form")
	dualKills  = flag.Int("dualwrite.kills", 2, "how often TestDualWriteIsExact kills a hub, half of it in each part")
)

const (
	dualTopic  = "orders"
	dualMirror = "orders.v2"
	dualGroup  = "eventhub-mirrors"
	dualKeys   = 97
	// dualRules have the topic copied in versions 1 and 2.
	dualRules = `topics:
  - topic: orders
    schema: {mode: enforce, compatibility: none, mirrors: [1, 2]}
  - pattern: orders.*
    schema: {mode: enforce, of: orders}
`
	dualV1 = `{"schema":{"type":"object","required":["n"],"properties":{"n":{"type":"integer"}}}}`
	dualV2 = `{"schema":{"type":"object","required":["number"],"properties":{"number":{"type":"integer"}}},
		"up":[{"rename":{"at":"/n","to":"number","required":true}}],"down":[{"rename":{"at":"/number","to":"n","required":true}}],"force":true}`
)

// dualRun publishes numbers in version 1, the events of a key in order, while hubs are killed. A
// tenth has no key.
type dualRun struct {
	t     *testing.T
	kills int
	flags []string
	hubs  []atomic.Pointer[node]
}

func startDualRun(t *testing.T, kills, hubs int, flags ...string) *dualRun {
	t.Helper()
	rules := filepath.Join(t.TempDir(), "topics.yaml")
	if err := os.WriteFile(rules, []byte(dualRules), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &dualRun{t: t, kills: kills, flags: append([]string{"--topics=" + rules}, append(flags, crashLimits...)...), hubs: make([]atomic.Pointer[node], hubs)}
	for i := range r.hubs {
		r.hubs[i].Store(startNode(t, r.flags...))
	}
	for _, version := range []string{dualV1, dualV2} {
		if status, answer := r.hubs[0].Load().postTo("/schemas/"+dualTopic, version); status != http.StatusCreated {
			t.Fatalf("a version is not registered: %d %s", status, answer)
		}
	}
	return r
}

// dualKey is the key of a number, or "".
func dualKey(n int) string {
	if n%10 == 0 {
		return ""
	}
	return "k" + strconv.Itoa(n%dualKeys)
}

// publish publishes over the hub. Each worker has keys of its own, and publishes again with the
// same id what was not answered.
func (r *dualRun) publish(ctx context.Context) {
	var all sync.WaitGroup
	for worker := range 16 {
		all.Go(func() {
			next := worker
			for next < *dualEvents && ctx.Err() == nil {
				next = r.publishOn(ctx, next, worker)
			}
		})
	}
	all.Wait()
}

// publishOn publishes the numbers of a worker from next on over one connection, and returns the
// first that was not answered.
func (r *dualRun) publishOn(ctx context.Context, next, worker int) int {
	c, err := wire.Dial(ctx, r.hubs[0].Load().url, wire.Options{Token: nodeToken})
	if err != nil {
		<-time.After(20 * time.Millisecond) // the hub starts
		return next
	}
	defer c.Abort()
	for ; next < *dualEvents; next++ {
		if key := dualKey(next); key != "" && (next%dualKeys)%16 != worker || key == "" && (next/10)%16 != worker {
			continue
		}
		opts := wire.PublishOptions{ID: "e" + strconv.Itoa(next), Key: dualKey(next), Headers: map[string]string{"x-schema-version": "1"}}
		if _, err := c.Publish(ctx, dualTopic, fmt.Appendf(nil, `{"n":%d}`, next), opts); err != nil {
			return next
		}
	}
	return next
}

// publishNatively publishes all numbers at once.
func (r *dualRun) publishNatively(url string) {
	nc, err := nats.Connect(url)
	if err != nil {
		r.t.Error(err)
		return
	}
	defer nc.Close()
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(1_000))
	if err != nil {
		r.t.Error(err)
		return
	}
	for n := range *dualEvents {
		msg := &nats.Msg{Subject: "event." + dualTopic, Data: fmt.Appendf(nil, `{"n":%d}`, n), Header: nats.Header{"X-Schema-Version": {"1"}}}
		if key := dualKey(n); key != "" {
			msg.Subject = "keyed." + key + "." + dualTopic
		}
		if _, err := js.PublishMsgAsync(msg, natsjs.WithStallWait(patience)); err != nil {
			r.t.Error(err)
			return
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-time.After(patience):
		r.t.Error("the events were not stored")
	}
}

// copied is how many events the copy has, as far as a hub answers.
func (r *dualRun) copied() int {
	status, body := request(r.t, http.MethodGet, r.hubs[0].Load().ops+"/topics/"+dualMirror, nodeToken)
	var topic struct{ Events int }
	if status != http.StatusOK || json.Unmarshal([]byte(body), &topic) != nil {
		return 0
	}
	return topic.Events
}

// run kills hubs, one after the other, while events are copied, and checks the copies.
func (r *dualRun) run(publish func(context.Context)) {
	t := r.t
	t.Helper()
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var publishing sync.WaitGroup
	publishing.Go(func() { publish(ctx) })
	defer func() {
		cancel()
		publishing.Wait()
	}()
	limit := time.Now().Add(2*patience + time.Duration(*dualEvents)*5*time.Millisecond)
	reached := func(goal int) {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for n := r.copied(); n < goal; n = r.copied() {
			if time.Now().After(limit) {
				t.Fatalf("%d of %d events are copied", n, goal)
			}
			<-tick.C
		}
	}
	at := make([]int, 0, r.kills)
	for kill := range r.kills {
		reached(*dualEvents * (kill + 1) / (r.kills + 1))
		place := kill % len(r.hubs)
		r.hubs[place].Load().kill()
		r.hubs[place].Store(startNode(t, r.flags...))
		at = append(at, r.copied())
	}
	reached(*dualEvents)
	publishing.Wait()
	took := time.Since(began)
	until(t, "the group has settled everything", func() bool {
		return r.hubs[0].Load().lagOf(groupName{dualTopic, dualGroup}).Backlog == 0
	})
	r.check("orders.v1", "n", 1)
	r.check(dualMirror, "number", 2)
	t.Logf("%d events were copied in 2 versions in %v, over %d kills, after which %v copies were there", *dualEvents, took.Round(time.Millisecond), r.kills, at)
}

// check wants each number once in a copy, and those of a key in order.
func (r *dualRun) check(topic, member string, version int) {
	t := r.t
	t.Helper()
	last := map[string]int{}
	seen := make([]int, *dualEvents)
	lines := bufio.NewScanner(strings.NewReader(r.hubs[0].Load().get("/export?ndjson=1&topic=" + topic)))
	count := 0
	for lines.Scan() {
		var e struct {
			Key     string
			Headers map[string]string
			Payload json.RawMessage
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
		count++
		text := strings.TrimSuffix(strings.TrimPrefix(string(e.Payload), `{"`+member+`":`), "}")
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n >= *dualEvents || e.Key != dualKey(n) {
			t.Fatalf("%s has the event %s", topic, lines.Text())
		}
		var got []string
		for name, value := range e.Headers {
			if strings.EqualFold(name, "x-schema-version") {
				got = append(got, value)
			}
		}
		if len(got) != 1 || got[0] != strconv.Itoa(version) {
			t.Fatalf("an event of %s is of version %q", topic, got)
		}
		seen[n]++
		if before, ok := last[e.Key]; ok && e.Key != "" && before > n {
			t.Errorf("%s has %d after %d, of key %s", topic, n, before, e.Key)
		}
		last[e.Key] = n
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	wrong := 0
	for n, times := range seen {
		if times != 1 {
			if wrong++; wrong <= 5 {
				t.Errorf("%s has event %d %d times", topic, n, times)
			}
		}
	}
	if count != *dualEvents || wrong > 0 {
		t.Errorf("%s has %d events, want %d; %d are missing or there more than once", topic, count, *dualEvents, wrong)
	}
}

// Hubs are killed while they copy a topic in other versions. The copies have each event once, cast,
// and those of a key in order: with a server in the hub, which is killed as well, and with two hubs
// that share a NATS.
func TestDualWriteIsExact(t *testing.T) {
	t.Parallel()
	t.Run("embedded", func(t *testing.T) {
		t.Parallel()
		r := startDualRun(t, *dualKills/2, 1, "--data="+filepath.Join(t.TempDir(), "data"), "--ack-wait=5s")
		r.run(r.publish)
	})
	t.Run("shared", func(t *testing.T) {
		t.Parallel()
		url := runNATS(t)
		r := startDualRun(t, *dualKills-*dualKills/2, 2, "--nats-url="+url, "--ack-wait=5s")
		until(t, "the topic exists", func() bool {
			status, _ := request(t, http.MethodGet, r.hubs[0].Load().ops+"/topics/"+dualTopic, nodeToken)
			return status == http.StatusOK
		})
		r.run(func(context.Context) { r.publishNatively(url) })
	})
}
