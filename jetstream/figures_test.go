package jetstream

import (
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Figures count while the leader of a consumer has heard of a majority.
func TestCurrentFigures(t *testing.T) {
	peer := func(age time.Duration) *natsjs.PeerInfo { return &natsjs.PeerInfo{Active: age} }
	offline := &natsjs.PeerInfo{Offline: true}
	for name, tt := range map[string]struct {
		cluster *natsjs.ClusterInfo
		want    bool
	}{
		"a server alone":            {nil, true},
		"one copy in a cluster":     {&natsjs.ClusterInfo{Leader: "a"}, true},
		"all are there":             {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(time.Millisecond), peer(time.Second)}}, true},
		"one of three is away":      {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(time.Hour), peer(figuresAge)}}, true},
		"two of three are silent":   {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(2 * figuresAge), peer(figuresAge + 1)}}, false},
		"two of three are offline":  {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{offline, offline}}, false},
		"one of two is away":        {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(time.Hour)}}, false},
		"three of five are silent":  {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(0), peer(time.Hour), peer(time.Hour), offline}}, false},
		"three of five are current": {&natsjs.ClusterInfo{Replicas: []*natsjs.PeerInfo{peer(0), peer(0), peer(time.Hour), offline}}, true},
	} {
		if got := current(&natsjs.ConsumerInfo{Cluster: tt.cluster}); got != tt.want {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
