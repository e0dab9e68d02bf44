package jetstream

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/natstest"
)

// The long form:
//
//	go test ./jetstream -run TestAcksDuringChangesOfLeader -acks.changes 12
var acksChanges = flag.Int("acks.changes", 4, "how often the leader of a consumer changes in TestAcksDuringChangesOfLeader")

// A consumer changes its leader again and again while a member acknowledges. Nothing that was
// acknowledged comes again, although acknowledgements of those moments find no leader. On a busy
// machine, a change may be undone before the hub has noticed it; then events do come again. They
// must do so at each of three tries for the test to fail.
func TestAcksDuringChangesOfLeader(t *testing.T) {
	t.Parallel()
	servers := natstest.StartCluster(t, 3)
	natstest.Look(t, natstest.URLs(servers)...).Replicating(3)
	b := open(t, Config{URL: servers[0].URL(), Replicas: 3, AckWait: 10 * time.Second})
	for try := 1; ; try++ {
		again, events := ackDuringChangesOfLeader(t, b, fmt.Sprint("elects", try))
		if again == 0 {
			return
		}
		t.Logf("%d of %d events came again after they had been acknowledged", again, events)
		if try == 3 {
			t.Fatal("events came again at each try")
		}
	}
}

// ackDuringChangesOfLeader returns how many events came again after they had been acknowledged, and
// how many there were.
func ackDuringChangesOfLeader(t *testing.T, b *Bus, topic string) (again, events int) {
	t.Helper()
	const every = 400 * time.Millisecond
	publishAll(t, b, topic, "0")
	var mu sync.Mutex
	acked := map[string]bool{}
	s, err := b.Subscribe(t.Context(), topic, "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 1000}, func(h *Held) {
		d, ok := h.Begin()
		if !ok {
			return
		}
		mu.Lock()
		if acked[d.Event.ID] {
			again++
		}
		mu.Unlock()
		if d.Ack() == nil {
			mu.Lock()
			acked[d.Event.ID] = true
			mu.Unlock()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Stop(context.Background()) }()

	var published atomic.Int64
	published.Store(1)
	stop := make(chan struct{})
	var flow sync.WaitGroup
	flow.Go(func() {
		p := b.NewPublisher()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for i := 1; ; i++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			err := p.PublishAsync(t.Context(), topic, []byte(strconv.Itoa(i)), PublishOptions{}, func(_ event.Receipt, err error) {
				if err == nil {
					published.Add(1)
				}
			})
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	for range *acksChanges {
		<-time.After(every)
		// The answer may be that there is no leader to step down yet, or none may come.
		_, _ = b.conn.JS.Conn().Request("$JS.API.CONSUMER.LEADER.STEPDOWN."+topic+".g", nil, time.Second)
	}
	close(stop)
	flow.Wait()
	// A handler notes its event after the acknowledgement, perhaps after the server has settled it.
	counted := func() int { mu.Lock(); defer mu.Unlock(); return len(acked) }
	var left *natsjs.ConsumerInfo
	for deadline := time.Now().Add(slow); int64(counted()) < published.Load() || left == nil || left.NumPending > 0 || left.NumAckPending > 0; <-time.After(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d events were acknowledged, %d published; not settled after %v: %+v", counted(), published.Load(), slow, left)
		}
		if c, err := b.conn.JS.Consumer(t.Context(), topic, "g"); err == nil {
			left = c.CachedInfo()
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return again, len(acked)
}

// The acknowledgements that are kept are the newest, and not older than they must be.
func TestRecentAcks(t *testing.T) {
	t.Parallel()
	var a recentAcks
	reply := func(i int) string { return strconv.Itoa(i) }
	for i := range 25 {
		if full, want := a.add(reply(i), 10), i == 10 || i == 15 || i == 20; full != want {
			t.Errorf("the limit is reached at %d: %t", i, full)
		}
	}
	if got := a.takeDoubted(); got != nil {
		t.Errorf("without doubt, %q are sent again", got)
	}
	const patience = 4 * recentAcksFor
	turn := func(now int64) { a.turn(now, now, patience) }
	a.doubted = true
	turn(10 * recentAcksFor)
	if got := a.takeDoubted(); len(got) != 10 || got[0] != "15" || got[9] != "24" {
		t.Errorf("sent again: %q", got)
	}
	turn(10 * recentAcksFor)
	a.add("late", 10)
	a.doubted = true
	if got := a.takeDoubted(); len(got) != 6 || got[0] != "20" || got[5] != "late" {
		t.Errorf("after a turn, sent again: %q", got)
	}
	turn(11*recentAcksFor - 1)
	turn(11 * recentAcksFor)
	turn(12 * recentAcksFor)
	a.doubted = true
	if got := a.takeDoubted(); len(got) != 0 {
		t.Errorf("after three turns, sent again: %q", got)
	}
	// While nobody confirms the leader, they are kept, until their events come again anyway.
	a.add("unsure", 10)
	for i := range int64(4) {
		a.turn((12+i)*recentAcksFor, 11*recentAcksFor, patience)
	}
	a.doubted = true
	if got := a.takeDoubted(); len(got) != 1 {
		t.Errorf("without a confirmed leader, sent again: %q", got)
	}
	a.turn(16*recentAcksFor, 11*recentAcksFor, patience)
	a.turn(20*recentAcksFor, 11*recentAcksFor, patience)
	a.doubted = true
	if got := a.takeDoubted(); len(got) != 0 {
		t.Errorf("after the patience, sent again: %q", got)
	}
}

// Acknowledgements for a consumer that is gone are not kept for ever, and nobody is asked for it.
func TestAcksForAConsumerThatIsGone(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: time.Second, Connections: 1})
	publishAll(t, b, "gone", "1")
	k := take(t, b, "gone", "g", SubscribeOptions{From: FromEarliest})
	d := k.next()
	g := d.group
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.conn.JS.DeleteConsumer(t.Context(), g.topic.Stream.Name, g.consumer); err != nil {
		t.Fatal(err)
	}
	g.paths[0].mu.Lock()
	g.paths[0].acks.add(d.reply, 10)
	g.paths[0].mu.Unlock()
	g.doubtAcks()
	if !g.paths[0].keeps() {
		t.Fatal("nothing is kept")
	}
	eventually(t, "nothing is kept any more", func() bool { return !g.paths[0].keeps() })
	b.groups.eachKeeping(func(*group) { t.Error("a group is asked for") })
}
