package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/natstest/lossyfs"
	"eventhub/sdk/go/wire"
)

var (
	crashRounds  = flag.Int("crash.rounds", 1, "how often each setting meets a crash of the machine that keeps nothing unsynced, and as often one that keeps a random part")
	crashSeed    = flag.Uint64("crash.seed", 1, "the seed of what such a crash keeps")
	crashCluster = flag.Bool("crash.cluster", false, "crash machines of a cluster as well")
	crashFor     = flag.Duration("crash.for", 500*time.Millisecond, "how long there is load before a crash, at least; where a setting may lose what is young, 2 s")
)

// crashLimits let a test publish as fast as it can.
var crashLimits = []string{"--limit-frames=off", "--limit-settles=off", "--limit-topic-publishes=off", "--limit-principal-publishes=off"}

// okayed is what a hub answered OK, and when.
type okayed struct {
	mu   sync.Mutex
	when map[string]time.Time
}

func (a *okayed) add(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.when == nil {
		a.when = map[string]time.Time{}
	}
	a.when[what] = time.Now()
}

// crashLoad is what goes on while the machine crashes. Events are named by their payloads.
type crashLoad struct {
	events, keys, letters, delayed, acked okayed
	wg                                    sync.WaitGroup
}

const crashKeys = 50

// startCrashLoad publishes until the hub is gone, with one publish in flight for each kind, and
// acknowledges every other event.
func startCrashLoad(t *testing.T, hub *node) *crashLoad {
	t.Helper()
	l := &crashLoad{}
	never, one := 0, 1
	worker := hub.dial()
	work := make(chan wire.Event, 100_000)
	for topic, opts := range map[string]wire.SubscribeOptions{
		"numbers": {MaxInFlight: 10_000, MaxAttempts: &never},
		"broken":  {MaxInFlight: 100, MaxAttempts: &one},
	} {
		if _, err := worker.Subscribe(t.Context(), topic, "worker", opts, func(e wire.Event) { work <- e }); err != nil {
			t.Fatal(err)
		}
	}
	letters := hub.dial()
	seen := make(chan wire.Event, 1000)
	if _, err := letters.Subscribe(t.Context(), "dlq.broken", "audit", wire.SubscribeOptions{}, func(e wire.Event) { seen <- e }); err != nil {
		t.Fatal(err)
	}
	l.wg.Go(func() {
		for {
			select {
			case e := <-work:
				l.work(t, e)
			case <-worker.Done():
				return
			}
		}
	})
	l.wg.Go(func() {
		for {
			select {
			case e := <-seen:
				var letter struct {
					Original struct{ Payload json.RawMessage }
				}
				if json.Unmarshal(e.Payload, &letter) == nil {
					l.letters.add(string(letter.Original.Payload))
				}
				_ = e.Ack()
			case <-letters.Done():
				return
			}
		}
	})
	publish := func(done *okayed, topic string, opts func(i int) wire.PublishOptions, name func(i int) string) {
		c := hub.dial()
		l.wg.Go(func() {
			for i := 0; ; i++ {
				id, err := c.Publish(t.Context(), topic, []byte(name(i)), opts(i))
				if err != nil {
					return
				}
				if topic == "later" {
					done.add(id) // as they are listed
				} else {
					done.add(name(i))
				}
			}
		})
	}
	plain := func(int) wire.PublishOptions { return wire.PublishOptions{} }
	number := strconv.Itoa
	publish(&l.events, "numbers", plain, number)
	publish(&l.keys, "process.state", func(i int) wire.PublishOptions {
		return wire.PublishOptions{Key: strconv.Itoa(i % crashKeys)}
	}, number)
	publish(&l.delayed, "later", func(int) wire.PublishOptions { return wire.PublishOptions{DelayMS: 3_600_000} }, number)
	publish(&okayed{}, "broken", plain, number)
	return l
}

// work settles an event as its topic wants.
func (l *crashLoad) work(t *testing.T, e wire.Event) {
	t.Helper()
	if e.Topic == "broken" {
		_ = e.Nack("broken", 0)
		return
	}
	if number(t, e)%2 == 0 && e.AckWait(t.Context()) == nil {
		l.acked.add(string(e.Payload))
	}
}

// crashLoss is what is lost of a kind.
type crashLoss struct {
	kind     string
	answered int
	lost     int
	oldest   time.Duration // how long before the crash the oldest of them was answered
}

