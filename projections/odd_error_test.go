package projections

import (
	"context"
	"testing"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// oddError is a common mistake: a nil pointer in an error, whose method dereferences the pointer.
type oddError struct{ text string }

func (e *oddError) Error() string { return e.text }

func oddOf(payload string) error {
	var err *oddError
	if payload != `"bad"` {
		return nil
	}
	return err
}

// TestErrorThatPanics wants an error whose Error method panics to fail only its own event.
func TestErrorThatPanics(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]Projection{
		"Apply": {Apply: func(ctx context.Context, state []byte, e *jetstream.Event) ([]byte, error) {
			if err := oddOf(string(e.Payload)); err != nil {
				return nil, err
			}
			return appendEvent(ctx, state, e)
		}},
		"Key": {Apply: appendEvent, Key: func(e *jetstream.Event) (string, error) { return e.Key, oddOf(string(e.Payload)) }},
	} {
		t.Run(name, func(t *testing.T) {
			bus := openBus(t, jetstream.Config{Server: natstest.Embed(t, t.TempDir())})
			seen := newTally()
			p.From, p.Attempts, p.Observer, p.Logger = jetstream.FromEarliest, 2, seen, newBook(t).logger()
			run(t, JetStream(bus), p)
			bad := put(t, bus, topicCounts, "k", `"bad"`)
			put(t, bus, topicCounts, "k", "1")
			put(t, bus, topicCounts, "other", "2")
			workedOff(t, JetStream(bus), "counter")
			poll(t, "all events are dealt with", func() bool { return seen.outcome(Applied) >= 2 && seen.outcome(Poisoned) >= 1 })
			wantStates(t, viewed(t, JetStream(bus), "counter"), map[string]string{"k": "1 ", "other": "2 "})
			if dead := readLetters(t, bus); len(dead) != 1 || dead[bad.ID].Attempts == 0 {
				t.Errorf("the dead letters are %+v", dead)
			}
		})
	}
}
