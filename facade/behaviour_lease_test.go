package facade_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"eventhub/facade/client"
	"eventhub/jetstream"
)

// expiryNoticed is how soon after its end a lease that ran out must be given again (protocol.md, section 3).
const expiryNoticed = 250 * time.Millisecond

func ackWait(d time.Duration) func(*jetstream.Config) {
	return func(cfg *jetstream.Config) { cfg.AckWait = d }
}

func TestExpiredLeaseComesAgainAtOnce(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	never := 0
	in := hub.subscribe(c, topic, "g", client.SubscribeOptions{AckTimeoutMS: 1000, MaxAttempts: &never})
	hub.publish(c, topic, "1")
	e := in.next()
	// A busy machine may delay what this test sees, but not for five times in a row.
	best := time.Hour
	for range 5 {
		again := in.next()
		late := time.Since(e.Deadline)
		if again.ID != e.ID || again.Attempt != e.Attempt+1 {
			t.Fatalf("after attempt %d of %s came attempt %d of %s", e.Attempt, e.ID, again.Attempt, again.ID)
		}
		if late < -100*time.Millisecond { // the hub starts to count when it hands the frame over
			t.Fatalf("a lease was ended %v early", -late)
		}
		best = min(best, late)
		e = again
		if best <= expiryNoticed {
			break
		}
	}
	if best > expiryNoticed {
		t.Errorf("leases come again %v after their end, at best", best)
	}
	in.ack(e)
	hub.publish(c, topic, `"marker"`)
	if e := in.next(); string(e.Payload) != `"marker"` {
		t.Errorf("instead of the marker came %s", e.Payload)
	}
}

// MODACK holds a lease for as long as it is sent, well beyond what the server itself would wait.
func TestModAckHoldsALease(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t, ackWait(time.Second)))
	a, b := hub.dial(), hub.dial()
	topic := freshTopic()
	in := hub.subscribe(a, topic, "g", client.SubscribeOptions{AckTimeoutMS: 1000})
	hub.publish(a, topic, "1")
	hub.publish(a, topic, "2")
	held := in.take(2)
	other := hub.subscribe(b, topic, "g", client.SubscribeOptions{})

	// One lease is prolonged again and again, the other once.
	if err := held[1].ModAckWait(t.Context(), 20*time.Second); err != nil {
		t.Fatal(err)
	}
	beat := time.NewTicker(400 * time.Millisecond)
	defer beat.Stop()
	for start := time.Now(); time.Since(start) < 10*time.Second; {
		<-beat.C
		if err := held[0].ModAckWait(t.Context(), time.Second); err != nil {
			t.Fatal(err)
		}
		in.empty()
		other.empty()
	}
	in.ack(held...)
	marker := hub.publish(a, topic, `"marker"`)
	var e client.Event
	select {
	case e = <-in.events:
	case e = <-other.events:
	case <-time.After(waitLimit):
		t.Fatal("no marker")
	}
	if e.ID != marker || e.Attempt != 1 {
		t.Errorf("instead of the marker came %s, attempt %d", e.Payload, e.Attempt)
	}
}

// A lease may be used to its last moment: the server, which has a clock of its own, gives nothing away before.
func TestLeaseIsGoodToItsEnd(t *testing.T) {
	for _, test := range []struct {
		name     string
		ackWait  time.Duration // 0: the default
		leaseMS  int64         // 0: the default
		used     time.Duration
		attempts int
	}{
		{"both by default", 0, 0, 29 * time.Second, 1},
		{"as long as AckWait", 2 * time.Second, 2000, 1700 * time.Millisecond, 1},
		{"three times AckWait", 2 * time.Second, 6000, 5700 * time.Millisecond, 1},
		{"six times AckWait", time.Second, 6000, 5700 * time.Millisecond, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			hub := startHub(t, openBus(t, ackWait(test.ackWait)))
			a, b := hub.dial(), hub.dial()
			topic := freshTopic()
			in := hub.subscribe(a, topic, "g", client.SubscribeOptions{AckTimeoutMS: test.leaseMS})
			for i := range 20 {
				hub.publish(a, topic, fmt.Sprint(i))
			}
			held := in.take(20)
			other := hub.subscribe(b, topic, "g", client.SubscribeOptions{})
			select {
			case e := <-in.events:
				t.Errorf("event %s came again, attempt %d", e.Payload, e.Attempt)
			case e := <-other.events:
				t.Errorf("event %s was given to another member, attempt %d", e.Payload, e.Attempt)
			case <-time.After(test.used):
			}
			in.ack(held...)
			if err := in.sub.Unsubscribe(t.Context()); err != nil {
				t.Fatal(err)
			}
			hub.publish(a, topic, `"marker"`)
			if e := other.next(); string(e.Payload) != `"marker"` {
				t.Errorf("instead of the marker came %s, attempt %d: its ACK was in time", e.Payload, e.Attempt)
			}
		})
	}
}

