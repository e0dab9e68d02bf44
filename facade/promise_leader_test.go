//go:build unix

package facade_test

import (
	"strconv"
	"testing"
	"time"

	"eventhub/facade/client"
	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// AckWaits that leave a busy machine time: before a hub takes itself for one that stood still, and for servers to elect a leader.
const (
	fencedWait = 6 * time.Second
	leaderWait = 9 * time.Second
)

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

// An event is one member's at a time, also when the consumer gets another leader: what was stored long ago and leased just now
// stays leased, and when its member acknowledges it, it is settled.
func TestPromiseLeasesOutliveALeaderChange(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(t *testing.T, c *cluster, topic string)
	}{
		{"step down", func(_ *testing.T, c *cluster, topic string) {
			c.view.StepDown(topic)
			c.view.StepDown(topic)
		}},
		{"restart", func(t *testing.T, c *cluster, topic string) { // no hub is connected to this server
			t.Helper()
			c.nodes[2].Stop()
			c.view.Consumer(topic) // has a leader again
			c.nodes[2].Start()
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const n = 6
			c := startCluster(t, leaderWait)
			topic := c.makeGroup(t, c.nodes[2].Name())
			for i := range n {
				c.b.publish(c.b.dial(), topic, strconv.Itoa(i))
			}
			stored := time.Now()
			<-time.After(time.Until(stored.Add(leaderWait + 500*time.Millisecond))) // the age under test

			in := c.a.subscribe(c.a.dial(), topic, "g", endless(n))
			held := in.take(n)
			other := c.b.subscribe(c.b.dial(), topic, "g", endless(100))
			test.change(t, c, topic)
			select { // longer than AckWait, and much shorter than the lease
			case e := <-other.events:
				t.Errorf("event %s came to another member as attempt %d while it was leased, and %d more", e.Payload, e.Attempt, len(other.events))
			case e := <-in.events:
				t.Errorf("event %s came to its own member as attempt %d while it was leased", e.Payload, e.Attempt)
			case <-time.After(leaderWait + 2*time.Second):
			}
			in.ack(held...)
			waitUntil(t, "all is settled", func() bool {
				state, err := c.a.bus.Backlog(t.Context(), topic, "g")
				return err == nil && state.Leased+state.Waiting == 0
			})
			other.empty()
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

// What a client says about a lease while NATS does not hear its hub changes nothing later on for those who hold the events
// then: an ACK does not settle, a NACK at the last attempt makes no dead letter.
func TestPromiseNothingSaidWhileFrozenCountsLater(t *testing.T) {
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
	in := p.a.subscribe(ca, p.topic, "g", client.SubscribeOptions{MaxAttempts: &once, From: "earliest"})
	dead := p.b.subscribe(cb, "dlq."+p.topic, "d", client.SubscribeOptions{From: "earliest"})
	publishMany(t, p.b, p.topic, n)
	old := in.take(n)
	leased := time.Now()
	if err := in.sub.Pause(t.Context()); err != nil { // what comes again shall go to the other hub
		t.Fatal(err)
	}
	other := p.b.subscribe(cb, p.topic, "g", endless(n+1))
	<-time.After(time.Until(leased.Add(1400 * time.Millisecond))) // before the hub asks NATS to wait longer, today

	p.freeze()
	frozen := time.Now()
	<-time.After(1500 * time.Millisecond) // well inside the freeze, and inside what the lease has left
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
		<-time.After(time.Until(frozen.Add(4600 * time.Millisecond)))
	} else {
		// In a cluster, a part may be under way to what the hub paused.
		waitUntil(t, "the other hub is given a part", func() bool { return len(other.events) >= n/4 })
	}
	p.thaw()
	// What was held back has come through when a publish behind it was answered, or the connection was given up.
	waitUntil(t, "the hub is heard again", func() bool { return ready(t, p.a.bus) })
	p.a.publish(p.a.dial(), p.topic, `"behind"`)
	waitUntil(t, "what is not settled is with the other hub", func() bool {
		state, err := p.b.bus.Backlog(t.Context(), p.topic, "g")
		return err == nil && state.Waiting+state.Leased <= uint64(len(other.events))
	})
	held := map[string]bool{}
	for len(other.events) > 0 {
		e := <-other.events
		held[e.ID] = true
	}
	if err := other.sub.Unsubscribe(t.Context()); err != nil {
		t.Fatal(err)
	}
	// It has settled nothing, so all comes again.
	again := p.b.subscribe(p.b.dial(), p.topic, "g", endless(2*n))
	total := len(held)
	for limit := time.After(2 * fencedWait); len(held) > 0; {
		select {
		case e := <-again.events:
			delete(held, e.ID)
			again.ack(e)
			continue
		case <-limit:
			t.Errorf("%d of %d events that another member held were settled by what was said while NATS stood still", len(held), total)
		}
		break
	}
	marker := p.b.publish(p.b.dial(), "dlq."+p.topic, `"marker"`)
	letters := 0
	for e := dead.next(); e.ID != marker; e = dead.next() {
		letters++
	}
	if letters > 0 {
		t.Errorf("%d events that another member held are dead letters", letters)
	}
}
