package jetstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/natstest"
	"eventhub/jetstream/topics"
)

// losses is what subscribers of a group were told, and an Observer of it.
type losses struct {
	event.NopObserver

	mu      sync.Mutex
	counted uint64
}

func (l *losses) Group(string, string, bool) event.GroupObserver { return lostObserver{l: l} }

type lostObserver struct {
	event.NopObserver
	l *losses
}

func (o lostObserver) Lost(n uint64) {
	o.l.mu.Lock()
	defer o.l.mu.Unlock()
	o.l.counted += n
}

func (l *losses) count() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counted
}

// told is a subscriber that keeps what it is told of losses, in order with its events.
type told struct {
	*taker

	mu   sync.Mutex
	lost []Loss
}

func takeTold(tb testing.TB, b *Bus, topic string, opts SubscribeOptions) *told {
	tb.Helper()
	k := new(told)
	opts.OnLost = func(l Loss) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.lost = append(k.lost, l)
	}
	k.taker = take(tb, b, topic, "g", opts)
	return k
}

func (k *told) sum() (n uint64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range k.lost {
		n += l.Events
	}
	return n
}

// fillFrom publishes numbers from..to.
func fillFrom(tb testing.TB, b *Bus, topic string, from, to int) {
	tb.Helper()
	for i := from; i <= to; i++ {
		publishAll(tb, b, topic, strconv.Itoa(i))
	}
}

// bounded are rules for a topic whose events go by count, by size and by age.
func bounded() map[string]topics.Rule {
	return map[string]topics.Rule{
		"messages": {Pattern: "orders", MaxMsgs: 10},
		"bytes":    {Pattern: "orders", MaxBytes: 1500},
		// see expire
		"age": {Pattern: "orders", MaxAge: time.Hour, DuplicateWindow: time.Second},
	}
}

// firstOf is the number in the first event that is left; 1 more than last when none is.
func firstOf(tb testing.TB, b *Bus) uint64 {
	tb.Helper()
	info := streamInfo(tb, b, objectName("orders"))
	return info.State.FirstSeq
}

// expire has the stream keep events for a second until the first 100 are gone. What comes then is
// kept for as long as before, however slow the machine is. Copies expire on their own, so with
// several the second stays: some may still have what the leader has removed.
func expire(tb testing.TB, b *Bus) {
	tb.Helper()
	cfg := streamInfo(tb, b, objectName("orders")).Config
	keep := func(age time.Duration) {
		tb.Helper()
		cfg.MaxAge = age
		if _, err := b.conn.JS.UpdateStream(tb.Context(), cfg); err != nil {
			tb.Fatal(err)
		}
	}
	before := cfg.MaxAge
	keep(time.Second)
	eventually(tb, "the events expire", func() bool { return firstOf(tb, b) == 101 })
	if cfg.Replicas == 1 {
		keep(before)
	}
}

// overtake publishes so many events, or has so many expire, that the group is overtaken, and
// returns the first event that is left.
func overtake(tb testing.TB, b *Bus, rule topics.Rule) uint64 {
	tb.Helper()
	fillFrom(tb, b, "orders", 4, 100)
	if rule.MaxAge > 0 {
		expire(tb, b)
		fillFrom(tb, b, "orders", 101, 103)
	}
	return firstOf(tb, b)
}

func TestLossIsCountedExactly(t *testing.T) {
	t.Parallel()
	for name, rule := range bounded() {
		for _, servers := range []int{1, 3} {
			t.Run(fmt.Sprintf("%s on %d", name, servers), func(t *testing.T) {
				t.Parallel()
				url := natsServers(t, servers)
				seen := new(losses)
				b := open(t, Config{URL: url, Replicas: servers, Topics: []topics.Rule{rule}, Observer: seen})
				g := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
				fillFrom(t, b, "orders", 1, 3)
				g.payloads(2)
				held := g.next() // 3
				first := overtake(t, b, rule)
				if g.sum() != 0 {
					t.Fatalf("%d lost are reported before the next event", g.sum())
				}
				if err := held.Ack(); err != nil {
					t.Fatal(err)
				}
				// The server that leads the consumer may be behind the leader of the stream, and
				// still have what that one has removed.
				given := uint64(0)
				d := g.next()
				for ; servers == 3 && d.Event.Sequence < first; d = g.next() {
					given++
					if err := d.Ack(); err != nil {
						t.Fatal(err)
					}
				}
				if d.Event.Sequence != first {
					t.Fatalf("the group goes on at %d, the first left is %d", d.Event.Sequence, first)
				}
				if want := first - 4 - given; g.sum() != want || seen.count() != want {
					t.Errorf("%d lost are reported and %d counted, %d are", g.sum(), seen.count(), want)
				}
				if given > 0 { // perhaps all of them
					return
				}
				if since := g.lost[0].Since; since.UnixNano() != held.Event.StoredAt {
					t.Errorf("lost since %v, the last event is of %v", since, time.Unix(0, held.Event.StoredAt))
				}
			})
		}
	}
}

