package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	psutil "github.com/shirou/gopsutil/v4/process"

	"eventhub/jetstream/natstest"
)

var (
	growthKeys    = flag.Int("growth.keys", 2_000, "keys, each with one event, of the memory of a server by subjects and by ids")
	growthStreams = flag.Int("growth.streams", 0, "replicated streams, each with a group, of the start and memory of a cluster")
)

// resident is the memory of a server in MiB.
func resident(t *testing.T, s *natstest.Server) float64 {
	t.Helper()
	p, err := psutil.NewProcess(int32(s.PID()))
	if err != nil {
		t.Fatal(err)
	}
	memory, err := p.MemoryInfo()
	if err != nil {
		t.Fatal(err)
	}
	return float64(memory.RSS) / (1 << 20)
}

// The memory of a server grows with the number of keys of a topic, and with the ids in the
// duplicate window, and not with events of which each has the same key and no id.
func TestGrowthOfTheServer(t *testing.T) {
	if *growthStreams > 0 {
		t.Run("replicated streams", growByReplicatedStreams)
	}
	for _, kind := range []struct {
		name    string
		message func(i int) *nats.Msg
	}{
		{"one key, no ids", func(int) *nats.Msg { return nats.NewMsg("keyed.k.topic") }},
		{"one key, an id each", func(i int) *nats.Msg {
			m := nats.NewMsg("keyed.k.topic")
			m.Header.Set(nats.MsgIdHdr, fmt.Sprintf("00000000-0000-7000-8000-%012d", i))
			return m
		}},
		{"a key each, no ids", func(i int) *nats.Msg { return nats.NewMsg("keyed.key-" + strconv.Itoa(i) + ".topic") }},
	} {
		t.Run(kind.name, func(t *testing.T) {
			server := natstest.Start(t)
			look := natstest.Look(t, server.URL())
			stream, err := look.JS.CreateStream(t.Context(), natsjs.StreamConfig{Name: "topic", Subjects: []string{"keyed.*.topic"}, Duplicates: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			before := resident(t, server)
			storeAll(t, look.JS, *growthKeys, func(i int) *nats.Msg {
				m := kind.message(i)
				m.Data = make([]byte, 128)
				return m
			})
			after := resident(t, server)
			server.Stop()
			began := time.Now()
			server.Start()
			look.Until("the stream is there", func(ctx context.Context) bool {
				info, err := stream.Info(ctx)
				return err == nil && info.State.Msgs == uint64(*growthKeys)
			})
			t.Logf("%d events: %.0f MiB before, %.0f MiB after, %.0f bytes for each; again there %v after a start, with %.0f MiB",
				*growthKeys, before, after, (after-before)*(1<<20)/float64(*growthKeys), time.Since(began).Round(time.Millisecond), resident(t, server))
		})
	}
}

// growByReplicatedStreams restarts a cluster of three servers with many replicated streams, each
// with a group.
func growByReplicatedStreams(t *testing.T) {
	t.Helper()
	servers := natstest.StartCluster(t, 3)
	look := natstest.Look(t, natstest.URLs(servers)...)
	look.Replicating(3)
	memory := func() (sum float64) {
		for _, s := range servers {
			sum += resident(t, s) / float64(len(servers))
		}
		return sum
	}
	before, began := memory(), time.Now()
	eachStream(t, "make the stream and its group", func(ctx context.Context, name string) error {
		if _, err := look.JS.CreateOrUpdateStream(ctx, natsjs.StreamConfig{Name: name, Subjects: []string{"event." + name}, Replicas: 3}); err != nil {
			return err
		}
		_, err := look.JS.CreateOrUpdateConsumer(ctx, name, natsjs.ConsumerConfig{Durable: "g", AckPolicy: natsjs.AckExplicitPolicy})
		return err
	})
	made, after := time.Since(began), memory()
	idle := busy(t, servers, 5*time.Second)
	for _, s := range servers {
		s.Kill()
	}
	began = time.Now()
	for _, s := range servers {
		s.Start()
	}
	eachStream(t, "store in the stream, and find its group", func(ctx context.Context, name string) error {
		if _, err := look.JS.Publish(ctx, "event."+name, []byte("1")); err != nil {
			return err
		}
		_, err := look.JS.Consumer(ctx, name, "g")
		return err
	})
	t.Logf("%d streams with a group each: %.0f MiB a server before, %.0f after (%.0f KiB for each), made in %v; idle, the servers take %.1f %% of a core together; all work again %v after a start, with %.0f MiB",
		*growthStreams, before, after, (after-before)*1024/float64(*growthStreams), made.Round(time.Millisecond), idle, time.Since(began).Round(time.Millisecond), memory())
}

// eachStream does something with all streams, some at a time, again until it works.
func eachStream(t *testing.T, what string, do func(ctx context.Context, name string) error) {
	t.Helper()
	const atATime = 16
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range atATime {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < *growthStreams; i = int(next.Add(1)) - 1 {
				name := "s" + strconv.Itoa(i)
				for {
					try, stop := context.WithTimeout(ctx, 5*time.Second)
					err := do(try, name)
					stop()
					if err == nil {
						break
					}
					select {
					case <-time.After(20 * time.Millisecond):
					case <-ctx.Done():
						t.Errorf("%s %s: %v", what, name, err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// busy is how much of a core the servers take while nobody asks them anything, in percent.
func busy(t *testing.T, servers []*natstest.Server, d time.Duration) (percent float64) {
	t.Helper()
	used := func() (sum float64) {
		for _, s := range servers {
			p, err := psutil.NewProcess(int32(s.PID()))
			if err != nil {
				t.Fatal(err)
			}
			times, err := p.Times()
			if err != nil {
				t.Fatal(err)
			}
			sum += times.User + times.System
		}
		return sum
	}
	before, began := used(), time.Now()
	<-time.After(d)
	return (used() - before) / time.Since(began).Seconds() * 100
}
