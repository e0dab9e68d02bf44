package jetstream

import (
	"context"
	"fmt"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/topics"
)

// Figures count while the leader of a consumer has heard of a majority.
func TestCurrentFigures(t *testing.T) {
	t.Parallel()
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

// try tries something until it succeeds, with 20 s for each try.
func try(t *testing.T, what string, f func(context.Context) error) {
	t.Helper()
	for end := time.Now().Add(2 * slow); ; <-time.After(100 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		err := f(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("waited in vain: %s: %v", what, err)
		}
	}
}

// A group whose leader is gone is missing in what is read of all groups: nothing is known of it,
// which is not the same as a lag of 0. A list that would lack it fails.
func TestLagsWithoutALeader(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 3)
	b := openRemote(t, Config{URL: c.urls(), Replicas: 3, Topics: []topics.Rule{{Pattern: "alone", Replicas: 1}}})
	for _, topic := range []string{"alone", "copied"} {
		try(t, "topic "+topic+" has an event", func(ctx context.Context) error {
			_, err := b.Publish(ctx, topic, []byte("1"), PublishOptions{ID: "one"})
			return err
		})
		try(t, "topic "+topic+" has a group", func(ctx context.Context) error { return b.Group(topic, "g").Seek(ctx, FromEarliest) })
	}
	groups := b.Admin().Groups()
	lags := func() AllLags {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		all, err := groups.Lags(ctx, 10)
		if err != nil {
			t.Log(err)
			<-time.After(100 * time.Millisecond)
		}
		return all
	}
	try(t, "both groups are there", func(context.Context) error {
		if all := lags(); len(all.Lags) != 2 || all.Unknown != 0 || all.Lags[0].Pending != 1 || all.Lags[1].Pending != 1 {
			return fmt.Errorf("the lags are %+v", all)
		}
		return nil
	})
	var info *natsjs.StreamInfo
	try(t, "the stream has a leader", func(ctx context.Context) (err error) {
		info, err = c.info(ctx, "alone")
		return err
	})
	for _, n := range c.nodes {
		if n.Name() == info.Cluster.Leader {
			n.Kill()
		}
	}
	end := time.Now().Add(2 * slow)
	for all := lags(); ; all = lags() {
		for _, lag := range all.Lags {
			if lag.Topic == "alone" || lag.Pending != 1 {
				t.Fatalf("the lags are %+v", all)
			}
		}
		if len(all.Lags) == 1 && all.Unknown == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("waited in vain for the other group: %+v", all)
		}
	}
	for topic, want := range map[string]int{"alone": 0, "copied": 1} {
		wait := 2 * time.Second
		if want == 1 {
			wait = slow
		}
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		found, _, err := groups.List(ctx, GroupsPage{Topic: topic, Limit: 10})
		cancel()
		if len(found) != want || (err == nil) != (want == 1) {
			t.Errorf("the groups of %s are %+v, %v", topic, found, err)
		}
	}
}
