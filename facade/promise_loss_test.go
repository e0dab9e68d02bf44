package facade_test

import (
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// Numbers of TestPromiseNothingUnsettledIsLost. Whoever joins again first decides today, so there
// are many to be first.
const (
	lossTopics = 5
	lossOthers = 2  // members that have settled all that they got
	lossHeld   = 36 // events that one member holds
)

// crew is a group of one member that holds events and some that have settled theirs.
type crew struct {
	topic   string
	members []*inbox
	held    map[string]bool // ids of what the first one holds
}

// newCrew makes the first member on a, and the others on b.
func newCrew(t *testing.T, a, b *testHub, ttlMS int64) *crew {
	t.Helper()
	c := &crew{topic: freshTopic(), held: map[string]bool{}}
	opts := endless(lossHeld)
	opts.GroupTTLMS = ttlMS
	holder := a.subscribe(a.dial(), c.topic, "g", opts)
	c.members = append(c.members, holder)
	publishMany(t, a, c.topic, lossHeld)
	for len(c.held) < lossHeld {
		c.held[holder.next().ID] = true
	}
	for range lossOthers {
		in := b.subscribe(b.dial(), c.topic, "g", opts)
		c.members = append(c.members, in)
	}
	publishMany(t, b, c.topic, lossOthers*lossHeld)
	// A hub that stands still for longer than AckWait gives up what it has, and it comes again, to
	// any member: so what is held is not always what was.
	waitUntil(t, "the others have settled theirs", func() bool {
		for _, in := range c.members[1:] {
			for len(in.events) > 0 {
				if e := <-in.events; e.AckWait(t.Context()) == nil {
					delete(c.held, e.ID)
				}
			}
		}
		for len(holder.events) > 0 {
			c.held[(<-holder.events).ID] = true
		}
		state, err := b.bus.Group(c.topic, "g").Backlog(t.Context())
		return err == nil && state.Waiting == 0 && state.Leased == uint64(len(c.held))
	})
	if len(c.held) == 0 {
		t.Fatal("the hubs stood still for so long that nothing is held any more")
	}
	return c
}

// lost waits until all that was held has come again, to any member, and returns how many events did
// not.
func (c *crew) lost(deadline time.Time) int {
	left := len(c.held)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, in := range c.members {
			for len(in.events) > 0 {
				e := <-in.events
				if c.held[e.ID] {
					c.held[e.ID] = false
					left--
				}
				_ = e.Ack()
			}
		}
		if left == 0 || time.Now().After(deadline) {
			return left
		}
		<-tick.C
	}
}

// What is not settled is delivered again, to any member, also when the group's consumer is gone:
// members hold it, others have settled theirs, all stay connected, and whoever joins again first
// decides nothing.
func TestPromiseNothingUnsettledIsLost(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		ttlMS  int64
		happen func(nats *natstest.Server, view *natstest.View, crews []*crew)
	}{
		{"NATS restarts in order", 3_600_000, restartNATS},
		{"NATS is killed", 3_600_000, func(nats *natstest.Server, _ *natstest.View, _ []*crew) {
			nats.Kill()
			nats.Start()
		}},
		{"NATS restarts in order, short TTL", 5_000, restartNATS},
		{"consumer deleted", 0, func(_ *natstest.Server, view *natstest.View, crews []*crew) {
			for _, c := range crews {
				view.DeleteConsumers(c.topic)
			}
		}},
		{"consumer deleted, TTL", 3_600_000, func(_ *natstest.Server, view *natstest.View, crews []*crew) {
			for _, c := range crews {
				view.DeleteConsumers(c.topic)
			}
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			nats := natstest.Start(t)
			wait := ackWait(2 * time.Second)
			a := startHub(t, openBus(t, at(nats.URL()), wait), unthrottled)
			b := startHub(t, openBus(t, at(nats.URL()), wait), unthrottled)
			crews := make([]*crew, lossTopics)
			for i := range crews {
				if crews[i] = newCrew(t, a, b, test.ttlMS); i%2 == 1 {
					a, b = b, a
				}
			}
			test.happen(nats, natstest.Look(t, nats.URL()), crews)
			deadline := time.Now().Add(waitLimit)
			for _, c := range crews {
				if n := c.lost(deadline); n > 0 {
					t.Errorf("%d of %d unsettled events never came again", n, lossHeld)
				}
			}
		})
	}
}

func restartNATS(nats *natstest.Server, _ *natstest.View, _ []*crew) {
	nats.Stop()
	nats.Start()
}