// What comes late for a lease that has ended does nothing to the lease that another member holds.
func TestLateFramesDoNotTouchAnothersLease(t *testing.T) {
	t.Parallel()
	first, second := twoHubs(t)
	for _, test := range []struct {
		name  string
		other *testHub
	}{{"on the same hub", first}, {"on another hub", second}} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			topic := freshTopic()
			a, b := first.dial(), test.other.dial()
			in := first.subscribe(a, topic, "g", client.SubscribeOptions{AckTimeoutMS: 1000})
			first.publish(a, topic, "1")
			old := in.next()
			if err := in.sub.Pause(t.Context()); err != nil { // it shall get nothing more
				t.Fatal(err)
			}
			other := test.other.subscribe(b, topic, "g", client.SubscribeOptions{AckTimeoutMS: 3000})
			e := other.next()
			if e.ID != old.ID || e.Attempt != 2 {
				t.Fatalf("the other member got %s, attempt %d", e.Payload, e.Attempt)
			}
			in.ack(old)
			if err := old.NackWait(t.Context(), "late", 0); err != nil {
				t.Error(err)
			}
			if err := old.ModAckWait(t.Context(), 60*time.Second); err == nil {
				t.Error("MODACK of a lease that has ended was answered OK")
			}
			// Had the ACK settled it, it would not come again; had the NACK ended the lease, it would come before its end;
			// had the MODACK prolonged it, it would come long after.
			again := other.next()
			early, late := e.Deadline.Add(-500*time.Millisecond), e.Deadline.Add(5*time.Second)
			if now := time.Now(); again.ID != e.ID || again.Attempt != 3 || now.Before(early) || now.After(late) {
				t.Errorf("then came %s, attempt %d, %v after the end of the lease", again.Payload, again.Attempt, time.Since(e.Deadline))
			}
			other.ack(again)
			first.publish(a, topic, `"marker"`)
			if e := other.next(); string(e.Payload) != `"marker"` {
				t.Errorf("instead of the marker came %s", e.Payload)
			}
		})
	}
}

// A hub that is cut off from NATS for longer than AckWait loses its leases: nothing of what its clients say about them
// reaches the events, which are another hub's by then.
func TestHubCutOffSettlesNothing(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name  string
		sever func(*tcpProxy)
	}{
		{"connections end", (*tcpProxy).cut},
		{"packets are lost", (*tcpProxy).freeze},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			const wait = 2 * time.Second
			url := startNATS(t)
			proxy := newTCPProxy(t, url)
			cutOff := startHub(t, openBus(t, ackWait(wait), func(cfg *jetstream.Config) { cfg.URL = proxy.url() }))
			fine := startHub(t, openBus(t, ackWait(wait), func(cfg *jetstream.Config) { cfg.URL = url }))
			a, b := cutOff.dial(), fine.dial()
			topic := freshTopic()
			never := 0
			opts := client.SubscribeOptions{MaxAttempts: &never, AckTimeoutMS: 8000}
			in := cutOff.subscribe(a, topic, "g", opts)
			for i := range 10 {
				fine.publish(b, topic, fmt.Sprint(i))
			}
			old := in.take(10)
			if err := in.sub.Pause(t.Context()); err != nil { // what comes again shall go to the other hub
				t.Fatal(err)
			}
			other := fine.subscribe(b, topic, "g", opts)
			test.sever(proxy)
			cutAt := time.Now()
			// The client goes on meanwhile, and is answered.
			in.ack(old[:3]...)
			for i := 3; i < 6; i++ {
				if err := old[i].NackWait(t.Context(), "cut off", 0); err != nil {
					t.Fatal(err)
				}
			}
			for i := 6; i < 9; i++ {
				_ = old[i].ModAck(time.Minute)
			}
			held := other.take(10)
			for _, e := range held {
				if e.Attempt != 2 {
					t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
				}
			}
			waitUntil(t, "twice AckWait", func() bool { return time.Since(cutAt) > 2*wait })
			proxy.cut() // what a broken network held back is lost with its connections
			proxy.heal()
			waitUntil(t, "the hub is back", func() bool {
				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				return cutOff.bus.Ready(ctx) == nil
			})
			in.ack(old...)
			for i := range old {
				_ = old[i].Nack("late", 0)
			}

			// The other hub's leases are whole: half of them are settled, the other half come again after their end.
			other.ack(held[:5]...)
			left := map[string]bool{}
			for _, e := range held[5:] {
				left[e.ID] = true
			}
			for range 5 {
				e := other.next()
				if !left[e.ID] || e.Attempt != 3 || time.Now().Before(held[5].Deadline.Add(-500*time.Millisecond)) {
					t.Errorf("event %s came, attempt %d, %v before the end of its lease", e.Payload, e.Attempt, time.Until(held[5].Deadline))
				}
				delete(left, e.ID)
				other.ack(e)
			}
			fine.publish(b, topic, `"marker"`)
			if e := other.next(); string(e.Payload) != `"marker"` {
				t.Errorf("instead of the marker came %s", e.Payload)
			}
		})
	}
}
