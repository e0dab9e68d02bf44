//go:build unix

package model

import (
	"context"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// A partition cuts a node off from the others although the nodes gossip their addresses: they elect
// another leader, and the node catches up when the partition is over. A node whose disk is lost
// gets its copy back.
func TestRigPartsNodesAndLosesDisks(t *testing.T) {
	t.Parallel()
	p := newPlan(1, nil, nil, time.Second).cluster()
	p.hubs = 0
	r := startRig(t, p, newRecorder())
	j := &injector{rig: r}
	name := streamName(p.topics[0])
	r.until("the stream is made", func(ctx context.Context) bool {
		_, err := r.js.CreateStream(ctx, natsjs.StreamConfig{Name: name, Subjects: []string{"numbers"}, Replicas: 3})
		return err == nil
	})
	led := -1
	leader := func(ctx context.Context) int {
		s, err := r.js.Stream(ctx, name)
		if err != nil {
			return -1
		}
		for i, n := range r.nodes {
			if c := s.CachedInfo().Cluster; c != nil && c.Leader == n.Name() {
				return i
			}
		}
		return -1
	}
	publish := func(want uint64) {
		r.until("an event is stored", func(ctx context.Context) bool {
			ack, err := r.js.Publish(ctx, "numbers", []byte("1"))
			return err == nil && ack.Sequence >= want
		})
	}
	copied := func(ctx context.Context) bool {
		s, err := r.js.Stream(ctx, name)
		return err == nil && whole(s.CachedInfo().Cluster, len(r.nodes))
	}
	r.until("the stream has a leader", func(ctx context.Context) bool { led = leader(ctx); return led >= 0 })
	publish(1)

	j.apart(led, true, true, true)
	r.until("another node leads", func(ctx context.Context) bool {
		if now := leader(ctx); now >= 0 && now != led {
			return true
		}
		_ = r.nc.ForceReconnect() // the test may be a client of the node that is apart
		return false
	})
	publish(2)
	j.apart(led, true, true, false)
	r.until("the copies are equal again", copied)

	r.nodes[led].Kill()
	r.nodes[led].Wipe()
	r.nodes[led].Start()
	r.until("the copy is back", copied)
	publish(3)
}
