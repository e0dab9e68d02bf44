//go:build unix

package main

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/sdk/go/wire"
)

var (
	calloutEvents = flag.Int("callout.events", 200, "events that TestNativeThroughput publishes and pulls, for each figure")
	calloutPairs  = flag.Int("callout.pairs", 1, "pairs of figures that TestNativeThroughput measures, of which it gives the median")
)

// TestNativeThroughput publishes and pulls natively at two hubs, with and without isolation, in
// turns: with the permissions of a JWT, below the rates, and with the full access of the hub's own
// token. It gives the ratios; run it with more events and pairs to measure.
func TestNativeThroughput(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 20*patience)
	defer cancel()
	hubs := make(map[string]*node)
	for _, isolation := range []string{"off", "on"} {
		hub := startNode(t, "--nats-listen=127.0.0.1:0", "--jwt-secret-file="+secretFile(t), "--nats-isolation="+isolation,
			"--limit-native-messages=1000000000", "--limit-principal-bytes=1000000000", "--limit-settles=1000000000")
		maker := hub.dial()
		if _, err := maker.Subscribe(ctx, "load", "g", wire.SubscribeOptions{From: "earliest"}, func(wire.Event) {}); err != nil {
			t.Fatal(err)
		}
		maker.Abort()
		hubs[isolation] = hub
	}
	limited := scoped(t, "load", "publish:load", "subscribe:load::g", "publish:a.**", "publish:*.b", "subscribe:c.*")
	for _, work := range []struct {
		name string
		do   func(context.Context, *testing.T, *node, string) time.Duration
	}{{"publishing", publishNatively}, {"pulling", pullNatively}} {
		measure := func(isolation, token string) (took time.Duration, cpu float64) {
			before := hubs[isolation].cpu()
			took = work.do(ctx, t, hubs[isolation], token)
			return took, hubs[isolation].cpu() - before
		}
		fill := func(isolation string) {
			if work.name == "pulling" {
				publishNatively(ctx, t, hubs[isolation], nodeToken)
			}
		}
		for _, c := range []struct{ base, isolation, who, token string }{
			{"off", "off", "with permissions", limited},
			{"off", "on", "with full access", nodeToken},
			{"off", "on", "with permissions", limited},
			{"on", "on", "with permissions", limited},
		} {
			var rates, costs []float64
			for range *calloutPairs {
				for _, isolation := range []string{c.base, c.base, c.isolation, c.isolation} {
					fill(isolation)
				}
				// The order of the two changes, so that neither is always the one after a pause.
				one, cpuOne := measure(c.base, nodeToken)
				two, cpuTwo := measure(c.isolation, c.token)
				three, cpuThree := measure(c.isolation, c.token)
				four, cpuFour := measure(c.base, nodeToken)
				rates = append(rates, float64(one+four)/float64(two+three))
				costs = append(costs, (cpuTwo+cpuThree)/(cpuOne+cpuFour))
			}
			t.Logf("%s, isolation %s, %s, to full access with isolation %s: %s of the rate, %s of the hub's CPU; %d pairs of %d events",
				work.name, c.isolation, c.who, c.base, spread(rates), spread(costs), *calloutPairs, *calloutEvents)
		}
	}
	for _, hub := range hubs {
		hub.terminate()
	}
}

// spread describes figures by their median, the least and the greatest.
func spread(figures []float64) string {
	slices.Sort(figures)
	return fmt.Sprintf("%.3f [%.3f, %.3f]", figures[len(figures)/2], figures[0], figures[len(figures)-1])
}

// cpu returns the seconds of CPU that the hub has used.
func (n *node) cpu() float64 {
	n.t.Helper()
	p, err := psutil.NewProcess(int32(n.cmd.Process.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	times, err := p.Times()
	if err != nil {
		n.t.Fatal(err)
	}
	return times.User + times.System
}

// publishNatively publishes events, and returns how long that took.
func publishNatively(ctx context.Context, t *testing.T, hub *node, token string) time.Duration {
	t.Helper()
	nc, _ := dialNative(t, hub.nats, token)
	defer nc.Close()
	js, err := natsjs.New(nc, natsjs.WithPublishAsyncMaxPending(4000))
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var last natsjs.PubAckFuture
	for range *calloutEvents {
		if last, err = js.PublishAsync("event.load", []byte(`{"order":12345678,"text":"the text of an event"}`), natsjs.WithStallWait(patience)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		t.Fatal("the publishes were not confirmed")
	}
	select {
	case err := <-last.Err():
		t.Fatal(err)
	default:
	}
	return time.Since(began)
}

// pullNatively pulls and acknowledges events, and returns how long that took.
func pullNatively(ctx context.Context, t *testing.T, hub *node, token string) time.Duration {
	t.Helper()
	nc, js := dialNative(t, hub.nats, token)
	defer nc.Close()
	c, err := js.Consumer(ctx, "load", "g")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for got := 0; got < *calloutEvents; {
		batch, err := c.Fetch(min(500, *calloutEvents-got), natsjs.FetchMaxWait(patience))
		if err != nil {
			t.Fatal(err)
		}
		for m := range batch.Messages() {
			got++
			if err := m.Ack(); err != nil {
				t.Fatal(err)
			}
		}
		if ctx.Err() != nil {
			t.Fatal("the events did not come")
		}
	}
	if err := nc.FlushTimeout(patience); err != nil {
		t.Fatal(err)
	}
	return time.Since(began)
}
