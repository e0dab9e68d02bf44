//go:build unix

package facade_test

import (
	"encoding/json"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// fencedWait is an AckWait that leaves a busy machine time before a hub takes itself for one that
// stood still.
const fencedWait = 6 * time.Second

// cluster is three servers and, on two of them, a hub each.
type cluster struct {
	nodes []*natstest.Server
	view  *natstest.View
	a, b  *testHub
}

// startCluster connects hub a to the first server and hub b to the second.
func startCluster(t *testing.T, wait time.Duration) *cluster {
	t.Helper()
	c := &cluster{nodes: natstest.StartCluster(t, 3)}
	c.view = natstest.Look(t, natstest.URLs(c.nodes[1:])...)
	c.view.Replicating(3)
	three := func(cfg *jetstream.Config) { cfg.Replicas, cfg.Connections = 3, 1 }
	c.a = startHub(t, openBus(t, at(c.nodes[0].URL()), ackWait(wait), three), unthrottled)
	c.b = startHub(t, openBus(t, at(c.nodes[1].URL()), ackWait(wait), three), unthrottled)
	return c
}

// makeGroup makes group g on a new topic, without a member, led by the server of that name.
func (c *cluster) makeGroup(t *testing.T, leader string) (topic string) {
	t.Helper()
	topic = freshTopic()
	conn := c.b.dial()
	in := c.b.subscribe(conn, topic, "g", endless(1))
	if err := in.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.view.Lead(topic, leader)
	return topic
}

// leased is a group whose member on hub a holds old events, while one on hub b waits for some.
type leased struct {
	topic     string
	in, other *inbox
	held      []wire.Event
}

// An event is one member's at a time, also when the consumer gets another leader: what was stored
// long ago and leased just now stays leased, and when its member acknowledges it, it is settled.
func TestPromiseLeasesOutliveALeaderChange(t *testing.T) {
	const n = 6
	for _, test := range []struct {
		name   string
		wait   time.Duration // AckWait: a hub must not lose its leases while servers elect a leader
		watch  time.Duration // how long nothing may come
		groups int
		change func(c *cluster, groups []*leased)
	}{
		{"step down", 9 * time.Second, 11 * time.Second, 1, func(c *cluster, groups []*leased) {
			for range 2 {
				c.view.StepDown(groups[0].topic)
			}
		}},
		// no hub is connected to this server
		{"restart", 15 * time.Second, 3 * time.Second, 4, func(c *cluster, groups []*leased) {
			c.nodes[2].Stop()
			for _, g := range groups {
				c.view.Consumer(g.topic) // has a leader again
			}
			c.nodes[2].Start()
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := startCluster(t, test.wait)
			groups := make([]*leased, test.groups)
			for i := range groups {
				groups[i] = &leased{topic: c.makeGroup(t, c.nodes[2].Name())}
				publishMany(t, c.b, groups[i].topic, n)
			}
			stored := time.Now()
			// the age under test
			<-time.After(time.Until(stored.Add(test.wait + 500*time.Millisecond)))

			for _, g := range groups {
				g.in = c.a.subscribe(c.a.dial(), g.topic, "g", endless(n))
				g.held = g.in.take(n)
				g.other = c.b.subscribe(c.b.dial(), g.topic, "g", endless(100))
			}
			test.change(c, groups)
			<-time.After(test.watch) // the leases go on for longer
			for _, g := range groups {
				mine, others := len(g.in.events), len(g.other.events)
				if mine+others > 0 {
					t.Errorf("while %d events were leased, %d came to another member, and %d to their own", n, others, mine)
				}
				g.in.ack(g.held...)
				waitUntil(t, "all is settled", func() bool {
					state, err := c.a.bus.Group(g.topic, "g").Backlog(t.Context())
					return err == nil && state.Leased+state.Waiting == 0
				})
				if now := len(g.in.events) + len(g.other.events); now > mine+others {
					t.Errorf("%d events came when they were settled", now-mine-others)
				}
			}
		})
	}
}

// frozenPath is what is between hub a and NATS, made to stand still.
type frozenPath struct {
	a, b         *testHub
	topic        string
	freeze, thaw func()
	cuts         bool // b is cut off, too
}

// What a client says about a lease while NATS does not hear its hub changes nothing later on for
// those who hold the events then: an ACK does not settle, a NACK at the last attempt makes no dead
// letter.
func TestPromiseNothingSaidWhileFrozenCountsLater(t *testing.T) {
	t.Parallel()
	one := func(cfg *jetstream.Config) { cfg.Connections = 1 }
	proxied := func(freeze func(*tcpProxy)) func(t *testing.T) frozenPath {
		return func(t *testing.T) frozenPath {
			t.Helper()
			nats := natstest.Start(t)
			proxy := newTCPProxy(t, nats.URL())
			return frozenPath{
				a: startHub(t, openBus(t, at(proxy.url()), ackWait(fencedWait), one)),
				b: startHub(t, openBus(t, at(nats.URL()), ackWait(fencedWait), one)), topic: freshTopic(),
				freeze: func() { freeze(proxy) }, thaw: proxy.heal,
			}
		}
	}
	for _, test := range []struct {
		name string
		path func(t *testing.T) frozenPath
	}{
		{"a proxy holds what the hub sends", proxied((*tcpProxy).hold)},
		{"a proxy holds both ways", proxied((*tcpProxy).freeze)},
		{"the hub's server", func(t *testing.T) frozenPath {
			t.Helper()
			c := startCluster(t, fencedWait)
			return frozenPath{a: c.a, b: c.b, topic: c.makeGroup(t, c.nodes[1].Name()), freeze: c.nodes[0].Freeze, thaw: c.nodes[0].Thaw}
		}},
		{"the only server", func(t *testing.T) frozenPath {
			t.Helper()
			nats := natstest.Start(t)
			return frozenPath{
				a: startHub(t, openBus(t, at(nats.URL()), ackWait(fencedWait), one)),
				b: startHub(t, openBus(t, at(nats.URL()), ackWait(fencedWait), one)), topic: freshTopic(),
				freeze: nats.Freeze, thaw: nats.Thaw, cuts: true,
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			saidWhileFrozen(t, test.path(t))
		})
	}
}

func saidWhileFrozen(t *testing.T, p frozenPath) {
	t.Helper()
	const n = 40
	ca, cb := p.a.dial(), p.b.dial()
	once := 1
	in := p.a.subscribe(ca, p.topic, "g", wire.SubscribeOptions{MaxAttempts: &once, From: "earliest"})
	dead := p.b.subscribe(cb, "dlq."+p.topic, "d", wire.SubscribeOptions{From: "earliest"})
	publishMany(t, p.b, p.topic, n)
	old := in.take(n)
	leased := time.Now()
	if err := in.sub.Pause(t.Context()); err != nil { // what comes again shall go to the other hub
		t.Fatal(err)
	}
	// now, for servers that elect leaders refuse new members
	again := p.b.subscribe(p.b.dial(), p.topic, "g", endless(2*n))
	if err := again.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	other := p.b.subscribe(cb, p.topic, "g", endless(n+1))
	// before the hub asks NATS to wait longer, today
	<-time.After(time.Until(leased.Add(1400 * time.Millisecond)))

	p.freeze()
	frozen := time.Now()
	// well inside the freeze, and inside what the lease has left
	<-time.After(1500 * time.Millisecond)
	for i := range old {
		var err error
		if i%2 == 0 {
			err = old[i].AckWait(t.Context())
		} else {
			err = old[i].NackWait(t.Context(), "late", 0)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if p.cuts {
		// AckWait is over, and no hub has heard of it
		<-time.After(time.Until(frozen.Add(5 * time.Second)))
	} else {
		// In a cluster, a part may be under way to what the hub paused.
		waitUntil(t, "the other hub is given a part", func() bool { return len(other.events) >= n/4 })
	}
	p.thaw()
	// What was held back has come through when a publish behind it was answered, or the connection
	// was given up.
	waitUntil(t, "the hub is heard again", func() bool { return ready(t, p.a.bus) })
	publishAtLast(t, p.a, p.topic)
	if p.cuts { // some may have been settled in time
		waitUntil(t, "what is not settled is with the other hub", func() bool {
			state, err := p.b.bus.Group(p.topic, "g").Backlog(t.Context())
			return err == nil && state.Waiting+state.Leased <= uint64(len(other.events))
		})
	}
	held, given := map[string]bool{}, map[string]bool{}
	for len(other.events) > 0 {
		e := <-other.events
		held[e.ID], given[e.ID] = true, true
	}
	if err := other.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	// It has settled nothing, so all comes again.
	if err := again.sub.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	// some may wait out AckWait once more, at an inbox that is gone
	for limit := time.After(5 * fencedWait); len(held) > 0; {
		select {
		case e := <-again.events:
			delete(held, e.ID)
			again.ack(e)
			continue
		case <-limit:
			state, err := p.b.bus.Group(p.topic, "g").Backlog(t.Context())
			t.Errorf("%d of %d events that another member held were settled by what was said while NATS stood still; %+v, %v", len(held), len(given), state, err)
		}
		break
	}
	marker := publishAtLast(t, p.b, "dlq."+p.topic)
	letters := 0
	for e := dead.next(); e.ID != marker; e = dead.next() {
		var letter deadLetter
		if err := json.Unmarshal(e.Payload, &letter); err != nil {
			t.Fatal(err)
		}
		if given[letter.Original.ID] {
			letters++
		}
	}
	if letters > 0 {
		t.Errorf("%d events that another member held are dead letters", letters)
	}
}

// publishAtLast publishes an event, again until that is answered OK: servers of a cluster elect
// leaders after a freeze.
func publishAtLast(t *testing.T, h *testHub, topic string) (id string) {
	t.Helper()
	c := h.dial()
	id = freshTopic() // the same each time, so that it is one event
	waitUntil(t, "an event is published", func() bool {
		_, err := c.Publish(t.Context(), topic, []byte(`"marker"`), wire.PublishOptions{ID: id})
		return err == nil
	})
	return id
}
