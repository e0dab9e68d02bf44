package facade_test

import (
	"strconv"
	"testing"
	"time"

	"eventhub/facade/client"
)

// A group with a TTL disappears when it has had no member for that long, and not before: not because the hub, with the server
// in it, was restarted in order. What is published before its member is back is the group's.
func TestPromiseATTLGroupOutlivesARestart(t *testing.T) {
	for _, ttl := range []time.Duration{20 * time.Second, time.Hour} {
		t.Run(ttl.String(), func(t *testing.T) {
			t.Parallel()
			dir, topic := t.TempDir(), freshTopic()
			opts := client.SubscribeOptions{GroupTTLMS: ttl.Milliseconds()}
			hub, end := restartable(t, dir)
			c := hub.dial()
			in := hub.subscribe(c, topic, "tab", opts)
			for i := range 3 {
				hub.publish(c, topic, strconv.Itoa(i))
			}
			in.ack(in.take(3)...)
			end()

			hub, _ = restartable(t, dir)
			c = hub.dial()
			for i := 3; i < 8; i++ {
				hub.publish(c, topic, strconv.Itoa(i))
			}
			in = hub.subscribe(c, topic, "tab", opts)
			hub.publish(c, topic, `"marker"`)
			var got []client.Event
			for len(got) == 0 || string(got[len(got)-1].Payload) != `"marker"` {
				got = append(got, in.next())
			}
			if s := payloads(got); s != `3 4 5 6 7 "marker"` {
				t.Errorf("after the restart came %s", s)
			}
		})
	}
}
