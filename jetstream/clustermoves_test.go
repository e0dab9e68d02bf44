package jetstream

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/publish"
	"eventhub/jetstream/natstest"
)

// leader is the server that leads a stream.
func (c *natsProcesses) leader(stream string) *natstest.Server {
	c.tb.Helper()
	var at *natstest.Server
	c.until("stream "+stream+" has a leader", func(ctx context.Context) bool {
		info, err := c.info(ctx, stream)
		if err != nil || info.Cluster == nil {
			return false
		}
		i := slices.IndexFunc(c.nodes, func(n *natstest.Server) bool { return n.Name() == info.Cluster.Leader })
		if i >= 0 {
			at = c.nodes[i]
		}
		return i >= 0
	})
	return at
}

// The leader of a topic is killed while a group is moved back under its members, on two hubs. Once
// a move is answered, all events behind the position come again.
func TestAMoveWhileTheLeaderIsKilled(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 3)
	cfg := Config{URL: c.urls(), Replicas: 3}
	one, two := open(t, cfg), open(t, cfg)
	const n = 40
	publishAll(t, one, "moved", numbers(n)...)
	var mu sync.Mutex
	given := make(map[string]int)
	reset := func() { mu.Lock(); clear(given); mu.Unlock() }
	all := func(context.Context) bool { mu.Lock(); defer mu.Unlock(); return len(given) == n }
	var wg sync.WaitGroup
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop); wg.Wait() })
	for _, b := range []*Bus{one, two} {
		k := take(t, b, "moved", "g", SubscribeOptions{From: FromEarliest})
		wg.Go(func() {
			for {
				select {
				case h := <-k.ch:
					if d, ok := h.Begin(); ok {
						mu.Lock()
						given[string(d.Event.Payload)]++
						mu.Unlock()
						_ = d.Ack() // one that is lost comes again
					}
				case <-stop:
					return
				}
			}
		})
	}
	c.until("all events", all)
	killed := c.leader("moved")
	moving := make(chan error, 1)
	go func() { moving <- one.Group("moved", "g").Seek(t.Context(), FromEarliest) }()
	killed.Kill()
	err := <-moving
	c.until("a move is answered", func(context.Context) bool {
		if err != nil {
			reset()
			err = one.Group("moved", "g").Seek(t.Context(), FromEarliest)
		}
		return err == nil
	})
	c.until("all events again", all)
	killed.Start()
	c.healthy("moved")
	// and once more, with all servers
	reset()
	if err := two.Group("moved", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	c.until("all events after the server is back", all)
}

// A server is killed while delayed events come due: each is stored once, and none early.
func TestDelayedEventsWhileAServerIsKilled(t *testing.T) {
	t.Parallel()
	c := startProcesses(t, 3)
	cfg := Config{URL: c.urls(), Replicas: 3, AckWait: 5 * time.Second}
	one := open(t, cfg)
	open(t, cfg)
	publishAll(t, one, "later", "0")
	// the first delayed event makes the stream
	if _, err := one.Publish(t.Context(), "later", []byte("0"), PublishOptions{Delay: time.Hour}); err != nil {
		t.Fatal(err)
	}
	c.healthy("later", publish.DelayedStream)
	const n = 200
	began := time.Now().Add(4 * time.Second)
	due := func(i int) time.Time { return began.Add(time.Duration(i) * 10 * time.Millisecond) }
	for i := range n {
		if _, err := one.Publish(t.Context(), "later", []byte(strconv.Itoa(i)), PublishOptions{ID: fmt.Sprint("e", i), At: due(i)}); err != nil {
			t.Fatal(err)
		}
	}
	killed := c.leader(publish.DelayedStream)
	<-time.After(time.Until(due(n / 2)))
	killed.Kill()
	killed.Start()
	stored := make(map[string]int)
	c.until("all events are stored", func(ctx context.Context) bool {
		clear(stored)
		err := one.History("later").Scan(ctx, ScanOptions{}, func(e *event.Event) error {
			stored[e.ID]++
			if i, err := strconv.Atoi(e.ID[1:]); e.ID[0] == 'e' && err == nil && e.StoredAt < due(i).UnixNano() {
				t.Errorf("%s was stored %v early", e.ID, due(i).Sub(time.Unix(0, e.StoredAt)))
			}
			return nil
		})
		return err == nil && len(stored) >= n+1
	})
	for id, times := range stored {
		if times != 1 {
			t.Errorf("%s is stored %d times", id, times)
		}
	}
	if len(stored) != n+1 {
		t.Errorf("%d events are stored, not %d", len(stored), n+1)
	}
}

// A paused group is paused after its server was killed and started again, and its bookmark knows
// what was settled.
func TestPausesAndBookmarksHoldOverARestart(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	b := open(t, Config{URL: s.URL(), moveWait: briefly})
	publishAll(t, b, "orders", counted(6)...)
	g := b.Group("orders", "g")
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: 6, BatchSize: 6}
	k := take(t, b, "orders", "g", opts)
	left := k.ack(6, func(p string) bool { return p != "2" })
	settledUpTo(t, g, 1)
	if made, err := g.Bookmarks().Put(t.Context(), "m"); err != nil || !made.Exact {
		t.Fatalf("%+v, %v", made, err)
	}
	if err := left[0].Ack(); err != nil {
		t.Fatal(err)
	}
	settledUpTo(t, g, 0)
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Kill()
	s.Start()
	eventually(t, "the server is back", func() bool {
		_, err := b.Publish(t.Context(), "orders", []byte("7"), PublishOptions{ID: "seventh"})
		return err == nil
	})
	var info GroupInfo
	eventually(t, "all connections are back", func() bool {
		var err error
		info, err = g.Info(t.Context())
		return err == nil && b.Ready(t.Context()) == nil
	})
	if !info.Paused {
		t.Errorf("%+v", info)
	}
	k.quiet(time.Second)
	late := take(t, b, "orders", "g", opts)
	late.quiet(500 * time.Millisecond)
	list, err := g.Bookmarks().List(t.Context())
	if err != nil || len(list) != 1 || list[0].Name != "m" || !list[0].Exact {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := g.Move(t.Context(), AtBookmark("m")); err != nil {
		t.Fatal(err)
	}
	late.quiet(500 * time.Millisecond) // it is still paused
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	// 2 was not settled when the bookmark was made, and 7 came later
	if got := late.payloads(2); !slices.Equal(got, []string{"2", "7"}) {
		t.Errorf("got %q", got)
	}
	late.quiet(500 * time.Millisecond)
}