func (a *okayed) loss(kind string, crashed time.Time, there func(string) bool) crashLoss {
	a.mu.Lock()
	defer a.mu.Unlock()
	loss := crashLoss{kind: kind, answered: len(a.when)}
	for what, when := range a.when {
		if !there(what) {
			loss.lost++
			loss.oldest = max(loss.oldest, crashed.Sub(when))
		}
	}
	return loss
}

// export returns the payloads of a topic, and those that are there twice.
func (n *node) export(topic string) (payloads map[string]int) {
	n.t.Helper()
	payloads = map[string]int{}
	ids := map[string]bool{}
	for line := range strings.Lines(n.get("/export?ndjson=1&topic=" + topic)) {
		var e struct {
			ID      string
			Payload json.RawMessage
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			n.t.Fatalf("%s: %v", line, err)
		}
		if ids[e.ID] {
			n.t.Errorf("%s has two events with id %s", topic, e.ID)
		}
		ids[e.ID] = true
		payloads[string(e.Payload)]++
	}
	return payloads
}

// newestOfKeys returns the payload of each key of process.state, and -1 where there is none. It
// reads from the leader: the copies of other servers may still lag.
func (n *node) newestOfKeys(keys int) map[int]int {
	n.t.Helper()
	newest := map[int]int{}
	query := url.Values{"consistent": {"true"}}
	for key := range keys {
		newest[key] = -1
		query.Add("keys", strconv.Itoa(key))
	}
	var page struct {
		Items []struct {
			Key     string
			Payload int
		}
	}
	if err := json.Unmarshal([]byte(n.get("/snap/process.state?"+query.Encode())), &page); err != nil {
		n.t.Fatal(err)
	}
	for _, e := range page.Items {
		key, err := strconv.Atoi(e.Key)
		if err != nil {
			n.t.Fatal(err)
		}
		newest[key] = e.Payload
	}
	return newest
}

