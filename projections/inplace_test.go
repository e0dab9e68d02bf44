package projections

import (
	"context"
	"sync/atomic"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// TestApplyThatChangesItsState wants a failed attempt to leave the state unchanged, even if Apply
// modified the bytes that it was given.
func TestApplyThatChangesItsState(t *testing.T) {
	t.Parallel()
	bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
	seen := newTally()
	var once atomic.Int64
	run(t, JetStream(bus), Projection{
		From: jetstream.FromEarliest, Attempts: 3, Observer: seen, Logger: newBook(t).logger(),
		Apply: func(_ context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
			if state == nil {
				return []byte("0"), nil
			}
			state[0]++
			switch string(e.Payload) {
			case `"once"`:
				if once.Add(1) == 1 {
					panic(secret)
				}
			case `"bad"`:
				panic(secret)
			}
			return state, nil
		},
	})
	put(t, bus, topicCounts, "k", "0")
	put(t, bus, topicCounts, "k", `"once"`)
	put(t, bus, topicCounts, "k", `"bad"`)
	put(t, bus, topicCounts, "k", "1")
	workedOff(t, JetStream(bus), "counter")
	poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied) >= 3 && seen.outcome(Poisoned) >= 1 })
	wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "2"})
}
