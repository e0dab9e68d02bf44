package facade_test

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

// A group with a TTL disappears when it has had no member for that long, and not before: not
// because the hub, with the server in it, was restarted in order. What is published before its
// member is back is the group's.
func TestPromiseATTLGroupOutlivesARestart(t *testing.T) {
	for _, ttl := range []time.Duration{20 * time.Second, time.Hour} {
		t.Run(ttl.String(), func(t *testing.T) {
			t.Parallel()
			dir, topic := t.TempDir(), freshTopic()
			opts := wire.SubscribeOptions{GroupTTLMS: ttl.Milliseconds()}
			hub, end := restartable(t, dir)
			c := hub.dial()
			in := hub.subscribe(c, topic, "tab", opts)
			for i := range 3 {
				hub.publish(c, topic, strconv.Itoa(i))
			}
			held := in.take(3)
			in.ack(held[0], held[2])
			end()

			hub, _ = restartable(t, dir)
			c = hub.dial()
			for i := 3; i < 8; i++ {
				hub.publish(c, topic, strconv.Itoa(i))
			}
			in = hub.subscribe(c, topic, "tab", opts)
			hub.publish(c, topic, `"marker"`)
			var got []string
			for len(got) == 0 || got[len(got)-1] != `"marker"` {
				got = append(got, string(in.next().Payload))
			}
			slices.Sort(got[:len(got)-1]) // what was held may come at any place
			if ttl <= time.Minute {
				// A group in memory goes on behind its ack floor: what was settled out of order
				// comes again.
				got = slices.DeleteFunc(got, func(payload string) bool { return payload == "2" })
			}
			if want := []string{"1", "3", "4", "5", "6", "7", `"marker"`}; !slices.Equal(got, want) {
				t.Errorf("after the restart came %s, want %s", got, want)
			}
		})
	}
}

// attempt rises, over restarts of NATS too, while the hub and its client stay.
func TestPromiseAttemptsRiseOverRestarts(t *testing.T) {
	t.Parallel()
	for _, ttlMS := range []int64{0, 3_600_000} {
		t.Run(fmt.Sprint("TTL ", ttlMS), func(t *testing.T) {
			t.Parallel()
			nats := natstest.Start(t)
			hub := startHub(t, openBus(t, at(nats.URL()), ackWait(2*time.Second)))
			c, topic := hub.dial(), freshTopic()
			opts := endless(10)
			opts.GroupTTLMS = ttlMS
			in := hub.subscribe(c, topic, "g", opts)
			publishMany(t, hub, topic, 10)
			last := map[string]int{}
			for range 4 {
				for _, e := range in.take(10) {
					if e.Attempt <= last[e.ID] {
						t.Fatalf("after attempt %d came attempt %d", last[e.ID], e.Attempt)
					}
					last[e.ID] = e.Attempt
				}
				nats.Stop()
				nats.Start()
			}
		})
	}
}

// A NACK's delay outlives a restart in order of a hub with the server in it, and what is given back
// in order comes at once.
func TestPromiseDelaysOutliveARestart(t *testing.T) {
	t.Parallel()
	const delay = 4 * time.Second
	dir, topic := t.TempDir(), freshTopic()
	hub, end := restartable(t, dir, func(cfg *jetstream.Config) { cfg.AckWait = 2 * waitLimit })
	c := hub.dial()
	in := hub.subscribe(c, topic, "g", endless(10))
	for _, payload := range []string{`"refused"`, `"held"`, `"short"`} {
		hub.publish(c, topic, payload)
	}
	got := in.take(3)
	from := time.Now()
	for i, d := range []time.Duration{delay, 0, time.Millisecond} {
		if d > 0 {
			if err := got[i].NackWait(t.Context(), "not yet", d); err != nil {
				t.Fatal(err)
			}
		}
	}
	if e := in.next(); string(e.Payload) != `"short"` || e.Attempt != 2 {
		t.Errorf("came %s, attempt %d", e.Payload, e.Attempt)
	}
	end()

	hub, _ = restartable(t, dir)
	joined := time.Now()
	in = hub.subscribe(hub.dial(), topic, "g", endless(10))
	for range 2 {
		if e := in.next(); string(e.Payload) == `"refused"` && time.Since(from) < delay {
			t.Errorf("%v of %v after it was refused, %s came again", time.Since(from).Round(time.Millisecond), delay, e.Payload)
		}
	}
	if took := time.Since(joined); took > 15*time.Second { // AckWait is eight times as long
		t.Errorf("what was given back in order came after %v", took)
	}
	if e := in.next(); time.Since(from) > delay+10*time.Second {
		t.Errorf("the last one, %s, came after %v", e.Payload, time.Since(from))
	}
}