// losses compares what was answered with what is there.
func (l *crashLoad) losses(t *testing.T, hub *node, crashed time.Time) []crashLoss {
	t.Helper()
	stored := hub.export("numbers")
	for n, times := range stored {
		if times != 1 {
			t.Errorf("event %s is there %d times", n, times)
		}
	}
	newest := hub.newestOfKeys(crashKeys)
	letters := map[string]bool{}
	for line := range strings.Lines(hub.get("/export?ndjson=1&topic=dlq.broken")) {
		var e struct {
			Payload struct {
				Original struct{ Payload json.RawMessage }
			}
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		letters[string(e.Payload.Original.Payload)] = true
	}
	waiting := map[string]bool{}
	next := ""
	for {
		answered := false
		var page struct {
			Delayed []struct{ ID string }
			Next    string
		}
		askOps(t, hub, http.MethodGet, "/topics/later/delayed?limit=100&next="+url.QueryEscape(next), func(line string) bool {
			answered = true
			if err := json.Unmarshal([]byte(line), &page); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			return true
		})
		if !answered {
			t.Fatal("the delayed events are not listed")
		}
		for _, e := range page.Delayed {
			waiting[e.ID] = true
		}
		if next = page.Next; next == "" {
			break
		}
	}
	return []crashLoss{
		l.events.loss("events", crashed, func(n string) bool { return stored[n] > 0 }),
		l.keys.loss("keys", crashed, func(n string) bool { i, _ := strconv.Atoi(n); return newest[i%crashKeys] >= i }),
		l.letters.loss("dead letters", crashed, func(n string) bool { return letters[n] }),
		l.delayed.loss("delayed events", crashed, func(n string) bool { return waiting[n] }),
	}
}

// crashSetting is how an embedded server stores.
type crashSetting struct {
	name  string
	flags []string
	async bool
	// full fills the disk under load and kills the hub, instead of a crash of the machine.
	full bool
	// bound is how old what is lost may be; with async and full, before the disk was full.
	bound time.Duration
}

var crashSettings = []crashSetting{
	{name: "always", flags: []string{"--sync=always"}},
	{name: "an interval", flags: []string{"--sync=1s"}, bound: 3 * time.Second},
	{name: "persist_mode async", flags: []string{"--sync=1s"}, async: true, bound: 3 * time.Second},
	{name: "a full disk and an interval", flags: []string{"--sync=1s"}, full: true},
	{name: "a full disk and always", flags: []string{"--sync=always"}, full: true},
	{name: "a full disk and persist_mode async", flags: []string{"--sync=1s"}, async: true, full: true, bound: time.Second},
}

// makeAsync makes the streams of the load with the server's own persist_mode async.
func makeAsync(t *testing.T, hub *node) {
	t.Helper()
	nc, err := nats.Connect(hub.nats, nats.Token(nodeToken))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range []string{"numbers", "broken"} {
		if _, err := js.CreateStream(t.Context(), natsjs.StreamConfig{
			Name: topic, Subjects: []string{"event." + topic, "keyed.*." + topic}, PersistMode: natsjs.AsyncPersistMode, AllowDirect: true,
		}); err != nil {
			t.Fatal(err)
		}
	}
}

func crashOnce(t *testing.T, setting crashSetting, random *rand.Rand) {
	t.Helper()
	disk := lossyfs.Mount(t)
	flags := append([]string{"--data=" + filepath.Join(disk.Dir(), "data"), "--nats-listen=127.0.0.1:0"}, append(setting.flags, crashLimits...)...)
	hub := startNode(t, flags...)
	if setting.async {
		makeAsync(t, hub)
	}
	load := startCrashLoad(t, hub)
	// A topic or a group that was made within the interval may be lost as a whole.
	eventually(t, "all topics and groups are synced", func() bool { return len(disk.Unsynced("meta.inf"))+len(disk.Unsynced("meta.sum")) == 0 })
	during := *crashFor
	if setting.bound > 0 {
		during = max(during, 2*time.Second)
	}
	<-time.After(during)
	bound := setting.bound
	full := time.Now()
	if setting.full {
		disk.SetRoom(0)
		<-time.After(during)
	}
	crashed := time.Now()
	if setting.full && setting.async {
		bound += crashed.Sub(full) // what was answered since then could not be written
	}
	if setting.full {
		hub.kill()
		disk.SetRoom(-1)
	} else {
		disk.Crash(random, func() { hub.signal(syscall.SIGKILL) }, func() { <-hub.ended })
	}
	load.wg.Wait()

	hub = startNode(t, flags...)
	for _, loss := range load.losses(t, hub, crashed) {
		if loss.lost > 0 && loss.oldest > bound {
			t.Errorf("%d %s of %d are lost, the oldest was answered %v before the crash", loss.lost, loss.kind, loss.answered, loss.oldest)
		}
		t.Logf("%-15s answered %6d  lost %5d  oldest %v", loss.kind, loss.answered, loss.lost, loss.oldest.Round(time.Millisecond))
	}
	checkGroup(t, hub, load, crashed)
	hub.terminate()
	t.Logf("unsynced bytes that were lost: %d; syncs: %d", disk.Lost(), disk.Syncs())
}

// checkGroup consumes what the group has left, and some more.
func checkGroup(t *testing.T, hub *node, load *crashLoad, crashed time.Time) {
	t.Helper()
	stored := hub.export("numbers")
	c := hub.dial()
	never := 0
	worker := subscribeTo(t, c, "numbers", "worker", wire.SubscribeOptions{MaxInFlight: 10_000, MaxAttempts: &never})
	missing := map[string]bool{}
	for n := range stored {
		if _, acked := load.acked.when[n]; !acked {
			missing[n] = true
		}
	}
	// Events after a crash get the sequences of events that were lost: they must come all the same.
	for i := range 20 {
		name := strconv.Itoa(-1 - i)
		publishTo(t, c, "numbers", name)
		missing[name] = true
	}
	again, oldest := 0, time.Duration(0)
	for len(missing) > 0 {
		var e wire.Event
		select {
		case e = <-worker.events:
		case <-time.After(patience):
			t.Errorf("the group misses %d events, such as %s", len(missing), some(missing))
			return
		}
		n := string(e.Payload)
		if at, acked := load.acked.when[n]; acked {
			again++
			oldest = max(oldest, crashed.Sub(at))
		}
		delete(missing, n)
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%-15s answered %6d  again %4d  oldest %v", "acknowledged", len(load.acked.when), again, oldest.Round(time.Millisecond))
}

func some(m map[string]bool) string {
	for k := range m {
		return fmt.Sprintf("%q", k)
	}
	return ""
}
