package jetstream

import (
	"context"
	"fmt"
	"slices"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
)

// replicasWait is how long SetReplicas waits until the copies of a stream have all that it has.
const replicasWait = 10 * time.Minute

// ReplicaChange is a stream of a hub, and how many copies it had and should have.
type ReplicaChange struct {
	Stream     string
	Have, Want int
}

// PlanReplicas lists the streams of hubs whose number of copies is not want: those of topics,
// buckets, and bookkeeping. Streams of topics whose rule has a number of its own are left out.
func (n NATS) PlanReplicas(ctx context.Context, want int) ([]ReplicaChange, error) {
	b := n.bus
	if want < 1 || want > 5 {
		return nil, event.BadOptions("replicas %d: 1 to 5 are allowed", want)
	}
	inv, err := takeInventory(ctx, b.core)
	if err != nil {
		return nil, err
	}
	var all []ReplicaChange
	for _, name := range inv.names() {
		info := inv.byName[name]
		if info.Config.Replicas == want || !ofHub(name, info) && !ofProgram(info) {
			continue
		}
		if known := inv.recognise(info); known.rule != nil && known.rule.Replicas != 0 {
			continue
		}
		all = append(all, ReplicaChange{name, info.Config.Replicas, want})
	}
	return all, nil
}

// collectionNote describes the buckets of Collections.
const collectionNote = "eventhub: state of the hub's own"

// ofProgram reports whether a stream is a bucket of Collections.
func ofProgram(info *natsjs.StreamInfo) bool {
	return info.Config.Description == collectionNote
}

// SetReplicas changes the number of copies of a stream and of its consumers, and waits until all
// copies are complete. Clients publish and consume meanwhile.
func (n NATS) SetReplicas(ctx context.Context, c ReplicaChange) error {
	b := n.bus
	handle, err := b.conn.JS.Stream(ctx, c.Stream)
	if err != nil {
		return fmt.Errorf("stream %s: %w", c.Stream, err)
	}
	// The new leader of a stream may not have answered, and that of the cluster may not have seen
	// all servers yet.
	update := func(ctx context.Context) (natsjs.Stream, error) {
		return b.admin.changeStream(ctx, c.Stream, func(cfg *natsjs.StreamConfig) { cfg.Replicas = c.Want })
	}
	if _, err := conn.WhenUp(ctx, b.conn, func() (natsjs.Stream, error) { return conn.Again(ctx, update) }); err != nil {
		return fmt.Errorf("stream %s: %w; check that the cluster has %d servers with JetStream", c.Stream, err, c.Want)
	}
	ctx, cancel := context.WithTimeout(ctx, replicasWait)
	defer cancel()
	for {
		info, err := b.conn.FindStream(ctx, c.Stream)
		if err == nil && complete(info, c.Want) && b.admin.followed(ctx, handle, c.Want) {
			return nil
		}
		if waited := b.conn.Pause(ctx, positionPause); waited != nil {
			return fmt.Errorf("stream %s: its copies are not complete yet: %w", c.Stream, waited)
		}
	}
}

// changeStream changes the present settings of a stream once: a change that is repeated keeps what
// others have changed meanwhile.
func (a *admin) changeStream(ctx context.Context, name string, set func(*natsjs.StreamConfig)) (natsjs.Stream, error) {
	info, err := a.conn.FindStream(ctx, name)
	if err != nil {
		return nil, err
	}
	cfg := info.Config
	set(&cfg)
	return a.conn.JS.UpdateStream(ctx, cfg)
}

// complete reports whether a stream has so many copies, and each is up to date.
func complete(info *natsjs.StreamInfo, n int) bool {
	if info.Config.Replicas != n || info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != n-1 {
		return false
	}
	return !slices.ContainsFunc(info.Cluster.Replicas, func(r *natsjs.PeerInfo) bool { return !r.Current || r.Offline })
}

// followed reports whether the consumers of a stream that have as many copies as the stream are
// complete, too.
func (a *admin) followed(ctx context.Context, stream natsjs.Stream, n int) bool {
	list := stream.ListConsumers(ctx)
	all := true
	for info := range list.Info() {
		if info.Config.Replicas != 0 || info.Config.Durable == "" {
			continue // for a reader of the moment, the server chooses
		}
		if c := info.Cluster; c == nil || c.Leader == "" || len(c.Replicas) != n-1 {
			all = false
		} else if slices.ContainsFunc(c.Replicas, func(r *natsjs.PeerInfo) bool { return !r.Current || r.Offline }) {
			all = false
		}
	}
	return list.Err() == nil && all
}
