package facade_test

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/sdk/go/wire"
)

const (
	lateEvents = 400
	lateBytes  = 12 << 10
	// kernelTakes is more frames than the kernel takes of a client that does not read, and less
	// than the hub writes at once.
	kernelTakes = 40
)

// dither makes a client that does not read pause and resume, or leave and join, as often as an
// event has attempts, each time when all that the hub fetches has come to rest.
func dither(s *sluggard, nats *natstest.View, off string) {
	s.t.Helper()
	nats.Still(s.topic)
	for range sluggardAttempts {
		s.say(off, "")
		nats.Still(s.topic)
		if off == "PAUSE" {
			s.say("RESUME", "")
		} else {
			s.subscribe()
		}
		nats.Still(s.topic)
	}
}

// attempt counts how often an event was handed out: what was fetched and given back without being
// written does not count, and an event that was refused once is no dead letter.
func TestPromiseUnwrittenEventsCostNoAttempt(t *testing.T) {
	t.Parallel()
	for _, off := range []string{"PAUSE", "UNSUBSCRIBE"} {
		t.Run(off, func(t *testing.T) {
			t.Parallel()
			nats := natstest.Start(t)
			hub := startHub(t, openBus(t, at(nats.URL())), unthrottled, patientWriter)
			topic := freshTopic()
			s := dialSluggard(hub, topic, 2*lateEvents)
			dead := hub.subscribe(hub.dial(), "dlq."+topic, "d", wire.SubscribeOptions{From: "earliest", MaxInFlight: lateEvents})
			publishBig(t, hub, topic, lateEvents, lateBytes)
			dither(s, natstest.Look(t, nats.URL()), off)

			// It reads at last. What it was sent before its last frame was answered is leased to it
			// still, unless it has left.
			s.readTo(s.corr())
			refused, done, buried := map[string]bool{}, map[string]bool{}, 0
			refuse := func(id string) {
				refused[id] = true
				s.settle("NACK", id, `,"delay_ms":0`)
			}
			if off == "PAUSE" {
				for _, id := range s.order {
					refuse(id)
				}
			}
			for frames := s.listen(); len(done)+buried < lateEvents; {
				select {
				case got, open := <-frames:
					switch id := got.Event.ID; {
					case !open:
						t.Fatal("the connection ended")
					case got.Op != "EVENT":
					case refused[id]:
						done[id] = true
						s.settle("ACK", id, "")
					default:
						refuse(id)
					}
				case <-dead.events:
					buried++
				case <-time.After(waitLimit):
					t.Fatalf("no more comes: %d events are settled, %d dead letters; %v", len(done), buried, s.faults)
				}
			}
			if len(s.faults) > 0 {
				t.Errorf("of %d events: %v", lateEvents, s.faults)
			}
			if buried > 0 || len(done) != lateEvents {
				t.Errorf("%d events are dead letters, %d were settled", buried, len(done))
			}
		})
	}
}

// The same over two hubs: what a client on one of them did not get costs no attempt when a client
// on the other gets it.
func TestPromiseUnwrittenEventsCostNoAttemptOnAnotherHub(t *testing.T) {
	t.Parallel()
	for _, end := range []string{"UNSUBSCRIBE", "lost connection"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			nats := natstest.Start(t)
			a := startHub(t, openBus(t, at(nats.URL())), unthrottled, patientWriter)
			b := startHub(t, openBus(t, at(nats.URL())), unthrottled)
			topic := freshTopic()
			s := dialSluggard(a, topic, 2*lateEvents)
			view := natstest.Look(t, nats.URL())
			publishBig(t, b, topic, lateEvents, lateBytes)
			dither(s, view, "PAUSE")
			if end == "UNSUBSCRIBE" {
				s.say(end, "")
				s.readTo(s.corr())
			} else if err := s.ws.CloseNow(); err != nil {
				t.Fatal(err)
			}
			// What the client has got is known after UNSUBSCRIBE; of a lost connection, the kernel
			// has taken a few frames.
			inKernel := 0
			counts := map[string]int{}
			for _, e := range b.subscribe(b.dial(), topic, "g", endless(lateEvents)).take(lateEvents) {
				n := s.frames[e.ID]
				if end != "UNSUBSCRIBE" && e.Attempt == n+2 && inKernel < kernelTakes {
					inKernel++
				} else if e.Attempt != n+1 {
					counts[fmt.Sprintf("handed out %d times, attempt %d", n, e.Attempt)]++
				}
			}
			if len(counts)+len(s.faults) > 0 {
				t.Errorf("of %d events: %v; before, to the first client: %v", lateEvents, counts, s.faults)
			}
		})
	}
}

