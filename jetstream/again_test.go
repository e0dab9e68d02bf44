//go:build unix

package jetstream

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// A stream without a leader answers no question, and none of those later. What was asked of it in
// that moment is known soon after it has a leader.
func TestAQuestionToAStreamWithoutLeader(t *testing.T) {
	t.Parallel()
	nodes := natstest.StartCluster(t, 3)
	urls := natstest.URLs(nodes)
	view := natstest.Look(t, urls...)
	view.Replicating(3)
	b := open(t, Config{URL: strings.Join(urls, ","), Replicas: 3, Connections: 1})
	publishAll(t, b, "t", "x")
	s, err := view.JS.Stream(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		if n.Name() == s.CachedInfo().Cluster.Leader {
			n.Kill()
		}
	}

	answered := make(chan time.Time, 1)
	go func() {
		for t.Context().Err() == nil {
			_, err := b.conn.FindStream(t.Context(), "t")
			if err == nil {
				break
			}
			t.Log(err)
		}
		answered <- time.Now()
	}()
	view.Until("the stream has a leader", func(ctx context.Context) bool {
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, err := view.JS.Stream(ctx, "t")
		return err == nil
	})
	led := time.Now()
	late := (<-answered).Sub(led)
	t.Logf("answered %v after the stream had a leader", late)
	if late > 2*time.Second {
		t.Errorf("answered %v after the stream had a leader", late)
	}
}

// A hub comes up although the stream of one of its buckets has no leader when it asks.
func TestOpenWhileABucketHasNoLeader(t *testing.T) {
	t.Parallel()
	nodes := natstest.StartCluster(t, 3)
	urls := natstest.URLs(nodes)
	view := natstest.Look(t, urls...)
	view.Replicating(3)
	cfg := Config{URL: strings.Join(urls, ","), Replicas: 3}
	open(t, cfg)
	s, err := view.JS.Stream(t.Context(), "KV_"+native.GroupsBucket)
	if err != nil {
		t.Fatal(err)
	}
	leader := s.CachedInfo().Cluster.Leader
	var left []string
	for i, n := range nodes {
		if n.Name() == leader {
			n.Kill()
		} else {
			left = append(left, urls[i])
		}
	}
	cfg.URL = strings.Join(left, ",")
	begun := time.Now()
	open(t, cfg)
	t.Logf("open after %v", time.Since(begun))
}

