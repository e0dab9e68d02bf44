package jetstream

import (
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// A handler of Subscribe that waits for room in a channel, or for the end of its subscription, lets
// Stop and Close end that. Events that the hub took back still fill the channel.
func TestStopEndsWaitingHandler(t *testing.T) {
	t.Parallel()
	b, err := Open(t.Context(), Config{Server: natstest.Embed(t, t.TempDir())})
	if err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "work", "1", "2", "3", "4", "5", "6")
	const most = 2
	for _, end := range []func(*Subscription) error{
		func(s *Subscription) error { return s.Stop(t.Context()) },
		func(s *Subscription) error { return s.Drain(t.Context()) },
		func(*Subscription) error { return b.Close() },
	} {
		held := make(chan *Held, most)
		waits := make(chan struct{}, 100)
		var s *Subscription
		s, err := b.Subscribe(t.Context(), "work", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: most, Paused: true}, func(h *Held) {
			select {
			case held <- h:
				return
			default:
			}
			waits <- struct{}{}
			select {
			case held <- h:
			case <-s.Done():
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		s.Resume()
		for deadline := time.After(wait); len(held) < most; {
			select {
			case <-deadline:
				t.Fatal("no events come")
			case <-time.After(time.Millisecond):
			}
		}
		if err := s.Pause(t.Context()); err != nil { // takes back what is in the channel
			t.Fatal(err)
		}
		s.Resume()
		select {
		case <-waits:
		case <-time.After(wait):
			t.Fatal("the channel has room for more")
		}
		ended := make(chan error, 1)
		go func() { ended <- end(s) }()
		select {
		case err := <-ended:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(wait):
			t.Fatal("the handler waits for the end of the subscription, and that for the handler")
		}
	}
}