// The same over a restart in order: what the hub had fetched and not written when it ended comes
// again as the first attempt.
func TestPromiseUnwrittenEventsCostNoAttemptOverARestart(t *testing.T) {
	t.Parallel()
	dir, topic := t.TempDir(), freshTopic()
	hub, end := restartable(t, dir)
	dialSluggard(hub, topic, 2*lateEvents)
	publishBig(t, hub, topic, lateEvents, lateBytes)
	atRest(t, hub, topic)
	end()
	hub, _ = restartable(t, dir)
	inKernel := 0
	counts := map[int]int{}
	for _, e := range hub.subscribe(hub.dial(), topic, "g", endless(lateEvents)).take(lateEvents) {
		if e.Attempt == 2 && inKernel < kernelTakes {
			inKernel++
		} else if e.Attempt != 1 {
			counts[e.Attempt]++
		}
	}
	if len(counts) > 0 {
		t.Errorf("of %d events, %d of them perhaps in the kernel, so many came with these attempts: %v", lateEvents, inKernel, counts)
	}
}

// An event that failed for good at its last attempt is given to nobody again while its dead letter
// is on its way, however slow that is.
//
// A hub that stands still on a busy machine gives its leases up. That says nothing, and the test is
// tried again with twice the times.
func TestPromiseMaxAttemptsHoldsOnASlowLink(t *testing.T) {
	t.Parallel()
	for factor := 1; ; factor *= 2 {
		fault, stalled := buriedSlowly(t, 20*factor, time.Duration(3*factor)*time.Second)
		if fault != "" && stalled && factor < 4 {
			continue
		}
		if fault != "" {
			t.Error(fault)
		}
		return
	}
}

// buriedSlowly has n events fail at their last attempt over a slow link, with this AckWait. It
// returns what was wrong, and whether the hub stood still.
func buriedSlowly(t *testing.T, n int, wait time.Duration) (fault string, stalled bool) {
	t.Helper()
	nats := natstest.Start(t)
	proxy := newTCPProxy(t, nats.URL())
	var log stallLog
	hub := startHub(t, openBus(t, at(proxy.url()), func(cfg *jetstream.Config) {
		cfg.AckWait, cfg.Connections, cfg.Logger = wait, 1, slog.New(&log)
	}), unthrottled)
	topic := freshTopic()
	publishBig(t, hub, topic, n, 100)
	gone := hub.dial()
	had := hub.subscribe(gone, topic, "g", wire.SubscribeOptions{From: "earliest", MaxInFlight: n, MaxAttempts: new(1)})
	for range n {
		had.next()
	}
	other := hub.subscribe(hub.dial(), topic, "g", wire.SubscribeOptions{MaxInFlight: n})
	dead := hub.subscribe(hub.dial(), "dlq."+topic, "d", wire.SubscribeOptions{From: "earliest", MaxInFlight: 2 * n})
	proxy.delay(200 * time.Millisecond)
	began := time.Now()
	gone.Abort()
	for buried := 0; buried < n; {
		select {
		case e := <-other.events:
			return fmt.Sprintf("event %s was given to another after its last attempt, as attempt %d, with %d dead letters", e.ID, e.Attempt, buried), log.stalled.Load()
		case <-dead.events:
			buried++
		case <-time.After(waitLimit):
			t.Fatalf("%d of %d dead letters", buried, n)
		}
	}
	if took := time.Since(began); took < wait {
		fault = fmt.Sprintf("all dead letters were stored within %v, so that NATS had given no event again", took)
	}
	return fault, log.stalled.Load()
}

// atRest waits until the hub has fetched for a group what it will.
func atRest(t *testing.T, hub *testHub, topic string) {
	t.Helper()
	var last jetstream.Backlog
	same := 0
	waitUntil(t, "the hub has fetched what it will", func() bool {
		now, err := hub.bus.Group(topic, "g").Backlog(t.Context())
		if err != nil || now != last {
			last, same = now, 0
			return false
		}
		same++
		return same >= 10
	})
}
