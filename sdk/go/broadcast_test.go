package eventhub_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/facade"
	"eventhub/facade/hubtest"
	"eventhub/jetstream"
	"eventhub/jetstream/topics"
	eventhub "eventhub/sdk/go"
)

// news is what came of a broadcast, in order.
type news struct{ list[string] }

func (n *news) event(_ context.Context, e *eventhub.BroadcastEvent) {
	text := string(e.Payload)
	if e.Key != "" {
		text = e.Key + "=" + text
	}
	if e.Snapshot {
		text = "snapshot " + text
	}
	if e.Tombstone {
		text = e.Key + " gone"
	}
	n.add(text)
}

// options are opts that note all that comes.
func (n *news) options(opts eventhub.BroadcastOptions) eventhub.BroadcastOptions {
	opts.OnGap = func(g eventhub.Gap) {
		if g.From == "" || g.To == "" || g.From == g.To {
			n.add(fmt.Sprintf("bad %+v", g))
		}
		n.add(fmt.Sprintf("gap %d", g.Missed))
	}
	opts.OnReset = func(r eventhub.Reset) { n.add("reset " + r.Reason) }
	opts.OnSnapshot = func(string) { n.add("current") }
	return opts
}

func (n *news) wants(t *testing.T, want ...string) {
	t.Helper()
	deadline := time.After(patience)
	for {
		got := n.get()
		if slices.Equal(got, want) {
			return
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-deadline:
			at := 0
			for at < min(len(got), len(want)) && got[at] == want[at] {
				at++
			}
			t.Fatalf("from number %d on: got %.500s\nwant %.500s", at, fmt.Sprint(got[at:]), fmt.Sprint(want[at:]))
		}
	}
}

// endsWith waits until an event came. Then the hub's own reader of the topic is behind the event: a
// hub whose reader is late has more to give to a broadcast that comes again than the topic holds.
func (n *news) endsWith(t *testing.T, text string) {
	t.Helper()
	eventually(t, "the hub has read "+text, func() bool {
		all := n.get()
		return len(all) > 0 && all[len(all)-1] == text
	})
}