// A group may be overtaken while no hub runs.
func TestLossIsCountedOverRestarts(t *testing.T) {
	t.Parallel()
	for name, rule := range bounded() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := natsServer(t)
			seen := new(losses)
			cfg := Config{URL: url, Topics: []topics.Rule{rule}, Observer: seen}
			b := open(t, cfg)
			g := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
			fillFrom(t, b, "orders", 1, 3)
			g.payloads(3)
			if err := g.sub.Stop(t.Context()); err != nil {
				t.Fatal(err)
			}
			_ = b.Close()

			b = open(t, cfg)
			first := overtake(t, b, rule)
			_ = b.Close()

			b = open(t, cfg)
			g = takeTold(t, b, "orders", SubscribeOptions{})
			d := g.next()
			if want := first - 4; d.Event.Sequence != first || g.sum() != want || seen.count() != want {
				t.Errorf("went on at %d of %d; %d lost are reported and %d counted, %d are", d.Event.Sequence, first, g.sum(), seen.count(), want)
			}
		})
	}
}

// The embedded server restarts with its hub, after the group has met the end of a stream from which
// all was removed by age.
func TestLossIsCountedOverARestartOfTheServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	seen := new(losses)
	start := func() *Bus {
		return open(t, Config{Server: natstest.Embed(t, dir), Topics: []topics.Rule{bounded()["age"]}, Observer: seen})
	}
	b := start()
	g := takeTold(t, b, "orders", SubscribeOptions{From: FromEarliest})
	fillFrom(t, b, "orders", 1, 3)
	g.payloads(3)
	if err := g.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	fillFrom(t, b, "orders", 4, 100)
	expire(t, b)
	g.sub.Resume()
	eventually(t, "the group meets the end", func() bool {
		backlog, err := b.Group("orders", "g").Backlog(t.Context())
		return err == nil && backlog.Waiting == 0
	})
	_ = b.Close()

	b = start()
	g = takeTold(t, b, "orders", SubscribeOptions{})
	fillFrom(t, b, "orders", 101, 101)
	if got := g.payloads(1); got[0] != "101" || g.sum() != 97 || seen.count() != 97 {
		t.Errorf("went on at %s; %d lost are reported and %d counted, 97 are", got[0], g.sum(), seen.count())
	}
}

