//go:build unix

package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// The long form of TestLagOfManyGroups; see task lag.
var (
	lagGroups  = flag.Int("lag.groups", 20, "how many groups there are")
	lagScrapes = flag.Int("lag.scrapes", 3, "how often each hub is scraped")
	lagEvents  = flag.Int("lag.events", 500, "how many events the burst has")
	lagBound   = flag.Duration("lag.bound", 0, "how long a scrape may take; 0 is without a bound")
)

// The groups of TestLagOfManyGroups are spread over lagTopics topics. Each holds leases on lagHeld
// events.
const (
	lagTopics = 10
	lagHeld   = 2
	// scrapeEvery is longer than scrapes of /metrics share their figures.
	scrapeEvery = 1100 * time.Millisecond
)

// TestLagOfManyGroups has many groups with pending and leased events on two hubs. Scrapes of
// /metrics, /lag and /cursors have the figures of the server, also after a burst of events, and the
// memory of the hubs stays flat. A group that consumes the burst has no lag after it.
func TestLagOfManyGroups(t *testing.T) {
	t.Parallel()
	server := natstest.Start(t)
	flags := []string{"--nats-url=" + server.URL(), "--limit-subscriptions=10000", "--limit-frames=off", "--limit-new-groups=100000", "--limit-principal-groups=100000"}
	// The memory of a hub grows until its heap has reached the floor for the first time, unless
	// GOGC is set.
	soon := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "GOGC=100") }
	hubs := []*node{startNodeWith(t, soon, flags...), startNodeWith(t, soon, flags...)}
	clients := []*wire.Conn{hubs[0].dial(), hubs[1].dial()}
	topic := func(i int) string { return "many." + strconv.Itoa(i%lagTopics) }

	// a burst, consumed by one group
	one := 1
	consumed := make(chan struct{}, *lagEvents)
	subscribe := func(c *wire.Conn, topic, group string, opts wire.SubscribeOptions, f func(wire.Event)) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := c.Subscribe(ctx, topic, group, opts, f); err != nil {
			t.Fatal(err)
		}
	}
	subscribe(clients[0], "burst", "worker", wire.SubscribeOptions{MaxInFlight: 1_000, MaxAttempts: &one}, func(e wire.Event) {
		if err := e.Ack(); err != nil {
			t.Error(err)
		}
		consumed <- struct{}{}
	})
	burst := func(topicOf func(i int) string, n int) {
		t.Helper()
		var left sync.WaitGroup
		for i := range n {
			left.Add(1)
			err := clients[1].PublishAsync(topicOf(i), []byte(strconv.Itoa(i)), wire.PublishOptions{}, func(_ string, err error) {
				if err != nil {
					t.Error(err)
				}
				left.Done()
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		left.Wait()
	}
	burst(func(int) string { return "burst" }, *lagEvents)
	after := time.Now()
	for range *lagEvents {
		select {
		case <-consumed:
		case <-time.After(patience):
			t.Fatal("the burst was not delivered")
		}
	}
	worker := groupName{"burst", "worker"}
	v := natstest.Look(t, server.URL())
	v.Until("the acks of the burst have arrived", func(context.Context) bool { return hubs[1].lagOf(worker).Backlog == 0 })
	t.Logf("%v after a burst of %d events all are settled", time.Since(after), *lagEvents)
	for _, hub := range hubs {
		if lag := hub.lagOf(worker); lag != (lagAnswer{}) {
			t.Errorf("after the burst the lag is %+v", lag)
		}
	}

	// many groups that lag, from events of their own on
	burst(topic, *lagEvents)
	var held sync.WaitGroup
	held.Add(*lagGroups * lagHeld)
	for i := range *lagGroups {
		opts := wire.SubscribeOptions{From: "afterId", AfterID: fmt.Sprintf("many=2E%d@%d", i%lagTopics, 1+i/lagTopics), MaxInFlight: lagHeld, AckTimeoutMS: 12 * 3_600_000}
		subscribe(clients[i%2], topic(i), "group-"+strconv.Itoa(i), opts, func(wire.Event) { held.Done() })
	}
	held.Wait()
	want, err := serverFigures(t.Context(), v)
	if err != nil {
		t.Fatal(err)
	}
	if len(want) != *lagGroups+1 {
		t.Fatalf("the server has %d groups", len(want))
	}
	for i := range *lagGroups {
		have := want[groupName{topic(i), "group-" + strconv.Itoa(i)}]
		if stored := uint64(*lagEvents / lagTopics); have.inFlight != lagHeld || have.pending+lagHeld+1+uint64(i/lagTopics) != stored {
			t.Fatalf("group %d has %+v of %d events", i, have, stored)
		}
	}
	for i, hub := range hubs {
		if listed := hub.listedFigures(); !maps.Equal(listed, want) {
			t.Errorf("/groups of hub %d has %d groups with other figures than the server's %d", i, len(listed), len(want))
		}
	}
	for i, hub := range hubs {
		t.Run(fmt.Sprintf("scrapes of hub %d", i), func(t *testing.T) {
			t.Parallel()
			scraped(t, hub, want)
		})
	}
}

// scraped scrapes a hub again and again, and compares what comes with the figures of the server.
func scraped(t *testing.T, hub *node, want map[groupName]groupFigures) {
	t.Helper()
	web := &http.Client{Timeout: patience}
	defer web.CloseIdleConnections()
	get := func(path string) (string, time.Duration) {
		t.Helper()
		began := time.Now()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, hub.ops+path, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := web.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = answer.Body.Close() }()
		text, err := io.ReadAll(answer.Body)
		if err != nil || answer.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %v %.300s", path, answer.StatusCode, err, text)
		}
		return string(text), time.Since(began)
	}
	its, err := psutil.NewProcess(int32(hub.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	memory := func() uint64 {
		t.Helper()
		info, err := its.MemoryInfo()
		if err != nil {
			t.Fatal(err)
		}
		return info.RSS
	}
	names := slices.SortedFunc(maps.Keys(want), func(a, b groupName) int {
		return cmp.Or(cmp.Compare(a.topic, b.topic), cmp.Compare(a.group, b.group))
	})
	took := make(map[string][]time.Duration)
	var resident []uint64
	for i := range *lagScrapes {
		if i > 0 {
			<-time.After(scrapeEvery)
		}
		text, d := get("/metrics")
		took["/metrics"] = append(took["/metrics"], d)
		if got := metricFigures(t, text); !maps.Equal(got, want) {
			t.Fatalf("/metrics has %d groups with other figures than the server's %d", len(got), len(want))
		}
		at := names[i%len(names)]
		_, d = get("/lag?topic=" + at.topic + "&group=" + at.group)
		took["/lag"] = append(took["/lag"], d)
		if lag := hub.lagOf(at); lag.Pending != want[at].pending || lag.InFlight != want[at].inFlight {
			t.Fatalf("/lag of %v is %+v, and the server has %+v", at, lag, want[at])
		}
		_, d = get("/cursors?topic=" + at.topic)
		took["/cursors"] = append(took["/cursors"], d)
		resident = append(resident, memory())
	}
	for path, all := range took {
		t.Logf("%s: %s", path, quantiles(slices.Clone(all)))
		if worst := slices.Max(all); *lagBound > 0 && worst > *lagBound {
			t.Errorf("a scrape of %s took %v", path, worst)
		}
	}
	tenth := max(1, len(resident)/10)
	early, late := slices.Max(resident[:tenth]), slices.Max(resident[len(resident)-tenth:])
	t.Logf("resident memory: %d MiB in the first tenth of %d scrapes, %d MiB in the last", early>>20, len(resident), late>>20)
	if late > early+early/4+8<<20 {
		t.Errorf("the memory grew from %d to %d MiB", early>>20, late>>20)
	}
}