// A hub that starts before the servers of its cluster do waits for them.
func TestOpenBeforeAllServersAreUp(t *testing.T) {
	t.Parallel()
	nodes := natstest.Cluster(t, 3)
	nodes[0].Start()
	nodes[1].Start()
	book := new(logBook)
	opened := make(chan error, 1)
	go func() {
		b, err := Open(t.Context(), Config{URL: strings.Join(natstest.URLs(nodes[:2]), ","), Replicas: 3, Logger: slog.New(slog.NewTextHandler(book, nil))})
		if err == nil {
			err = b.Close()
		}
		opened <- err
	}()
	natstest.Look(t, natstest.URLs(nodes[:2])...).Until("the hub waits", func(context.Context) bool {
		select {
		case err := <-opened:
			t.Fatalf("open with two of three servers: %v", err)
		default:
		}
		return len(book.lines("the nats cluster is not complete yet; retrying")) > 0
	})
	nodes[2].Start()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

// A write to a bucket that has no leader in that moment waits for one.
func TestAWriteToABucketWithoutLeader(t *testing.T) {
	t.Parallel()
	nodes := natstest.StartCluster(t, 3)
	urls := natstest.URLs(nodes)
	view := natstest.Look(t, urls...)
	view.Replicating(3)
	cfg := Config{URL: strings.Join(urls, ","), Replicas: 3, Connections: 1}
	open(t, cfg) // makes the bucket
	bucket, err := view.JS.Stream(t.Context(), "KV_"+native.GroupsBucket)
	if err != nil {
		t.Fatal(err)
	}
	leader := slices.IndexFunc(nodes, func(n *natstest.Server) bool { return n.Name() == bucket.CachedInfo().Cluster.Leader })
	if leader < 0 {
		t.Fatalf("the leader is %q", bucket.CachedInfo().Cluster.Leader)
	}
	cfg.URL = strings.Join(slices.Delete(urls, leader, leader+1), ",") // its connection stays
	b := open(t, cfg)
	nodes[leader].Kill()
	// An election takes 1 to 3 s, and now and then a second round. A write that is given up has
	// waited for its time.
	for range 3 {
		began := time.Now()
		_, err = b.records.MarkDeleted(t.Context(), &streams.Stream{Name: "written"}, "written", 0)
		if err == nil {
			return
		}
		if took := time.Since(began); took < conn.PublishWait {
			t.Fatalf("the write failed after %v: %v", took, err)
		}
	}
	t.Errorf("the write failed: %v", err)
}

// A write to a stream of the hub's own that has no leader in that moment is sent again, and says
// what was wrong when there is none in time.
func TestAWriteWaitsForALeader(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	const stream = "KV_" + records.RetentionBucket
	s, err := b.conn.JS.Stream(t.Context(), stream)
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	if err := b.conn.JS.DeleteStream(t.Context(), stream); err != nil {
		t.Fatal(err)
	}
	msg := &nats.Msg{Subject: "$KV." + records.RetentionBucket + ".test"}
	for patience := 50 * time.Millisecond; ; patience *= 2 { // a slow machine answers late
		soon, cancel := context.WithTimeout(t.Context(), patience)
		_, err := b.conn.Write(soon, stream, msg)
		cancel()
		if errors.Is(err, nats.ErrNoResponders) {
			break
		}
		if patience > wait {
			t.Fatalf("without the stream: %v", err)
		}
	}
	sent := func() (n uint64) {
		for _, l := range b.conn.Links {
			n += l.NC.Stats().OutMsgs
		}
		return n
	}
	before := sent()
	stored := make(chan error, 1)
	go func() {
		_, err := b.conn.Write(t.Context(), stream, msg)
		stored <- err
	}()
	eventually(t, "it is sent again", func() bool { return sent() > before+2 })
	if _, err := b.conn.JS.CreateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	if err := <-stored; err != nil {
		t.Error(err)
	}
}

// A restore into a cluster of which a server is not up yet is tried again until all are.
func TestRestoreBeforeAllServersAreUp(t *testing.T) {
	t.Parallel()
	made, _, server, proxy := restorable(t)
	const openWait = 4 * time.Second
	var refused atomic.Int64
	var first atomic.Pointer[time.Time]
	proxy.instead(func(request string) []byte {
		if !strings.HasPrefix(request, "STREAM.RESTORE.") {
			return nil
		}
		now := time.Now()
		if !first.CompareAndSwap(nil, &now) && now.Sub(*first.Load()) > openWait/2+conn.AskFirst/2 {
			return nil
		}
		refused.Add(1)
		return []byte(`{"error":{"code":400,"err_code":10005,"description":"no suitable peers for placement, peer offline"}}`)
	})
	s := openStore(t, Config{URL: server.ClientURL(), Domain: proxyDomain, openWait: openWait})
	if err := s.Restore(t.Context(), made, RestoreOptions{}); err != nil {
		t.Fatal(err)
	}
	if refused.Load() < 2 {
		t.Errorf("%d requests for a restore were refused", refused.Load())
	}
	to := open(t, Config{URL: server.ClientURL(), Topics: stateful})
	take(t, to, "orders", "g", SubscribeOptions{From: FromEarliest}).payloads(20)
}

// A stream that was just made answers no direct gets for a moment: the first delayed event waits.
func TestTheFirstDelayedEventWaitsForItsStream(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	proxy := startAPIProxy(t, url)
	var asked atomic.Int64
	proxy.leaveUnanswered(func(request string) bool { return request == "DIRECT.GET."+publish.DelayedStream && asked.Add(1) <= 3 })
	b := open(t, Config{URL: url, Domain: proxyDomain})
	if _, err := b.Publish(t.Context(), "later", []byte("1"), PublishOptions{Delay: time.Hour}); err != nil {
		t.Fatal(err)
	}
	if asked.Load() < 4 {
		t.Errorf("%d direct gets", asked.Load())
	}
}
