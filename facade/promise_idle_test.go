package facade_test

import (
	"flag"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// giveBackRounds is larger for the long form.
var giveBackRounds = flag.Int("giveback.rounds", 1, "how often a member pauses, and leaves, in the middle of a flood")

// idleWait is how long an idle member with credit may wait for an event that is neither leased nor
// in back-off: 1 s, and as much again for a busy machine. On a busier one, the wait is ten times
// the time that another group takes for n events of the topic.
func idleWait(t *testing.T, h *testHub, topic string, n int) time.Duration {
	t.Helper()
	began := time.Now()
	in := h.subscribe(h.dial(), topic, "control", wire.SubscribeOptions{From: "earliest", MaxInFlight: n})
	for range n {
		in.ack(in.next())
	}
	return max(2*time.Second, 10*time.Since(began))
}

// arrivals are the events that come within a time, up to n. Each must say attempt 1.
func arrivals(t *testing.T, in *inbox, n int, within time.Duration) int {
	t.Helper()
	got := 0
	for limit := time.After(within); got < n; got++ {
		select {
		case e := <-in.events:
			if e.Attempt != 1 {
				t.Errorf("an event that was never handed out came as attempt %d", e.Attempt)
			}
			in.ack(e)
		case <-limit:
			return got
		}
	}
	return got
}

// onBothHubs runs a test of two members: on connections of one hub, and on two hubs.
func onBothHubs(t *testing.T, run func(t *testing.T, view *natstest.View, a, b *testHub)) {
	t.Helper()
	for _, name := range []string{"on the same hub", "on another hub"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nats := natstest.Start(t)
			a := startHub(t, openBus(t, at(nats.URL())), unthrottled, patientWriter)
			b := a
			if name == "on another hub" {
				b = startHub(t, openBus(t, at(nats.URL())), unthrottled)
			}
			run(t, natstest.Look(t, nats.URL()), a, b)
		})
	}
}

// A member that works on one event for long keeps no others from an idle one, on none of its
// topics.
func TestPromiseABusyMemberHoldsNoOtherTopicsBack(t *testing.T) {
	t.Parallel()
	onBothHubs(t, func(t *testing.T, view *natstest.View, a, b *testHub) {
		t.Helper()
		first := freshTopic()
		topics := []string{first}
		for i := range 4 {
			topics = append(topics, fmt.Sprint(first, "x", i))
		}
		busy := a.subscribe(a.dial(), first, "g", wire.SubscribeOptions{MaxInFlight: 1, Topics: topics[1:]})
		c := b.dial()
		for _, topic := range topics {
			b.publish(c, topic, "1")
		}
		busy.next() // and works on it to the end of the test
		for _, topic := range topics {
			view.Still(topic)
		}
		limit := idleWait(t, b, first, 1)
		idle := b.subscribe(c, first, "g", wire.SubscribeOptions{MaxInFlight: 10, Topics: topics[1:]})
		if got := arrivals(t, idle, len(topics)-1, limit); got < len(topics)-1 {
			t.Errorf("%d of %d events that nobody works on came within %v", got, len(topics)-1, limit)
		}
	})
}

// A member that does not read keeps from an idle one only what is on its way to it.
func TestPromiseAMemberThatDoesNotReadHoldsLittleBack(t *testing.T) {
	t.Parallel()
	const (
		sent = 100
		size = 24 << 10
		// what a client that does not read may have leased: more than the kernel takes, and the hub
		// writes at once
		most = 40
	)
	onBothHubs(t, func(t *testing.T, view *natstest.View, a, b *testHub) {
		t.Helper()
		topic := freshTopic()
		dialSluggard(a, topic, sent)
		publishBig(t, b, topic, sent, size)
		view.Still(topic)
		limit := idleWait(t, b, topic, sent-most)
		idle := b.subscribe(b.dial(), topic, "g", wire.SubscribeOptions{MaxInFlight: sent})
		if got := arrivals(t, idle, sent-most, limit); got < sent-most {
			t.Errorf("%d of %d events came within %v", got, sent-most, limit)
		}
	})
}

// tally counts which of the events 0 to n-1 have come, to whichever member.
type tally struct {
	mu   sync.Mutex
	seen []bool
	left int
	came chan struct{} // has room for one: something new came
}

func newTally(n int) *tally {
	return &tally{seen: make([]bool, n), left: n, came: make(chan struct{}, 1)}
}

// settle acknowledges an event and counts it.
func (c *tally) settle(e wire.Event) {
	_ = e.Ack()
	n, err := strconv.Atoi(string(e.Payload))
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.seen[n] {
		c.seen[n] = true
		c.left--
	}
	select {
	case c.came <- struct{}{}:
	default:
	}
}

func (c *tally) missing() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.left
}

// What is on its way to a member that pauses or leaves is given back at once, also where another
// server of a cluster leads the group: the other members need not wait for AckWait.
func TestPromiseWhatIsOnItsWayIsGivenBackAtOnce(t *testing.T) {
	t.Parallel()
	const (
		events  = 300 // each is noted in a bucket with three copies when it is given back
		ackWait = 30 * time.Second
	)
	nodes := natstest.StartCluster(t, 3)
	view := natstest.Look(t, natstest.URLs(nodes)...)
	view.Replicating(3)
	three := func(cfg *jetstream.Config) { cfg.Replicas, cfg.AckWait = 3, ackWait }
	a := startHub(t, openBus(t, at(nodes[0].URL()), three), unthrottled)
	b := startHub(t, openBus(t, at(nodes[1].URL()), three), unthrottled)
	for _, off := range []string{"PAUSE", "UNSUBSCRIBE"} {
		for round := range *giveBackRounds {
			topic := freshTopic()
			opts := wire.SubscribeOptions{From: "earliest", MaxInFlight: 5000, BatchSize: 5000}
			maker := b.subscribe(b.dial(), topic, "g", wire.SubscribeOptions{From: "earliest", MaxInFlight: 1})
			if err := maker.sub.Unsubscribe(t.Context()); err != nil {
				t.Fatal(err)
			}
			view.Lead(topic, nodes[2].Name())
			publishMany(t, b, topic, events)

			count := newTally(events)
			late := time.After(ackWait) // since before the first delivery
			first, err := a.dial().Subscribe(t.Context(), topic, "g", opts, count.settle)
			if err != nil {
				t.Fatal(err)
			}
			select { // in the middle of the flood
			case <-count.came:
			case <-time.After(waitLimit):
				t.Fatal("nothing comes")
			}
			if off == "PAUSE" {
				err = first.Pause(t.Context())
			} else {
				err = first.Unsubscribe(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			already := events - count.missing()
			if _, err := b.dial().Subscribe(t.Context(), topic, "g", opts, count.settle); err != nil {
				t.Fatal(err)
			}
			for over := false; !over && count.missing() > 0; {
				select {
				case <-count.came:
				case <-late:
					over = true
				}
			}
			if n := count.missing(); n > 0 {
				t.Errorf("%s, round %d: of %d events %d had come before; %d did not come to the other member within AckWait", off, round+1, events, already, n)
			}
		}
	}
}
