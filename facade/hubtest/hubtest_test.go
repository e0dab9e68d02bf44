package hubtest_test

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"eventhub/facade"
	"eventhub/facade/hubtest"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
	"eventhub/sdk/go/wire"
)

// patience bounds what a test waits for. Reaching it is a failure.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, natstest.Leaks()...)
}

// receive subscribes from the earliest event on, and returns the payloads of n events.
func receive(t *testing.T, c *wire.Conn, topic string, n int) []string {
	t.Helper()
	events := make(chan wire.Event, 100)
	if _, err := c.Subscribe(t.Context(), topic, "g", wire.SubscribeOptions{From: "earliest"}, func(e wire.Event) { events <- e }); err != nil {
		t.Fatal(err)
	}
	var got []string
	for range n {
		select {
		case e := <-events:
			got = append(got, string(e.Payload))
			if err := e.AckWait(t.Context()); err != nil {
				t.Fatal(err)
			}
		case <-time.After(patience):
			t.Fatalf("only %d events came: %q", len(got), got)
		}
	}
	return got
}

// Fifty hubs at once are fifty hubs: each has its own events and its own token.
func TestManyHubsAtOnce(t *testing.T) {
	const n = 50
	began := time.Now()
	hubs := make([]*hubtest.Hub, n)
	for i := range hubs {
		hubs[i] = hubtest.New(t)
	}
	t.Logf("%d hubs are ready after %v", n, time.Since(began))
	var all sync.WaitGroup
	for i, h := range hubs {
		c := h.Dial(h.Token)
		all.Go(func() {
			for e := range 3 {
				if _, err := c.Publish(t.Context(), "same.topic", fmt.Appendf(nil, `"%d of %d"`, e, i), wire.PublishOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for i, h := range hubs {
		c := h.Dial(h.Token)
		want := fmt.Sprintf(`["0 of %d" "1 of %d" "2 of %d"]`, i, i, i)
		if got := receive(t, c, "same.topic", 3); fmt.Sprint(got) != want {
			t.Errorf("hub %d has %s, want %s", i, got, want)
		}
		first, last, err := h.Bus.History("same.topic").Bounds(t.Context())
		if err != nil || first != 1 || last != 3 {
			t.Errorf("hub %d: %d to %d, %v", i, first, last, err)
		}
	}
	t.Logf("all have their events after %v", time.Since(began))
	if _, err := wire.Dial(t.Context(), hubs[0].WebSocket, wire.Options{Token: hubs[1].Token}); err == nil {
		t.Error("a hub takes the token of another")
	}
}

// A test should not wait for its hub. The best of some tries counts, because others may use the
// machine.
func TestReadyAtOnce(t *testing.T) {
	const limit = 300 * time.Millisecond
	best := time.Hour
	for range 10 {
		t.Run("try", func(t *testing.T) {
			began := time.Now()
			h := hubtest.New(t)
			h.Dial(h.Token)
			best = min(best, time.Since(began))
		})
	}
	if t.Logf("ready in %v", best); best > limit {
		t.Errorf("the quickest of ten hubs was ready in %v, want %v", best, limit)
	}
}

// TestParallel has tests that run at the same time.
func TestParallel(t *testing.T) {
	for i := range 8 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			h := hubtest.New(t)
			if _, err := h.Bus.Publish(t.Context(), "t", fmt.Append(nil, i), jetstream.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := receive(t, h.Dial(h.Token), "t", 1); got[0] != strconv.Itoa(i) {
				t.Errorf("got %s", got)
			}
		})
	}
}

// A hub leaves nothing on disk, and is gone with its test.
func TestGoneWithTheTest(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	empty := func(when string) {
		t.Helper()
		if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
			t.Errorf("%s: %v, %v", when, entries, err)
		}
	}
	var h *hubtest.Hub
	t.Run("test", func(t *testing.T) {
		h = hubtest.New(t, hubtest.Topics(topics.Rule{Pattern: "state", Compaction: true, Storage: topics.StorageFile}))
		if _, err := h.Bus.Publish(t.Context(), "state", []byte("1"), jetstream.PublishOptions{Key: "k"}); err != nil {
			t.Fatal(err)
		}
		empty("it runs")
	})
	empty("it has ended")
	if _, err := wire.Dial(t.Context(), h.WebSocket, wire.Options{Token: h.Token}); err == nil {
		t.Error("the WebSocket is still there")
	}
	if nc, err := nats.Connect(h.NATS, nats.Token(h.Token)); err == nil {
		nc.Close()
		t.Error("the NATS server is still there")
	}
	if _, err := h.Bus.Publish(t.Context(), "state", []byte("1"), jetstream.PublishOptions{Key: "k"}); !errors.Is(err, jetstream.ErrClosed) {
		t.Errorf("the bus says %v", err)
	}
}

// All addresses lead to the same hub.
func TestAddresses(t *testing.T) {
	h := hubtest.New(t, hubtest.Token("open sesame"))
	if h.Token != "open sesame" {
		t.Errorf("the token is %q", h.Token)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.HTTP+"/publish/t", strings.NewReader(`"http"`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+h.Token)
	req.Header.Set("Content-Type", "application/json")
	req.Close = true
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	if _ = res.Body.Close(); res.StatusCode != http.StatusOK {
		t.Errorf("POST is answered with %d", res.StatusCode)
	}
	nc, err := nats.Connect(h.NATS, nats.Token(h.Token))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if _, err := nc.Request("event.t", []byte(`"nats"`), patience); err != nil {
		t.Fatal(err)
	}
	c := h.Dial(h.Token)
	if _, err := c.Publish(t.Context(), "t", []byte(`"websocket"`), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := receive(t, c, "t", 3); fmt.Sprint(got) != `["http" "nats" "websocket"]` {
		t.Errorf("got %s", got)
	}
}

func TestPolicy(t *testing.T) {
	h := hubtest.New(t, hubtest.Policy("sensor", "sensor-token", `{"rules":[{"effect":"allow","action":"publish","topics":["heat.*"]}]}`))
	c := h.Dial("sensor-token")
	if _, err := c.Publish(t.Context(), "heat.kitchen", []byte("21"), wire.PublishOptions{}); err != nil {
		t.Error(err)
	}
	_, err := c.Publish(t.Context(), "orders", []byte("1"), wire.PublishOptions{})
	if refused, ok := errors.AsType[*wire.Error](err); !ok || refused.Code != "forbidden" {
		t.Errorf("a topic that is not allowed: %v", err)
	}
	if _, err := h.Dial(h.Token).Publish(t.Context(), "orders", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Error(err)
	}
}

// Two hubs on one NATS share their groups, as two processes do.
func TestHubsOnOneNATS(t *testing.T) {
	on := hubtest.Bus(func(cfg *jetstream.Config) { cfg.URL = natstest.Run(t).ClientURL() })
	one := hubtest.New(t, on)
	two := hubtest.New(t, hubtest.On(one.Bus), hubtest.Facade(func(cfg *facade.Config) { cfg.DrainGrace = time.Second }))
	if _, err := one.Dial(one.Token).Publish(t.Context(), "t", []byte("1"), wire.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := receive(t, two.Dial(two.Token), "t", 1); got[0] != "1" {
		t.Errorf("got %s", got)
	}
	if one.NATS != "" || two.NATS != "" {
		t.Errorf("%q, %q", one.NATS, two.NATS)
	}
}