func follow(t *testing.T, c *eventhub.Client, topic string, opts eventhub.BroadcastOptions, h eventhub.BroadcastHandler) *eventhub.Broadcast {
	t.Helper()
	b, err := c.Broadcast(t.Context(), topic, opts, h)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func count(from, to int) (all []string) {
	for i := from; i <= to; i++ {
		all = append(all, strconv.Itoa(i))
	}
	return all
}

func put(t *testing.T, c *eventhub.Client, topic, key string, payload any) {
	t.Helper()
	if _, err := c.Publish(t.Context(), topic, payload, eventhub.PublishOptions{Key: key}); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, c *eventhub.Client, topic, key string) {
	t.Helper()
	if _, err := c.Publish(t.Context(), topic, nil, eventhub.PublishOptions{Key: key, Tombstone: true}); err != nil {
		t.Fatal(err)
	}
}

func publishCount(t *testing.T, c *eventhub.Client, topic string, from, to int) {
	t.Helper()
	for i := from; i <= to; i++ {
		publish(t, c, topic, i)
	}
}

// compacted is a hub whose topics c.* are compacted.
func compacted(t *testing.T, change ...func(*facade.Config)) *hubtest.Hub {
	t.Helper()
	opts := []hubtest.Option{hubtest.Topics(topics.Rule{Pattern: "c.*", Compaction: true})}
	for _, f := range change {
		opts = append(opts, hubtest.Facade(f))
	}
	return hubtest.New(t, opts...)
}

// keysStored waits until a snapshot has so many events of a topic's stream.
func keysStored(t *testing.T, hub *hubtest.Hub, topic string, n int) {
	t.Helper()
	eventually(t, "the snapshot has all events", func() bool {
		upTo, err := hub.Bus.Keys(topic).Snapshot(t.Context(), func(*jetstream.Event) error { return nil })
		return err == nil && upTo == uint64(n)
	})
}

func TestABroadcastGivesEveryEventInOrderFromWhereItIsAsked(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	topic := newTopic()
	publishCount(t, c, topic, 1, 20)
	var ids, places list[string]
	all := follow(t, c, topic, eventhub.BroadcastOptions{History: 1000}, func(_ context.Context, e *eventhub.BroadcastEvent) {
		ids.add(e.ID)
		places.add(e.Pos)
	})
	if all.Topic() != topic {
		t.Error(all.Topic())
	}
	eventually(t, "20 events", func() bool { return len(ids.get()) == 20 })
	for i, opts := range []eventhub.BroadcastOptions{
		{},
		{History: 5},
		{From: eventhub.FromAfterID, AfterID: ids.get()[14]},
		{From: eventhub.FromPos, Pos: places.get()[14]},
		{From: eventhub.FromTS, TS: new(int64)},
		{From: eventhub.FromLatest},
	} {
		var got news
		other := connect(t, hub.WebSocket, fast(hub.Token))
		follow(t, other, topic, got.options(opts), got.event)
		publish(t, c, topic, 21+i)
		first := []int{21, 17, 16, 16, 1, 21}[i]
		if first == 21 {
			first += i
		}
		got.wants(t, count(first, 21+i)...)
	}
}

func TestABroadcastHandsOnWholeEvents(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	topic := newTopic()
	events := make(chan *eventhub.BroadcastEvent, 1)
	follow(t, c, topic, eventhub.BroadcastOptions{}, func(_ context.Context, e *eventhub.BroadcastEvent) { events <- e })
	ts := int64(5)
	id, err := c.Publish(t.Context(), topic, "ü", eventhub.PublishOptions{Key: "k", TS: &ts, Headers: map[string]string{"a": "b"}, Tags: []string{"x"}, CausedBy: []string{"y"}, SID: "s"})
	if err != nil {
		t.Fatal(err)
	}
	e := receive(t, "the event", events)
	got := fmt.Sprintln(e.ID == id, e.TS, e.Topic == topic, e.Key, e.SID, e.Headers, e.Tags, e.CausedBy, string(e.Payload), e.Pos != "", e.Snapshot, e.Tombstone)
	if want := `true 5 true k s map[a:b] [x] [y] "ü" true false false` + "\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// cutAnywhere cuts connections at random places until told to stop.
func cutAnywhere(t *testing.T, p *proxy, most int) (stop func()) {
	t.Helper()
	over := make(chan struct{})
	var cutting sync.WaitGroup
	cutting.Go(func() {
		for {
			p.cutAfter(rand.IntN(most))
			select {
			case <-over:
				p.cutAfter(-1)
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	stop = sync.OnceFunc(func() {
		close(over)
		cutting.Wait()
	})
	t.Cleanup(stop)
	return stop
}

func TestABroadcastMissesAndDoublesNothingOverCutsAnywhere(t *testing.T) {
	t.Parallel()
	for _, opts := range []eventhub.BroadcastOptions{{QueueEvents: 100_000}, {QueueEvents: 100_000, History: 10}, {Slow: eventhub.SlowCatchUp, QueueEvents: 3}} {
		t.Run(opts.Slow, func(t *testing.T) {
			t.Parallel()
			hub := hubtest.New(t)
			p := startProxy(t, hub.WebSocket)
			options, states := watched(hub.Token)
			c, writer := connect(t, p.url, options), connect(t, hub.WebSocket, fast(hub.Token))
			topic := newTopic()
			publish(t, writer, topic, 0)
			first := 1
			if opts.History > 0 {
				first = 0
			}
			var got news
			follow(t, c, topic, got.options(opts), got.event)
			stop := cutAnywhere(t, p, 4000)
			// Ten cuts have 50 states.
			last := 0
			for deadline := time.Now().Add(patience); last < 300 || len(states.get()) < 50; {
				if last++; time.Now().After(deadline) {
					t.Fatalf("there were few cuts: %v", states.get())
				}
				publish(t, writer, topic, last)
			}
			stop()
			publishCount(t, writer, topic, last+1, last+10)
			got.wants(t, count(first, last+10)...)
		})
	}
}

func TestASnapshotComesFirstAndAgainWhenItIsCut(t *testing.T) {
	t.Parallel()
	hub := compacted(t)
	p := startProxy(t, hub.WebSocket)
	c, writer := connect(t, p.url, fast(hub.Token)), connect(t, hub.WebSocket, fast(hub.Token))
	const topic = "c.state"
	for i := range 10 {
		put(t, writer, topic, "k"+strconv.Itoa(i%5), i)
	}
	remove(t, writer, topic, "k0")
	keysStored(t, hub, topic, 11)
	var snapshot []string
	for i := range 4 {
		snapshot = append(snapshot, fmt.Sprintf("snapshot k%d=%d", i+1, i+6))
	}
	// Cuts after each number of bytes that the answer and the snapshot may have.
	for n := 0; n <= 1000; n += 100 {
		var got news
		p.cutAfter(n)
		b := follow(t, c, topic, got.options(eventhub.BroadcastOptions{Snapshot: true}), got.event)
		current := func() bool { return slices.Contains(got.get(), "current") }
		eventually(t, "the state", current)
		p.cutAfter(-1)
		put(t, writer, topic, "k1", 6)
		eventually(t, "the change", func() bool { all := got.get(); return all[len(all)-1] == "k1=6" })
		all := got.get()
		if at := slices.Index(all, "reset snapshot"); at >= 0 {
			for i, text := range all[:at] {
				if text != snapshot[i] {
					t.Fatalf("after %d bytes: %q", n, all)
				}
			}
			all = all[at+1:]
		}
		if want := append(slices.Clone(snapshot), "current", "k1=6"); n > 0 && len(all) != len(want) || !slices.Contains(all, "snapshot k4=9") {
			t.Fatalf("after %d bytes: %q", n, all)
		}
		if err := b.Unsubscribe(t.Context()); err != nil {
			t.Fatal(err)
		}
		keysStored(t, hub, topic, 12+n/100)
		// The newest of k1 is now the last of the snapshot.
		snapshot = []string{"snapshot k2=7", "snapshot k3=8", "snapshot k4=9", "snapshot k1=6"}
	}
}

// A broadcast that is cut behind its snapshot goes on, and does not get the snapshot again.
func TestABroadcastGoesOnBehindItsSnapshot(t *testing.T) {
	t.Parallel()
	hub := compacted(t)
	p := startProxy(t, hub.WebSocket)
	opts, states := watched(hub.Token)
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	put(t, writer, "c.s", "a", 1)
	keysStored(t, hub, "c.s", 1)
	var got news
	follow(t, c, "c.s", got.options(eventhub.BroadcastOptions{Snapshot: true}), got.event)
	got.wants(t, "snapshot a=1", "current")
	cutOnce(t, p, c, states)
	put(t, writer, "c.s", "a", 2)
	remove(t, writer, "c.s", "a")
	got.wants(t, "snapshot a=1", "current", "a=2", "a gone")
}

// lose has a client without a connection while f runs.
func lose(t *testing.T, p *proxy, c *eventhub.Client, f func()) {
	t.Helper()
	p.refuse(true)
	p.cut()
	eventually(t, "no connection", func() bool { return c.State() != eventhub.StateReady })
	f()
	p.refuse(false)
	eventually(t, "a connection", func() bool { return c.State() == eventhub.StateReady })
}

func TestWhatABroadcastMissedIsToldExactly(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Topics(topics.Rule{Pattern: "short", MaxMsgs: 20}, topics.Rule{Pattern: "**"}),
		hubtest.Facade(func(c *facade.Config) { c.Limits.RingFrames, c.Limits.CatchUp = 16, 30 }))
	p := startProxy(t, hub.WebSocket)
	c, writer := connect(t, p.url, fast(hub.Token)), connect(t, hub.WebSocket, fast(hub.Token))
	for _, test := range []struct {
		topic  string
		missed int
		want   []string
	}{
		{"short", 25, append([]string{"0", "reset truncated", "gap 5"}, count(6, 26)...)},
		{"long", 25, append([]string{"0"}, count(1, 26)...)},
		{"far", 100, []string{"0", "reset too_far", "gap 100", "101"}},
	} {
		var got, seen news
		follow(t, c, test.topic, got.options(eventhub.BroadcastOptions{}), got.event)
		follow(t, writer, test.topic, seen.options(eventhub.BroadcastOptions{Slow: eventhub.SlowCatchUp}), seen.event)
		publish(t, writer, test.topic, 0)
		got.wants(t, "0")
		lose(t, p, c, func() {
			publishCount(t, writer, test.topic, 1, test.missed)
			seen.endsWith(t, strconv.Itoa(test.missed))
		})
		eventually(t, "all that is left", func() bool {
			all := got.get()
			return slices.Contains([]string{strconv.Itoa(test.missed), "gap 100"}, all[len(all)-1])
		})
		publish(t, writer, test.topic, test.missed+1)
		got.wants(t, test.want...)
	}
}

func TestATopicThatIsMadeAnewResetsABroadcastAndOneThatIsDeletedEndsIt(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	var errs list[string]
	opts := fast(hub.Token)
	opts.OnError = func(err error) { errs.add(err.Error()) }
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	drop := func() {
		if err := hub.Bus.Admin().Topic("t").Delete(t.Context(), jetstream.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var got news
	b := follow(t, c, "t", got.options(eventhub.BroadcastOptions{}), got.event)
	publish(t, writer, "t", 1)
	got.wants(t, "1")
	other := follow(t, writer, "t", eventhub.BroadcastOptions{}, func(context.Context, *eventhub.BroadcastEvent) {})
	lose(t, p, c, func() {
		drop()
		receive(t, "the hub knows", other.Done())
		publishCount(t, writer, "t", 2, 3)
	})
	got.wants(t, "1", "reset stream_changed")
	publish(t, writer, "t", 4)
	got.wants(t, "1", "reset stream_changed", "4")
	drop()
	receive(t, "the end", b.Done())
	failsWith(t, b.Err(), "not_subscribed", false)
	eventually(t, "the error", func() bool { return slices.Equal(errs.get(), []string{"not_subscribed: t"}) })
	follow(t, c, "t", eventhub.BroadcastOptions{}, got.event)
}

// Slow network: the hub leaves events out, and says how many.
func TestAGapOfTheHubIsTold(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Facade(func(c *facade.Config) { c.Limits.RingFrames, c.Limits.WriteStall = 16, time.Hour }))
	p := startProxy(t, hub.WebSocket)
	opts := fast(hub.Token)
	opts.PingEvery = time.Hour
	c, writer := connect(t, p.url, opts), connect(t, hub.WebSocket, fast(hub.Token))
	var events, missed atomic.Int64
	var gaps, bad atomic.Int64
	last := ""
	follow(t, c, "t", eventhub.BroadcastOptions{QueueEvents: 10_000, QueueBytes: 1 << 30, OnGap: func(g eventhub.Gap) {
		gaps.Add(1)
		missed.Add(int64(g.Missed))
		if g.From != last || g.Missed == 0 {
			bad.Add(1)
		}
		last = g.To
	}}, func(_ context.Context, e *eventhub.BroadcastEvent) {
		last = e.Pos
		events.Add(1)
	})
	publish(t, writer, "t", "first")
	eventually(t, "the first", func() bool { return events.Load() == 1 })
	release := p.hold()
	defer release()
	fill := strings.Repeat("x", 200_000)
	const n = 60
	for range n {
		publish(t, writer, "t", fill)
	}
	release()
	eventually(t, "all are accounted for", func() bool { return events.Load()+missed.Load() == n+1 })
	if gaps.Load() == 0 || bad.Load() != 0 {
		t.Errorf("%d gaps, %d of them not in their places", gaps.Load(), bad.Load())
	}
}

func TestASlowHandlerHoldsUpItsBroadcastAlone(t *testing.T) {
	t.Parallel()
	for slow, want := range map[string][]string{
		// A full queue of 4 gives way to what comes next: 1 is handled, and 2 to 21 come. The
		// gap has a place in the queue, but few bytes.
		"":                   {"1", "gap 19", "21"},
		eventhub.SlowSkip:    {"1", "gap 19", "21"},
		eventhub.SlowCatchUp: count(1, 21),
		eventhub.SlowClose:   {"1"},
		"bytes":              {"1", "gap 16", "18", "19", "20", "21"},
		"conflate":           {"1", "k0=20", "k1=21"},
	} {
		t.Run(slow, func(t *testing.T) {
			t.Parallel()
			hub := hubtest.New(t)
			c := connect(t, hub.WebSocket, fast(hub.Token))
			topic, other := newTopic(), newTopic()
			begun, released := make(chan struct{}, 1), make(chan struct{})
			release := sync.OnceFunc(func() { close(released) })
			defer release()
			var got news
			opts := eventhub.BroadcastOptions{Slow: slow, QueueEvents: 4}
			key := func(int) string { return "" }
			switch slow {
			case "bytes":
				opts.Slow, opts.QueueEvents, opts.QueueBytes = "", 0, 4*len(`{"id":"01a1fa34-9435-74c0-8d8a-9118e406c410","ts":1795199112245,"topic":"","payload":21}`)+4*len(topic)
			case "conflate":
				opts.Slow, opts.ConflateByKey = "", true
				key = func(i int) string { return "k" + strconv.Itoa(i%2) }
			}
			b := follow(t, c, topic, got.options(opts), func(ctx context.Context, e *eventhub.BroadcastEvent) {
				if string(e.Payload) == "1" {
					begun <- struct{}{}
					<-released
				}
				got.event(ctx, e)
			})
			publish(t, c, topic, 1)
			receive(t, "the first", begun)
			for i := 2; i <= 21; i++ {
				put(t, c, topic, key(i), i)
			}
			// Other subscriptions of the connection go on.
			handled := make(chan struct{})
			subscribe(t, c, other, "g", eventhub.SubscribeOptions{}, func(context.Context, *eventhub.Delivery) error {
				close(handled)
				return nil
			})
			publish(t, c, other, 0)
			receive(t, "the event of another topic", handled)
			last := make(chan struct{})
			d := connect(t, hub.WebSocket, fast(hub.Token))
			follow(t, d, topic, eventhub.BroadcastOptions{History: 1}, func(_ context.Context, e *eventhub.BroadcastEvent) {
				if string(e.Payload) == "21" {
					close(last)
				}
			})
			receive(t, "the last event at another client", last)
			release()
			got.wants(t, want...)
			switch slow {
			case eventhub.SlowClose:
				receive(t, "the end", b.Done())
				failsWith(t, b.Err(), eventhub.CodeBufferFull, true)
			case eventhub.SlowCatchUp:
				publish(t, c, topic, 22)
				got.wants(t, append(slices.Clone(want), "22")...)
			}
		})
	}
}

func TestPresenceOfABroadcast(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Token("the hub's own token"), hubtest.Topics(topics.Rule{Pattern: "room", Presence: true}),
		hubtest.Policy("alice", "the token of alice", `{"rules":[{"effect":"allow","action":"subscribe","topics":["**"]}]}`))
	c := connect(t, hub.WebSocket, fast("the hub's own token"))
	var names list[string]
	follow(t, c, "room", eventhub.BroadcastOptions{OnPresence: func(p eventhub.Presence) {
		for _, name := range p.Joined {
			names.add("+" + name + " " + strconv.Itoa(p.Count))
		}
		for _, name := range p.Left {
			names.add("-" + name + " " + strconv.Itoa(p.Count))
		}
	}}, func(context.Context, *eventhub.BroadcastEvent) {})
	has := func(text string) func() bool {
		return func() bool {
			return slices.ContainsFunc(names.get(), func(s string) bool { return strings.HasPrefix(s, text) })
		}
	}
	alice := connect(t, hub.WebSocket, fast("the token of alice"))
	b := follow(t, alice, "room", eventhub.BroadcastOptions{}, func(context.Context, *eventhub.BroadcastEvent) {})
	eventually(t, "alice comes", has("+alice 2"))
	if err := b.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
	eventually(t, "alice leaves", has("-alice 1"))
	_, err := alice.Broadcast(t.Context(), "room", eventhub.BroadcastOptions{OnPresence: func(eventhub.Presence) {}}, nil)
	failsWith(t, err, "forbidden", false)
	_, err = c.Broadcast(t.Context(), "other", eventhub.BroadcastOptions{OnPresence: func(eventhub.Presence) {}}, nil)
	failsWith(t, err, "bad_options", false)
}

func TestABroadcastThatIsRefused(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t, hubtest.Policy("narrow", "a narrow token", `{"rules":[{"effect":"allow","action":"subscribe","topics":["open"]},{"effect":"allow","action":"subscribe","topics":["grouped"],"groups":["g"]}]}`))
	c := connect(t, hub.WebSocket, fast("a narrow token"))
	none := func(context.Context, *eventhub.BroadcastEvent) {}
	try := func(topic string, opts eventhub.BroadcastOptions) error {
		_, err := c.Broadcast(t.Context(), topic, opts, none)
		return err
	}
	failsWith(t, try("closed", eventhub.BroadcastOptions{}), "forbidden", false)
	failsWith(t, try("grouped", eventhub.BroadcastOptions{}), "forbidden", false)
	failsWith(t, try("open", eventhub.BroadcastOptions{History: 1, Snapshot: true}), "bad_options", false)
	failsWith(t, try("open", eventhub.BroadcastOptions{Slow: "never"}), "bad_options", false)
	failsWith(t, try("open", eventhub.BroadcastOptions{Extra: map[string]any{"history": -1}}), "bad_options", false)
	failsWith(t, try("open", eventhub.BroadcastOptions{QueueEvents: -1}), "bad_options", false)
	failsWith(t, try("open", eventhub.BroadcastOptions{Snapshot: true}), "bad_topic", false)
	if err := try("open", eventhub.BroadcastOptions{MinInterval: time.Millisecond}); err != nil {
		t.Error(err)
	}
	failsWith(t, try("open", eventhub.BroadcastOptions{}), "already_subscribed", false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.Broadcast(ctx, "x", eventhub.BroadcastOptions{}, none)
	failsWith(t, err, eventhub.CodeAborted, false)
	shut(c)
	failsWith(t, try("open", eventhub.BroadcastOptions{}), eventhub.CodeClosed, false)
}

func TestANewTokenThatForbidsABroadcastEndsIt(t *testing.T) {
	t.Parallel()
	hub := jwtHub(t)
	kept, gone := newTopic(), newTopic()
	var asked atomic.Int64
	opts := fast("")
	opts.TokenProvider = func(context.Context) (string, error) {
		if asked.Add(1) > 1 {
			return scoped(time.Hour, "narrow", "subscribe:"+kept), nil
		}
		return scoped(3*time.Second, "wide", "subscribe:"+kept, "subscribe:"+gone), nil
	}
	c := connect(t, hub.WebSocket, opts)
	var got news
	follow(t, c, kept, got.options(eventhub.BroadcastOptions{}), got.event)
	b := follow(t, c, gone, eventhub.BroadcastOptions{}, got.event)
	receive(t, "the end", b.Done())
	failsWith(t, b.Err(), "forbidden", false)
	publish(t, connect(t, hub.WebSocket, fast("the hub's own token")), kept, 1)
	got.wants(t, "1")
}

func TestABroadcastEndsWhenItIsTold(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	topic := newTopic()
	var got news
	// From its own handler.
	var b *eventhub.Broadcast
	set := make(chan struct{})
	b = follow(t, c, topic, eventhub.BroadcastOptions{}, func(ctx context.Context, e *eventhub.BroadcastEvent) {
		<-set
		got.event(ctx, e) // first: the broadcast ends while its handler runs
		if err := b.Unsubscribe(t.Context()); err != nil {
			t.Error(err)
		}
		if ctx.Err() == nil {
			t.Error("the context goes on")
		}
	})
	close(set)
	publish(t, c, topic, 1, 2)
	receive(t, "the end", b.Done())
	if b.Err() != nil {
		t.Error(b.Err())
	}
	// With its context, and then again.
	ctx, cancel := context.WithCancel(t.Context())
	b, err := c.Broadcast(ctx, topic, eventhub.BroadcastOptions{}, got.event)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	receive(t, "the end", b.Done())
	if err := b.Unsubscribe(t.Context()); err != nil {
		t.Error(err)
	}
	follow(t, c, topic, eventhub.BroadcastOptions{}, got.event)
	publish(t, c, topic, 3)
	got.wants(t, "1", "3")
}

func TestCloseLetsTheHandlerOfABroadcastFinish(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	c := connect(t, hub.WebSocket, fast(hub.Token))
	topic := newTopic()
	begun, released := make(chan struct{}, 10), make(chan struct{})
	release := sync.OnceFunc(func() { close(released) })
	defer release()
	var got news
	follow(t, c, topic, eventhub.BroadcastOptions{}, func(ctx context.Context, e *eventhub.BroadcastEvent) {
		begun <- struct{}{}
		select {
		case <-released:
		case <-ctx.Done():
			t.Error("the context ended")
		}
		got.event(ctx, e)
	})
	publish(t, c, topic, 1, 2, 3)
	receive(t, "the first", begun)
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	release()
	if err := receive(t, "the end", closed); err != nil {
		t.Error(err)
	}
	if all := got.get(); len(all) == 0 || all[0] != "1" {
		t.Errorf("got %q", all)
	}
	// Without time, the handler's context ends.
	c = connect(t, hub.WebSocket, fast(hub.Token))
	again := make(chan struct{}, 2)
	follow(t, c, topic, eventhub.BroadcastOptions{History: 1}, func(ctx context.Context, _ *eventhub.BroadcastEvent) {
		again <- struct{}{}
		<-ctx.Done()
	})
	receive(t, "the handler", again)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	failsWith(t, c.Drain(ctx), eventhub.CodeAborted, false)
}

func TestAHandlerOfABroadcastThatFailsIsReported(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	var errs list[string]
	opts := fast(hub.Token)
	opts.OnError = func(err error) { errs.add(err.Error()) }
	c := connect(t, hub.WebSocket, opts)
	topic := newTopic()
	var got news
	follow(t, c, topic, eventhub.BroadcastOptions{}, func(ctx context.Context, e *eventhub.BroadcastEvent) {
		got.event(ctx, e)
		switch string(e.Payload) {
		case "1":
			panic("oh")
		case "2":
			runtime.Goexit()
		}
	})
	publish(t, c, topic, 1, 2, 3)
	got.wants(t, "1", "2", "3")
	if all := errs.get(); !slices.Equal(all, []string{"panic: oh"}) {
		t.Errorf("told %q", all)
	}
}

func TestABroadcastWaitsForItsConnection(t *testing.T) {
	t.Parallel()
	hub := hubtest.New(t)
	p := startProxy(t, hub.WebSocket)
	p.refuse(true)
	c, err := eventhub.New(p.url, fast(hub.Token))
	if err != nil {
		t.Fatal(err)
	}
	defer shut(c)
	var got news
	begun := make(chan error, 1)
	go func() {
		_, err := c.Broadcast(t.Context(), "t", eventhub.BroadcastOptions{}, got.event)
		begun <- err
	}()
	p.refuse(false)
	if err := receive(t, "the broadcast", begun); err != nil {
		t.Fatal(err)
	}
	publish(t, c, "t", 1)
	got.wants(t, "1")
}
