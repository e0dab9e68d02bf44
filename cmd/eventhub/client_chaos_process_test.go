//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	eventhub "eventhub/sdk/go"
)

var (
	chaosEvents = flag.Int("chaos.events", 2_000, "events that TestChaosOfTheGoClient publishes")
	chaosCuts   = flag.Int("chaos.cuts", 20, "connections that TestChaosOfTheGoClient cuts")
	chaosKills  = flag.Int("chaos.kills", 1, "how often TestChaosOfTheGoClient kills the hub")
	chaosSeed   = flag.Uint64("chaos.seed", uint64(time.Now().UnixNano()%1_000_000), "repeats the order of faults")
)

const (
	chaosTopic    = "chaos"
	chaosInFlight = 50
	// chaosLanes publish at a time.
	chaosLanes = 64
	// chaosForgets is how long before its end a killed hub may forget acknowledgements.
	chaosForgets = 500 * time.Millisecond
)

// chaos is a run of TestChaosOfTheGoClient.
type chaos struct {
	t       *testing.T
	limit   time.Duration
	hub     *node
	data    string
	relays  [2]*relay // of the publisher and the consumer
	next    atomic.Int64
	beside  atomic.Int64 // handlers that ran beside themselves
	started atomic.Bool  // the clients are connected

	mu       sync.Mutex
	answered map[int]string // ids, by number
	unknown  map[int]bool
	running  map[string]bool
	runs     map[string]int
	ends     []time.Time // of handlers
	inFlight int         // at the breaks: so many may come twice
	breaks   int
}

// The hub is killed and connections are cut at random while events flow both ways. Nothing that was
// answered is lost, nothing is stored twice, and Publish succeeds for no event that is not stored.
// Every stored event is handled, and no handler runs beside itself. No more events are handled
// twice than were in flight at the breaks, or were acknowledged in the last moments of a killed
// hub.
func TestChaosOfTheGoClient(t *testing.T) {
	t.Parallel()
	c := &chaos{
		t: t, data: t.TempDir(),
		limit:    patience + time.Duration(*chaosCuts)*time.Second + time.Duration(*chaosKills)*10*time.Second,
		answered: map[int]string{}, unknown: map[int]bool{}, running: map[string]bool{}, runs: map[string]int{},
	}
	c.start()
	for i := range c.relays {
		c.relays[i] = startRelay(t, c.address())
	}
	publisher, consumer := c.connect(c.relays[0]), c.connect(c.relays[1])
	sub, err := consumer.Subscribe(t.Context(), chaosTopic, "g", eventhub.SubscribeOptions{MaxAttempts: new(int), MaxInFlight: chaosInFlight, Concurrency: chaosInFlight}, c.handle)
	if err != nil {
		t.Fatal(err)
	}
	c.started.Store(true)

	var lanes sync.WaitGroup
	for range chaosLanes {
		lanes.Go(func() { c.publish(publisher) })
	}
	c.fault()
	lanes.Wait()
	stored := c.stored()
	c.eventually("every stored event was handled", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.runs) >= len(stored)
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := sub.Drain(ctx); err != nil {
		t.Error(err)
	}
	if err := errors.Join(publisher.Close(), consumer.Close()); err != nil {
		t.Error(err)
	}
	c.check(stored)
}

func (c *chaos) start() {
	c.hub = startNodeWith(c.t, func(cmd *exec.Cmd) { cmd.Args = append(cmd.Args, "--data="+c.data, "--log-level=error") })
}

func (c *chaos) address() string { return strings.TrimPrefix(c.hub.url, "ws://") }

func (c *chaos) connect(r *relay) *eventhub.Client {
	c.t.Helper()
	consumer := r == c.relays[1]
	client, err := eventhub.Connect(c.t.Context(), "ws://"+r.listener.Addr().String(), eventhub.Options{
		Token: nodeToken, MinPause: 10 * time.Millisecond, MaxPause: 100 * time.Millisecond,
		OnState: func(s eventhub.State, _ error) {
			if consumer && s == eventhub.StateWaiting && c.started.Load() {
				c.mu.Lock()
				c.breaks++
				c.inFlight += chaosInFlight
				c.mu.Unlock()
			}
		},
		OnError: func(err error) { c.t.Errorf("the client reports: %v", err) },
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		_ = client.Drain(ctx)
	})
	return client
}