// Each of two hubs tells its members, and one counts. Redeliveries do not disturb the count.
func TestLossIsCountedOnceByHubs(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(fmt.Sprintf("on %d", servers), func(t *testing.T) {
			t.Parallel()
			url := natsServers(t, servers)
			rule := topics.Rule{Pattern: "orders", MaxMsgs: 10}
			seen := new(losses)
			// A hub that gets no answer for 5 s cannot know what the other has counted.
			log, alone := countLines(t, "this hub reports them by itself")
			cfg := Config{URL: url, Replicas: servers, Topics: []topics.Rule{rule}, Observer: seen, Logger: log}
			var members []*told
			for range 2 {
				b := open(t, cfg)
				for range 2 {
					members = append(members, takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 2, From: FromEarliest}))
				}
			}
			pub := open(t, Config{URL: url, Replicas: servers, Topics: []topics.Rule{rule}})
			var mu sync.Mutex
			got, orders := make(map[uint64]bool), make(map[uint64]uint64)
			var stored atomic.Uint64
			const events = 1_000
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			t.Cleanup(func() { cancel(); wg.Wait() })
			for i, m := range members {
				wg.Go(func() {
					for n := 0; ; n++ {
						select {
						case <-ctx.Done():
							return
						case h := <-m.ch:
							d, ok := h.Begin()
							if !ok {
								continue
							}
							mu.Lock()
							got[d.Event.Sequence] = true
							if seq, again := orders[d.Order]; again {
								t.Logf("%d was delivered as number %d, as %d was", d.Event.Sequence, d.Order, seq)
							}
							orders[d.Order] = d.Event.Sequence
							mu.Unlock()
							// slower than events are stored
							for tick := time.Tick(5 * time.Millisecond); stored.Load() < min(d.Event.Sequence+20*uint64(i+1), events); {
								select {
								case <-tick:
								case <-ctx.Done():
									return
								}
							}
							_ = d.Ack()
						}
					}
				})
			}
			for i := range events {
				publishAll(t, pub, "orders", strconv.Itoa(i+1))
				stored.Add(1)
			}
			eventually(t, "the last event", func() bool { mu.Lock(); defer mu.Unlock(); return got[events] })
			distinct := func() uint64 { mu.Lock(); defer mu.Unlock(); return uint64(len(got)) }
			eventually(t, "the last gap", func() bool {
				info, err := pub.Group("orders", "g").Backlog(t.Context())
				return err == nil && info.Leased == 0 && info.Waiting == 0
			})
			c, err := pub.conn.JS.Consumer(t.Context(), "orders", "g")
			if err != nil {
				t.Fatal(err)
			}
			lost, again := events-distinct(), c.CachedInfo().Delivered.Consumer-distinct()
			// What was given twice, because a member was slow to take it, may hide a loss from the
			// other hub. A slow hub may still note what the other has settled since.
			eventually(t, "the losses are counted", func() bool { return seen.count()+again >= lost })
			if n := seen.count(); lost == 0 || n > lost && alone.Load() == 0 {
				t.Errorf("%d of %d were lost, %d are counted; %d deliveries were redeliveries", lost, events, n, again)
			}
			for _, m := range members {
				if m.sum() > lost && alone.Load() == 0 {
					t.Errorf("a member is told of %d, %d were lost", m.sum(), lost)
				}
			}
			t.Logf("%d lost, %d counted, told %d %d %d %d; %d redeliveries", lost, seen.count(), members[0].sum(), members[1].sum(), members[2].sum(), members[3].sum(), again)
		})
	}
}

// Deliveries over one of the hub's connections come 1.2 s later than those over the other.
func TestLossBehindASlowConnection(t *testing.T) {
	t.Parallel()
	unlessStalled(t, func(log *slog.Logger) error { return loseBehindASlowConnection(t, log) })
}

func loseBehindASlowConnection(t *testing.T, log *slog.Logger) error {
	t.Helper()
	url := natsServer(t)
	proxy := natstest.StartProxy(t, url)
	rule := topics.Rule{Pattern: "orders", MaxMsgs: 10}
	seen := new(losses)
	b := open(t, Config{URL: proxy.URL(), Connections: 2, Topics: []topics.Rule{rule}, Observer: seen, Logger: log})
	pub := open(t, Config{URL: url, Topics: []topics.Rule{rule}})
	members := make([]*told, b.cfg.Connections)
	for slices.Contains(members, nil) {
		m := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
		if i := m.sub.link.Index; members[i] == nil {
			members[i] = m
		} else if err := m.sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	slow, fast := members[0], members[1]
	stored, lost := 0, uint64(0)
	for range 10 {
		for next := fast; next != slow; { // whose is the next event
			stored++
			fillFrom(t, pub, "orders", stored, stored)
			d := either(slow.taker, fast.taker)
			if d.m.sub == fast.sub {
				next = slow
			}
			if err := d.Ack(); err != nil {
				return err
			}
		}
		release := proxy.HoldOne(t, slow.sub.link.Index)
		fillFrom(t, pub, "orders", stored+1, stored+2)
		one := fast.next()
		<-time.After(settleSight + 200*time.Millisecond) // the time under test
		if len(slow.ch) > 0 {
			t.Fatal("an event came over the connection that is held")
		}
		release()
		other := slow.next()

		fillFrom(t, pub, "orders", stored+3, stored+100)
		stored, lost = stored+100, lost+88
		if err := errors.Join(one.Ack(), other.Ack()); err != nil {
			return err
		}
		for range 10 {
			if err := either(slow.taker, fast.taker).Ack(); err != nil {
				return err
			}
		}
		overtaken := other.Order < one.Order
		if n := seen.count(); n != lost {
			return fmt.Errorf("%d were lost, %d are counted; the slow delivery was overtaken: %v", lost, n, overtaken)
		}
		if overtaken {
			return nil
		}
	}
	return errors.New("no delivery was overtaken")
}

// What a member gave back, and what was removed before it came again, is lost as well.
func TestLossOfReturnedEvents(t *testing.T) {
	t.Parallel()
	seen := new(losses)
	b := open(t, Config{Server: natstest.Embed(t, t.TempDir()), Topics: []topics.Rule{{Pattern: "orders", MaxMsgs: 10}}, Observer: seen})
	g := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 3, From: FromEarliest, MaxAttempts: NeverGiveUp})
	fillFrom(t, b, "orders", 1, 3)
	d1, d2, d3 := g.next(), g.next(), g.next()
	fillFrom(t, b, "orders", 4, 100) // nothing is fetched: three are leased
	if err := d2.Nack("", 0); err != nil {
		t.Fatal(err)
	}
	_, _ = d1.Ack(), d3.Ack()
	// 2 was removed while it was leased; 4 to 90 were never given
	eventually(t, "the loss", func() bool { return seen.count() == 88 && g.sum() == 88 })
	same(t, "events", g.payloads(1), []string{"91"})
}

