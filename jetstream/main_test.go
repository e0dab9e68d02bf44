package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/natstest"
)

func TestMain(m *testing.M) {
	natstest.RunChild(nil)
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// briefly is for Config.moveWait in tests that ask for no lease of before a move.
const briefly = 10 * time.Millisecond

// wait bounds everything a test waits for. Only a test that fails waits so long, also where other
// work takes the processors.
const wait = 30 * time.Second

// open opens a bus that the test closes, on an embedded server of its own unless cfg names another
// NATS.
func open(tb testing.TB, cfg Config) *Bus {
	tb.Helper()
	if cfg.URL == "" && cfg.Server == nil {
		cfg.Server = natstest.Embed(tb, tb.TempDir())
	}
	if cfg.AckWait == 0 {
		cfg.AckWait = 2 * wait // no event comes again for the end of its lease
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	b, err := Open(context.Background(), cfg)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = b.Close() })
	return b
}

// natsServer starts a server that several buses share.
func natsServer(tb testing.TB) string {
	tb.Helper()
	return natstest.Run(tb).ClientURL()
}

// natsServers starts one server, or a cluster of three.
func natsServers(tb testing.TB, n int) string {
	tb.Helper()
	if n == 1 {
		return natsServer(tb)
	}
	return threeServers(tb)
}

// publishAll publishes one event after the other. While a cluster changes the leader of a stream,
// the outcome of a publish may be unknown, or no server may take the event. Then publishAll repeats
// it, as a client may.
func publishAll(tb testing.TB, b *Bus, topic string, payloads ...string) []event.Receipt {
	tb.Helper()
	var receipts []event.Receipt
	for _, p := range payloads {
		var opts PublishOptions
		if l := b.conn.Links[0]; l.Clustered() {
			id, err := l.NewID()
			if err != nil {
				tb.Fatal(err)
			}
			opts.ID = id
		}
		r, err := b.Publish(tb.Context(), topic, []byte(p), opts)
		for end := time.Now().Add(wait); opts.ID != "" && (errors.Is(err, conn.ErrNoReply) || errors.Is(err, nats.ErrNoResponders)) && time.Now().Before(end); {
			tb.Logf("publishing %.20q again: %v", p, err)
			<-time.After(20 * time.Millisecond)
			r, err = b.Publish(tb.Context(), topic, []byte(p), opts)
		}
		if err != nil {
			tb.Fatal(err)
		}
		receipts = append(receipts, r)
	}
	return receipts
}

// taker is a subscriber that takes deliveries and lets the test settle them.
type taker struct {
	t     testing.TB
	group Group
	sub   *Subscription
	ch    chan *Held
}

// ignore is a handler that takes no event.
func ignore(*Held) {}

func take(tb testing.TB, b *Bus, topic, group string, opts SubscribeOptions) *taker {
	tb.Helper()
	k := &taker{t: tb, group: b.Group(topic, group), ch: make(chan *Held, 20_000)}
	var err error
	if k.sub, err = b.Subscribe(tb.Context(), topic, group, opts, func(h *Held) { k.ch <- h }); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = k.sub.Stop(context.Background()) })
	return k
}

// next returns the next delivery that is still valid, begun.
func (k *taker) next() *Delivery {
	k.t.Helper()
	deadline := time.After(wait)
	for {
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); ok {
				return d
			}
		case <-deadline:
			info, err := k.group.Info(k.t.Context())
			k.t.Fatalf("no delivery; the group is %+v, %v", info, err)
		}
	}
}

// either returns the next delivery of two members of a group, begun. An event that the test leaves
// with one of them for heldPatience goes to the other.
func either(a, c *taker) *Delivery {
	a.t.Helper()
	deadline := time.After(wait)
	for {
		var h *Held
		select {
		case h = <-a.ch:
		case h = <-c.ch:
		case <-deadline:
			info, err := a.group.Info(a.t.Context())
			a.t.Fatalf("no delivery; the group is %+v, %v", info, err)
		}
		if d, ok := h.Begin(); ok {
			return d
		}
	}
}

// payloads takes n events, acknowledges them, and returns what they carry.
func (k *taker) payloads(n int) []string {
	k.t.Helper()
	var got []string
	for range n {
		d := k.next()
		got = append(got, string(d.Event.Payload))
		if err := d.Ack(); err != nil {
			k.t.Fatal(err)
		}
	}
	return got
}

// quiet asserts that nothing that could be begun arrives for a while: long enough for anything that
// is under way.
func (k *taker) quiet(d time.Duration) {
	k.t.Helper()
	deadline := time.After(d)
	for {
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); ok {
				k.t.Fatalf("unexpected delivery of %s, attempt %d", d.Event.Payload, d.Attempt)
			}
		case <-deadline:
			return
		}
	}
}

func eventually(tb testing.TB, what string, f func() bool) {
	tb.Helper()
	eventuallyWithin(tb, wait, what, f)
}

func eventuallyWithin(tb testing.TB, limit time.Duration, what string, f func() bool) {
	tb.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}

// counter is an Observer that counts.
type counter struct {
	event.NopObserver
	mu     sync.Mutex
	counts map[string]int
	gauges map[string]float64
}

func (c *counter) Gauge(name string, value float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gauges == nil {
		c.gauges = make(map[string]float64)
	}
	c.gauges[name] = value
}

func (c *counter) gauge(name string) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gauges[name]
}

func (c *counter) LimitReached(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts == nil {
		c.counts = make(map[string]int)
	}
	c.counts[name]++
}

func (c *counter) limit(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts[name]
}

func numbers(n int) []string {
	s := make([]string, n)
	for i := range s {
		s[i] = strconv.Itoa(i)
	}
	return s
}

// quickest is the shortest of three times that f takes, called with 0, 1 and 2: what makes one of
// them long is a machine that is busy at that moment.
func quickest(f func(i int)) time.Duration {
	least := time.Duration(math.MaxInt64)
	for i := range 3 {
		began := time.Now()
		f(i)
		least = min(least, time.Since(began))
	}
	return least
}