func (c *chaos) handle(_ context.Context, d *eventhub.Delivery) error {
	c.mu.Lock()
	if c.running[d.ID] {
		c.beside.Add(1)
	}
	c.running[d.ID] = true
	c.mu.Unlock()
	if rand.IntN(50) == 0 {
		<-time.After(time.Duration(rand.IntN(20)) * time.Millisecond)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.running, d.ID)
	c.runs[d.ID]++
	c.ends = append(c.ends, time.Now())
	if len(c.ends) > 100_000 {
		c.ends = slices.Clone(c.ends[50_000:])
	}
	return nil
}

// publish publishes events until there are enough.
func (c *chaos) publish(client *eventhub.Client) {
	for n := int(c.next.Add(1)) - 1; n < *chaosEvents; n = int(c.next.Add(1)) - 1 {
		for done := false; !done; {
			id, err := client.Publish(context.Background(), chaosTopic, n, eventhub.PublishOptions{})
			failure, _ := errors.AsType[*eventhub.Error](err)
			c.mu.Lock()
			switch {
			case err == nil:
				c.answered[n], done = id, true
			case failure.Code == eventhub.CodeOutcomeUnknown:
				c.unknown[n], done = true, true
			case !failure.Retryable:
				c.t.Errorf("publish %d: %v", n, err)
				done = true
			}
			c.mu.Unlock()
		}
		// spreads the events over the faults
		<-time.After(time.Duration(rand.IntN(4000)) * time.Microsecond)
	}
}

// fault cuts and kills, each when its share of the events has been published.
func (c *chaos) fault() {
	rnd := rand.New(rand.NewPCG(*chaosSeed, 0))
	type fault struct {
		at   int
		kill bool
	}
	var faults []fault
	for i := range *chaosCuts + *chaosKills {
		faults = append(faults, fault{rnd.IntN(*chaosEvents), i < *chaosKills})
	}
	slices.SortFunc(faults, func(a, b fault) int { return a.at - b.at })
	cuts := 0
	for _, f := range faults {
		at := min(f.at, *chaosEvents-chaosLanes)
		c.eventually("events are published", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return len(c.answered)+len(c.unknown) >= at
		})
		if !f.kill {
			c.relays[cuts%2].cut(true)
			c.relays[cuts%2].cut(false)
			cuts++
			continue
		}
		// A killed hub may also deliver again what was acknowledged in its last moments.
		since := time.Now().Add(-chaosForgets)
		c.hub.kill()
		c.mu.Lock()
		for i := len(c.ends) - 1; i >= 0 && c.ends[i].After(since); i-- {
			c.inFlight++
		}
		c.mu.Unlock()
		c.start()
		for _, r := range c.relays {
			r.aim(c.address())
		}
	}
}

// stored returns the ids of the events that are stored, by number.
func (c *chaos) stored() map[int]string {
	stored := map[int]string{}
	r := eventhub.Reader{URL: c.hub.http, Token: nodeToken}
	for e, err := range r.Replay(c.t.Context(), chaosTopic, eventhub.ReplayOptions{}) {
		if err != nil {
			c.t.Fatal(err)
		}
		var n int
		if err := json.Unmarshal(e.Payload, &n); err != nil {
			c.t.Fatal(err)
		}
		if stored[n] != "" {
			c.t.Errorf("event %d is stored twice", n)
		}
		stored[n] = e.ID
	}
	return stored
}

func (c *chaos) check(stored map[int]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n, id := range c.answered {
		if stored[n] != id {
			c.t.Errorf("event %d was answered, and is not stored", n)
		}
	}
	twice := 0
	for n, id := range stored {
		if c.answered[n] == "" && !c.unknown[n] {
			c.t.Errorf("event %d is stored, and was not answered", n)
		}
		if c.runs[id] == 0 {
			c.t.Errorf("event %d was not handled", n)
		}
		twice += max(0, c.runs[id]-1)
	}
	c.t.Logf("seed %d: stored %d, answered %d, unknown %d; handled again %d of at most %d; %d breaks of the consumer",
		*chaosSeed, len(stored), len(c.answered), len(c.unknown), twice, c.inFlight, c.breaks)
	if len(c.answered)+len(c.unknown) != *chaosEvents {
		c.t.Errorf("%d events have no answer", *chaosEvents-len(c.answered)-len(c.unknown))
	}
	if c.beside.Load() > 0 {
		c.t.Errorf("%d handlers ran beside themselves", c.beside.Load())
	}
	if twice > c.inFlight {
		c.t.Errorf("%d events were handled again; %d were in flight at %d breaks", twice, c.inFlight, c.breaks)
	}
}

func (c *chaos) eventually(what string, holds func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(c.limit); !holds(); <-time.After(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("not within %v: %s", c.limit, what)
		}
	}
}