// A group that begins at the end has lost nothing of what was removed before it was made.
func TestNewGroupHasLostNothing(t *testing.T) {
	t.Parallel()
	for _, servers := range []int{1, 3} {
		t.Run(strconv.Itoa(servers), func(t *testing.T) {
			t.Parallel()
			seen := new(losses)
			b := open(t, Config{URL: natsServers(t, servers), Replicas: servers, Topics: []topics.Rule{{Pattern: "orders", MaxMsgs: 10}}, Observer: seen})
			fillFrom(t, b, "orders", 1, 100)
			g := takeTold(t, b, "orders", SubscribeOptions{})
			fillFrom(t, b, "orders", 101, 101)
			if got := g.payloads(1); got[0] != "101" || g.sum() != 0 || seen.count() != 0 {
				t.Errorf("began at %s; %d lost are reported and %d counted", got[0], g.sum(), seen.count())
			}
		})
	}
}

// A server that leads the consumer no longer may answer the request to make it, with the position
// 0.
func TestSightOfANewGroup(t *testing.T) {
	t.Parallel()
	info := &natsjs.ConsumerInfo{Config: natsjs.ConsumerConfig{OptStartSeq: 101}}
	s := newSight(&streams.Topic{Stream: new(streams.Stream)}, info)
	if g, found := s.arrived(&conn.DeliveryMeta{Order: 1, StreamSeq: 101, Delivered: 1}, 1); found {
		t.Errorf("the first event of the group comes after %d lost ones", g.lost)
	}
	if g, found := s.arrived(&conn.DeliveryMeta{Order: 2, StreamSeq: 104, Delivered: 1}, 2); !found || g.lost != 2 {
		t.Errorf("102 and 103 are missing, %d are lost", g.lost)
	}
}

// A server that leads the consumer since this moment may not know of the last deliveries: their
// numbers come again, with later events if theirs were removed.
func TestSightOfForgottenDeliveries(t *testing.T) {
	t.Parallel()
	for _, again := range []uint64{11, 10, 9, 8} {
		s := newSight(&streams.Topic{Stream: new(streams.Stream)}, new(natsjs.ConsumerInfo))
		for n := uint64(1); n <= 10; n++ {
			s.arrived(&conn.DeliveryMeta{Order: n, StreamSeq: n, Delivered: 1}, int64(n))
		}
		s.arrived(&conn.DeliveryMeta{Order: 11, StreamSeq: 5, Delivered: 2}, 11)
		found := uint64(0)
		for n := range uint64(5) { // from 21 on
			if g, ok := s.arrived(&conn.DeliveryMeta{Order: again + n, StreamSeq: 21 + n, Delivered: 1}, int64(12+n)); ok {
				found += g.lost
			}
		}
		if found != 10 {
			t.Errorf("11 to 20 are missing, %d are lost; the leader numbers from %d", found, again)
		}
	}
}

// What is deleted singly, or purged by an operator, was not lost.
func TestHolesAreNoLoss(t *testing.T) {
	t.Parallel()
	seen := new(losses)
	b := open(t, Config{Observer: seen})
	g := takeTold(t, b, "orders", SubscribeOptions{MaxInFlight: 1, From: FromEarliest})
	fillFrom(t, b, "orders", 1, 20)
	d := g.next()
	s, err := b.conn.JS.Stream(t.Context(), "orders")
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{2, 3, 7} {
		if err := s.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	_ = d.Ack()
	if got := g.payloads(16); got[0] != "4" || got[15] != "20" || g.sum() != 0 || seen.count() != 0 {
		t.Errorf("got %v, %d lost are reported", got, g.sum())
	}
}
