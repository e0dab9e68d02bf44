package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Placement says where a stream is stored.
type Placement struct {
	Stream string
	// Topic is that of the stream, or "" for the stream of a family, of a bucket or of another
	// program.
	Topic string
	// Memory is set when the stream is kept in memory.
	Memory bool
	// Replicas is how many servers should have the stream. Leader is the server that takes writes,
	// or "" while there is none.
	Replicas int
	Leader   string
	// Servers are those that have the stream, the leader first.
	Servers []Replica
	// Messages, Bytes and Consumers are those of the stream, counted once.
	Messages, Bytes uint64
	Consumers       int
}

// Replica is a server's copy of a stream.
type Replica struct {
	Server string
	// Current says that the copy is up to date, and Offline that the leader cannot reach the
	// server.
	Current, Offline bool
	// Lag is how many operations the copy is behind. Active is how long ago the leader heard of it.
	Lag    uint64
	Active time.Duration
}

// Placements lists the streams of the account in order of their names, those of other programs
// included. A stream without a leader may be absent.
func (n NATS) Placements(ctx context.Context) ([]Placement, error) {
	b := n.bus
	own := b.conn.Links[0].NC.ConnectedServerName()
	var all []Placement
	list := b.conn.JS.ListStreams(ctx)
	for info := range list.Info() {
		all = append(all, placement(info, own))
	}
	if err := list.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		return nil, b.conn.Unavailable(fmt.Errorf("jetstream: list streams: %w", err))
	}
	slices.SortFunc(all, func(a, b Placement) int { return strings.Compare(a.Stream, b.Stream) })
	return all, nil
}

// placement describes a stream. own is the server that answered, which has the streams of a NATS
// without a cluster.
func placement(info *natsjs.StreamInfo, own string) Placement {
	p := Placement{
		Stream: info.Config.Name, Memory: info.Config.Storage == natsjs.MemoryStorage, Replicas: max(info.Config.Replicas, 1), Leader: own,
		Messages: info.State.Msgs, Bytes: info.State.Bytes, Consumers: info.State.Consumers,
	}
	for _, s := range info.Config.Subjects {
		if topic := subjectTopic(s); topic != "" && ValidTopic(topic) == nil && objectName(topic) == p.Stream {
			p.Topic = topic
		}
	}
	if info.Cluster != nil {
		p.Leader = info.Cluster.Leader
	}
	if p.Leader != "" {
		p.Servers = append(p.Servers, Replica{Server: p.Leader, Current: true})
	}
	if info.Cluster != nil {
		for _, r := range info.Cluster.Replicas {
			p.Servers = append(p.Servers, Replica{r.Name, r.Current, r.Offline, r.Lag, r.Active})
		}
	}
	return p
}
