package projections

import (
	"context"
	"flag"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
)

// The full form of the crash test is -crash.kills=200 -crash.events=100000 -crash.keys=1000.
var (
	crashKills  = flag.Int("crash.kills", 4, "how often the crash test kills a projector in each of its variants; half as often where it kills the server too")
	crashEvents = flag.Int("crash.events", 1_500, "how many events the crash test projects")
	crashKeys   = flag.Int("crash.keys", 200, "how many keys they have")
	crashSeed   = flag.Uint64("crash.seed", 1, "seed of the crash test's random moments")
)

// projector is the program of a child process: a projector on the server of a URL.
func projector(ctx context.Context, url string) error {
	bus, err := jetstream.Open(ctx, jetstream.Config{URL: url, AckWait: ackWait / 2})
	if err != nil {
		return err
	}
	defer func() { _ = bus.Close() }()
	natstest.Ready()
	return Run(ctx, JetStream(bus), Projection{Topic: topicCounts, Group: "counter", From: jetstream.FromEarliest, Apply: appendEvent, CacheKeys: 500})
}

// TestCrash kills projectors at random moments while events come in, and wants the states that a
// fold of the stream gives: no event lost, none applied twice, none out of order.
func TestCrash(t *testing.T) {
	t.Parallel()
	t.Run("one instance", func(t *testing.T) { t.Parallel(); testCrash(t, 1, *crashKills, false) })
	t.Run("two instances", func(t *testing.T) { t.Parallel(); testCrash(t, 2, *crashKills, false) })
	t.Run("the server too", func(t *testing.T) { t.Parallel(); testCrash(t, 2, (*crashKills+1)/2, true) })
}

func testCrash(t *testing.T, instances, kills int, killServer bool) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(*crashSeed, uint64(instances)))
	srv := natstest.Start(t)
	bus := openBus(t, jetstream.Config{URL: srv.URL()})

	startProjector := func() *natstest.Child { return natstest.StartChild(t, "projector", srv.URL(), nil) }
	projectors := make([]*natstest.Child, instances)
	for i := range projectors {
		projectors[i] = startProjector()
	}
	s := newStream(bus, topicCounts)
	s.lossy = killServer // what is cut off may be stored or not: the states follow what is
	publish := func(n int) {
		for range n {
			key := "k" + strconv.Itoa(rnd.IntN(*crashKeys))
			s.put(t, key)
		}
	}
	published, busy := 0, 0
	began := time.Now()
	for kill := range kills {
		i := rnd.IntN(instances)
		goal := *crashEvents * (kill + 1) / (kills + 1)
		publish(goal - published)
		published = goal
		// At any moment of its life: also before it has begun.
		if rnd.IntN(8) > 0 {
			projectors[i].AwaitReady()
		}
		if err := pause(t.Context(), time.Duration(rnd.IntN(150))*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if b, err := bus.Group(topicCounts, "counter").Backlog(t.Context()); err == nil && b.Waiting+b.Leased > 0 {
			busy++
		}
		if killServer && kill%4 == 1 {
			srv.Kill()
			srv.Start()
			poll(t, "the hub is connected", func() bool { return bus.Ready(t.Context()) == nil })
			continue
		}
		projectors[i].Kill()
		projectors[i] = startProjector()
	}
	publish(*crashEvents - published)
	s.flush(t)
	workedOffIn(t, 4*patience, JetStream(bus), "counter")
	t.Logf("%d kills, %d of them in the middle of work, %d events, %d keys: %v", kills, busy, *crashEvents, *crashKeys, time.Since(began).Round(time.Millisecond))
	want := fold(t, bus, 0, appendEvent)
	if len(want) < *crashKeys/2 {
		t.Fatalf("there are %d keys", len(want))
	}
	wantStates(t, viewed(t, JetStream(bus), "counter"), want)
	if n := len(letters(t, bus)); n > 0 {
		t.Errorf("there are %d dead letters", n)
	}
}
