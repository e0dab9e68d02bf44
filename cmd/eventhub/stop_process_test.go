//go:build unix

package main

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"eventhub/sdk/go/wire"
)

// A hub that stands still for twice AckWait has lost its leases, although it does not know it yet:
// what its clients have sent meanwhile, and what it would send itself, settles and prolongs nothing
// that another hub has leased since.
func TestStoppedHubSettlesNothing(t *testing.T) {
	t.Parallel()
	const ackWait = 2 * time.Second
	nats := "--nats-url=" + runNATS(t)
	wait := fmt.Sprint("--ack-wait=", ackWait)
	stopped, other := startNode(t, nats, wait), startNode(t, nats, wait)
	a, b := stopped.dial(), other.dial()
	never := 0
	opts := wire.SubscribeOptions{MaxInFlight: 10, MaxAttempts: &never}
	first := subscribeTo(t, a, "stop", "g", opts)
	publishNumbers(t, b, "stop", 10)
	old := first.take(10)
	second := subscribeTo(t, b, "stop", "g", opts)

	stopped.stop()
	stoppedAt := time.Now()
	for i := range old { // these lie in the stopped hub's socket
		var err error
		switch i % 3 {
		case 0:
			err = old[i].Ack()
		case 1:
			err = old[i].Nack("late", 0)
		case 2:
			err = old[i].ModAck(time.Minute)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	held := second.take(10)
	for _, e := range held {
		if e.Attempt != 2 {
			t.Errorf("event %s has attempt %d", e.Payload, e.Attempt)
		}
	}
	<-time.After(time.Until(stoppedAt.Add(2 * ackWait))) // the interval under test
	stopped.signal(syscall.SIGCONT)
	ackAll(t, old) // answered, so it goes on, and has read all that was sent before

	// The other hub settles half of its leases and dies. The other half comes to the first hub
	// after AckWait, no event of the first half does.
	ackAll(t, held[:5])
	if len(first.events)+len(second.events) > 0 {
		t.Errorf("%d events came that are leased", len(first.events)+len(second.events))
	}
	publishTo(t, b, "flush", "0") // the acks went before it over the same connection
	other.kill()
	killedAt := time.Now()
	left := map[string]bool{}
	for _, e := range held[5:] {
		left[e.ID] = true
	}
	for _, e := range first.take(5) {
		if !left[e.ID] || e.Attempt != 3 {
			t.Errorf("event %s came, attempt %d", e.Payload, e.Attempt)
		}
		delete(left, e.ID)
		if err := e.Ack(); err != nil {
			t.Error(err)
		}
	}
	if took := time.Since(killedAt); took > 3*ackWait {
		t.Errorf("the dead hub's leases came after %v", took)
	}
	first.onlyMarker(a, "stop")
}
