package jetstream

import (
	"testing"
	"time"

	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// A crash of the machines of NATS may take the end of a stream, and leave the position of a group
// behind the end. The group gets the events that are stored then, which have the sequences of lost
// events.
func TestAGroupBehindTheEndOfItsStream(t *testing.T) {
	t.Parallel()
	for name, restored := range map[string]bool{"made here": false, "restored from a backup": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := natsServer(t)
			publish(t, open(t, Config{URL: url}), "t", numbers(3)...)
			look := natstest.Look(t, url)
			if restored {
				s, err := look.JS.Stream(t.Context(), "t")
				if err != nil {
					t.Fatal(err)
				}
				changed := s.CachedInfo().Config
				changed.Metadata[native.MetaMade] = time.Now().Add(-time.Hour).Format(time.RFC3339Nano)
				if _, err := look.JS.UpdateStream(t.Context(), changed); err != nil {
					t.Fatal(err)
				}
			}
			cfg := native.ConsumerConfig("t", "g", native.ConsumerName("t", "g", false), false)
			cfg.OptStartSeq = 6 // two events were lost
			if _, err := look.JS.CreateConsumer(t.Context(), "t", cfg); err != nil {
				t.Fatal(err)
			}
			b := open(t, Config{URL: url})
			k := take(t, b, "t", "g", SubscribeOptions{})
			publish(t, b, "t", "after")
			if got := k.payloads(1)[0]; got != "after" {
				t.Errorf("%s came first", got)
			}
			if _, err := b.Group("t", "g").Cursor(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
