package jetstream

import (
	"encoding/json"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/topics"
)

// rejecting is the rule of a topic with room for 64 events.
func rejecting() []topics.Rule {
	return []topics.Rule{{Pattern: "orders", MaxMsgs: 64, OnFull: topics.OnFullReject}}
}

// A hub that is about to remove what all groups have settled, and a group that is moved back to
// these events: the removal comes first, and the move counts what is left.
func TestAMoveBackWaitsForARemoval(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	proxy := startAPIProxy(t, url)
	began, pass := make(chan struct{}), make(chan struct{})
	let := sync.OnceFunc(func() { close(pass) })
	t.Cleanup(let)
	var once sync.Once
	proxy.meet(func(request string) bool {
		if request == "STREAM.PURGE.orders" {
			once.Do(func() { close(began) })
			<-pass
		}
		return true
	})
	keeper := open(t, Config{URL: url, Domain: proxyDomain, Topics: rejecting()})
	mover := open(t, Config{URL: url, Topics: rejecting(), moveWait: briefly})
	// only the keeper meets the topic, so that only it removes
	k := take(t, keeper, "orders", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 100})
	fillFrom(t, keeper, "orders", 0, 50)
	k.payloads(51)
	settledUpTo(t, keeper.Group("orders", "g"), 0)
	fillFrom(t, keeper, "orders", 51, 59)
	k.payloads(9)
	<-began
	if err := mover.Group("orders", "g").Pause(t.Context()); err != nil { // it is given nothing now
		t.Fatal(err)
	}
	type answer struct {
		moved Moved
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		moved, err := mover.Group("orders", "g").Move(t.Context(), FromEarliest)
		done <- answer{moved, err}
	}()
	// A move that does not wait is answered by then. One that waits is not, however long it takes.
	select {
	case a := <-done:
		done <- a
	case <-time.After(time.Second):
	}
	let()
	a := <-done
	if a.err != nil {
		t.Fatal(a.err)
	}
	eventually(t, "the removal", func() bool { return firstOf(t, keeper) > 1 })
	if err := mover.Group("orders", "g").Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if a.moved.Redelivered == 0 || a.moved.Redelivered == 60 {
		t.Errorf("the move says that %d events come again; of 60, some were removed", a.moved.Redelivered)
	}
	k.payloads(int(a.moved.Redelivered))
	k.quiet(500 * time.Millisecond)
}

// While groups are moved back again and again, two hubs remove events: every event that a move says
// comes again does, and nothing is lost.
func TestMovesBackDuringRemovals(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	seen := new(losses)
	cfg := Config{URL: url, AckWait: time.Second, Observer: seen, Topics: rejecting()}
	one, two := open(t, cfg), open(t, cfg)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop); wg.Wait() })
	t.Cleanup(end)
	const groups = 6
	for i := range groups {
		name := string(rune('a' + i))
		k := take(t, one, "orders", name, SubscribeOptions{From: FromEarliest, MaxInFlight: 100})
		wg.Go(func() {
			for {
				select {
				case h := <-k.ch:
					if d, ok := h.Begin(); ok {
						_ = d.Ack() // one that was moved meanwhile comes again
					}
				case <-stop:
					return
				}
			}
		})
	}
	wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			if _, err := two.Publish(t.Context(), "orders", []byte("1"), PublishOptions{}); err != nil && !isTopicFull(err) {
				t.Error(err)
				return
			}
			if n%8 == 0 {
				<-time.After(time.Millisecond)
			}
		}
	})
	var movers sync.WaitGroup
	for i := range groups {
		g := two.Group("orders", string(rune('a'+i)))
		movers.Go(func() {
			for range 4 {
				if _, err := g.Move(t.Context(), FromEarliest); err != nil {
					t.Error(err)
				}
			}
		})
	}
	movers.Wait()
	eventually(t, "removals", func() bool { return firstOf(t, one) > 64 })
	end()
	if n := seen.count(); n != 0 {
		t.Errorf("%d events were lost", n)
	}
}

// A hub removes nothing while the server does not tell of all groups: in a cluster, a consumer
// whose leader is away is left out of the list.
func TestNothingIsRemovedWhileAGroupIsMissing(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	proxy := startAPIProxy(t, url)
	var asked atomic.Int32
	proxy.answer("CONSUMER.LIST.orders", func(answer []byte) []byte {
		var list map[string]any
		if err := json.Unmarshal(answer, &list); err != nil {
			t.Error(err)
			return answer
		}
		all, _ := list["consumers"].([]any)
		list["missing"] = []string{"behind"}
		list["consumers"] = slices.DeleteFunc(all, func(c any) bool {
			of, ok := c.(map[string]any)
			return ok && of["name"] == "behind"
		})
		changed, err := json.Marshal(list)
		if err != nil {
			t.Error(err)
		}
		asked.Add(1)
		return changed
	})
	b := open(t, Config{URL: url, Domain: proxyDomain, Topics: rejecting()})
	take(t, b, "orders", "behind", SubscribeOptions{From: FromEarliest})
	fast := take(t, b, "orders", "fast", SubscribeOptions{From: FromEarliest})
	fillFrom(t, b, "orders", 0, 59)
	fast.payloads(60)
	first := uint64(1)
	eventually(t, "looks at the topic", func() bool {
		first = firstOf(t, b)
		return asked.Load() >= 4 || first > 1
	})
	if first > 1 {
		t.Errorf("the topic begins at %d; a group has settled nothing", first)
	}
}
