package jetstream

import (
	"errors"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// rejectEvents is how many events TestRejectLosesNothing publishes. RELIABILITY.md has a run with
// 1,000,000.
var rejectEvents = flag.Int("reject-events", 2_000, "events of TestRejectLosesNothing")

func isTopicFull(err error) bool {
	e, ok := errors.AsType[*event.Error](err)
	return ok && e.Code == event.CodeTopicFull
}

// Two hubs publish ten times as many events as there is room for, and two groups read them on both:
// one faster, one slower. Everything that was confirmed is read by both.
func TestRejectLosesNothing(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(fmt.Sprintf("on %d", servers), func(t *testing.T) {
			t.Parallel()
			url := natsServers(t, servers)
			events := *rejectEvents / 2 / servers * 2
			seen := new(losses)
			cfg := Config{
				URL: url, Replicas: servers, Observer: seen,
				Topics: []topics.Rule{{Pattern: "orders", MaxMsgs: int64(events / 10), MaxBytes: int64(events / 10 * 100), OnFull: topics.OnFullReject, MaxAge: time.Second, DuplicateWindow: time.Second}},
			}
			a, b := open(t, cfg), open(t, cfg)
			var got [2][]atomic.Int32
			var left [2]atomic.Int64
			for g := range got {
				got[g] = make([]atomic.Int32, events)
				left[g].Store(int64(events))
				for i, bus := range []*Bus{a, b} {
					k := take(t, bus, "orders", fmt.Sprint("g", g), SubscribeOptions{From: FromEarliest, MaxInFlight: 500})
					var done sync.WaitGroup
					t.Cleanup(func() { _ = k.sub.Stop(t.Context()); close(k.ch); done.Wait() })
					done.Go(func() {
						for h := range k.ch {
							d, ok := h.Begin()
							if !ok {
								continue
							}
							var n int
							if _, err := fmt.Sscan(string(d.Event.Payload), &n); err != nil {
								t.Error(err)
								return
							}
							if g == 1 && i == 0 && n%1000 == 0 { // slower now and then
								select {
								case <-time.After(20 * time.Millisecond):
								case <-t.Context().Done():
									return
								}
							}
							if d.Ack() == nil && got[g][n].Add(1) == 1 {
								left[g].Add(-1)
							}
						}
					})
				}
			}
			var publishers sync.WaitGroup
			var refusals atomic.Int64
			began := time.Now()
			for p := range 8 {
				publishers.Go(func() {
					bus := []*Bus{a, b}[p%2]
					pub := bus.NewPublisher()
					for n := p; n < events; n += 8 {
						for {
							_, err := pub.Publish(t.Context(), "orders", fmt.Append(nil, n), PublishOptions{ID: strconv.Itoa(n)})
							if err == nil {
								break
							}
							if !isTopicFull(err) {
								t.Errorf("publish: %v", err)
								return
							}
							refusals.Add(1)
							select {
							case <-time.After(5 * time.Millisecond):
							case <-t.Context().Done():
								return
							}
						}
					}
				})
			}
			publishers.Wait()
			took := time.Since(began)
			for g := range got {
				eventually(t, "all events", func() bool { return left[g].Load() == 0 })
			}
			if seen.count() != 0 {
				t.Errorf("%d events are counted as lost", seen.count())
			}
			t.Logf("%d events in %v with a bound of %d, %d refusals", events, took.Round(time.Millisecond), events/10, refusals.Load())
		})
	}
}

// A group that does not acknowledge stops publishers, native ones too, and age does not remove what
// it has not read. When it goes on, there is room again.
func TestRejectWaitsForTheSlowest(t *testing.T) {
	t.Parallel()
	for name, rule := range map[string]topics.Rule{
		"messages": {Pattern: "orders", MaxMsgs: 10, MaxAge: time.Second, DuplicateWindow: time.Second, OnFull: topics.OnFullReject},
		"bytes":    {Pattern: "orders", MaxBytes: 2000, OnFull: topics.OnFullReject},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := natsServer(t)
			b := open(t, Config{URL: url, Topics: []topics.Rule{rule}})
			g := take(t, b, "orders", "slow", SubscribeOptions{From: FromEarliest, MaxInFlight: 1})
			fast := take(t, b, "orders", "fast", SubscribeOptions{From: FromEarliest})
			n := 0
			var err error
			for ; err == nil && n < 1000; n++ {
				_, err = b.Publish(t.Context(), "orders", fmt.Append(nil, n), PublishOptions{})
			}
			n-- // the last was refused
			if !isTopicFull(err) || rule.MaxMsgs > 0 && n != 10 || n < 8 {
				t.Fatalf("publish %d: %v", n, err)
			}
			fast.payloads(n)
			nc, err := nats.Connect(url)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			reply, err := nc.Request("event.orders", make([]byte, 200), wait)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := conn.ParsePubAck(reply.Data, "orders"); !streams.Beyond(err) {
				t.Fatalf("a native publisher got %s", reply.Data)
			}
			d := g.next()
			// longer than the age, and than the looks at the topic
			<-time.After(2500 * time.Millisecond)
			if first := firstOf(t, b); first != 1 {
				t.Fatalf("the topic begins at %d; the slow group holds 1", first)
			}
			if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
			if got := g.payloads(n - 1); got[n-2] != strconv.Itoa(n-1) {
				t.Fatalf("got %v", got)
			}
			eventually(t, "room", func() bool {
				_, err := b.Publish(t.Context(), "orders", fmt.Append(nil, n), PublishOptions{})
				return err == nil
			})
			if got := g.payloads(1); got[0] != strconv.Itoa(n) {
				t.Fatalf("got %v", got)
			}
		})
	}
}

// ignoring counts groups that hold nothing any more.
type ignoring struct {
	event.NopObserver
	groups atomic.Int32
}

func (i *ignoring) Topic(string) event.TopicObserver { return i }
func (i *ignoring) GroupIgnored()                    { i.groups.Add(1) }

// A group without members holds a topic no longer than its age; one with members does, however long
// they take.
func TestDeadGroupHoldsNothing(t *testing.T) {
	t.Parallel()
	server := natstest.Embed(t, t.TempDir())
	seen := new(ignoring)
	b := open(t, Config{Server: server, Observer: seen, Topics: []topics.Rule{{Pattern: "orders", MaxMsgs: 10, OnFull: topics.OnFullReject, GroupAge: 2 * time.Second}}})
	dead := take(t, b, "orders", "dead", SubscribeOptions{From: FromEarliest, MaxInFlight: 1})
	alive := take(t, b, "orders", "alive", SubscribeOptions{From: FromEarliest, MaxInFlight: 1})
	fillFrom(t, b, "orders", 0, 9)
	alive.payloads(3)
	held := alive.next()
	if err := dead.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the dead group is ignored", func() bool { return seen.groups.Load() == 1 })
	<-time.After(2500 * time.Millisecond)
	if first := firstOf(t, b); first > held.Event.Sequence {
		t.Fatalf("the topic begins at %d; the live group holds %d", first, held.Event.Sequence)
	}
	eventually(t, "the topic is full", func() bool {
		_, err := b.Publish(t.Context(), "orders", []byte("x"), PublishOptions{})
		return isTopicFull(err)
	})
	if err := held.Ack(); err != nil {
		t.Fatal(err)
	}
	alive.payloads(8)
	eventually(t, "room", func() bool {
		_, err := b.Publish(t.Context(), "orders", []byte("x"), PublishOptions{})
		return err == nil
	})
	if seen.groups.Load() != 1 {
		t.Errorf("%d groups are ignored", seen.groups.Load())
	}
}
