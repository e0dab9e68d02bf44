package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"eventhub/acl"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/ops"
	"eventhub/projections/process"
)

// The groups that a hub runs are those that clients may not join.
func TestGroupsOfTheHubAreReserved(t *testing.T) {
	if !acl.Reserved(process.Group) {
		t.Errorf("clients may join %s", process.Group)
	}
}

// A projection whose events somebody holds, and one whose group cannot be made, make no progress.
// Both the metric and the text for /readyz say so, until the projection comes forward again.
func TestProgress(t *testing.T) {
	bus, err := jetstream.Open(t.Context(), jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = bus.Close() })
	registry := prometheus.NewRegistry()
	p := newProgress("p", bus.Group("heartbeat.received", "projector"), ops.NewMetrics(registry), slog.New(slog.DiscardHandler))
	p.every, p.after = 10*time.Millisecond, 200*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.watch(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	stands := func() bool { return strings.HasPrefix(p.String(), "no progress for ") && stalledFor(t, registry) > 0 }
	moves := func() bool { return p.String() == ops.PartOK && stalledFor(t, registry) == 0 }

	waitFor(t, "a group that does not exist makes no progress", stands)
	held := make(chan *jetstream.Held, 10)
	sub, err := bus.Subscribe(t.Context(), "heartbeat.received", "projector", jetstream.SubscribeOptions{}, func(h *jetstream.Held) { held <- h })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Stop(context.WithoutCancel(t.Context())) })
	waitFor(t, "nothing to do is progress", moves)
	if _, err := bus.Publish(t.Context(), "heartbeat.received", []byte("1"), jetstream.PublishOptions{}); err != nil {
		t.Fatal(err)
	}
	d, ok := (<-held).Begin()
	if !ok {
		t.Fatal("a fresh delivery is not valid")
	}
	waitFor(t, "an event that is held is no progress", stands)
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "an event that was settled is progress", moves)
}

// stalledFor is the metric, in seconds.
func stalledFor(t *testing.T, registry *prometheus.Registry) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "eventhub_projection_stalled_seconds" {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	return 0
}
