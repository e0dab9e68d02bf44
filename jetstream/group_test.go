package jetstream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/native"
	"eventhub/jetstream/topics"
)

func TestGroupStarts(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	after := func(id func([]event.Receipt) string) func([]*event.Event, []event.Receipt) SubscribeOptions {
		return func(_ []*event.Event, r []event.Receipt) SubscribeOptions {
			return SubscribeOptions{From: FromAfterID(id(r))}
		}
	}
	since := func(ts func([]*event.Event) int64) func([]*event.Event, []event.Receipt) SubscribeOptions {
		return func(e []*event.Event, _ []event.Receipt) SubscribeOptions {
			return SubscribeOptions{From: FromTime(time.UnixMilli(ts(e)))}
		}
	}
	for name, c := range map[string]struct {
		opts func([]*event.Event, []event.Receipt) SubscribeOptions
		want []string
	}{
		"latest":         {func([]*event.Event, []event.Receipt) SubscribeOptions { return SubscribeOptions{} }, nil},
		"earliest":       {func([]*event.Event, []event.Receipt) SubscribeOptions { return SubscribeOptions{From: FromEarliest} }, numbers(5)},
		"after-middle":   {after(func(r []event.Receipt) string { return r[2].ID }), []string{"3", "4"}},
		"after-last":     {after(func(r []event.Receipt) string { return r[4].ID }), nil},
		"after-sequence": {after(func(r []event.Receipt) string { return r[1].Stream + "@2" }), []string{"2", "3", "4"}},
		// Older than the first event that is left: begins there.
		"after-older": {after(func([]event.Receipt) string { return "01000000-0000-7000-8000-000000000000" }), numbers(5)},
		"ts-zero":     {since(func([]*event.Event) int64 { return 0 }), numbers(5)},
		"ts-first":    {since(func(e []*event.Event) int64 { return e[0].StoredAt / 1e6 }), numbers(5)},
		"ts-behind":   {since(func(e []*event.Event) int64 { return e[4].StoredAt/1e6 + 1 }), nil},
		"ts-future":   {since(func([]*event.Event) int64 { return time.Now().Add(time.Hour).UnixMilli() }), nil},
	} {
		t.Run(name, func(t *testing.T) {
			topic := "start." + name
			receipts := publishAll(t, b, topic, numbers(5)...)
			var events []*event.Event
			if err := b.History(topic).Scan(t.Context(), ScanOptions{}, func(e *event.Event) error { events = append(events, e); return nil }); err != nil {
				t.Fatal(err)
			}
			k := take(t, b, topic, "g", c.opts(events, receipts))
			eventually(t, "the next millisecond", func() bool { return time.Now().UnixMilli() > events[4].StoredAt/1e6 })
			publishAll(t, b, topic, "marker")
			if got, want := k.payloads(len(c.want)+1), append(slices.Clone(c.want), "marker"); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
			// A group that exists ignores where to start, a bad id included.
			again := take(t, b, topic, "g", SubscribeOptions{From: FromAfterID("nobody")})
			again.quiet(10 * time.Millisecond)
		})
	}
	publishAll(t, b, "start", numbers(5)...)
	for _, id := range []string{"nobody", "start@99", "other@1", "start@0", "0fffffff-0000-7000-8000-000000000000"} {
		_, err := b.Subscribe(t.Context(), "start", "new", SubscribeOptions{From: FromAfterID(id)}, ignore)
		if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeUnknownID {
			t.Errorf("%s: got %v", id, err)
		}
	}
}

func TestTwoHubsMakeOneGroupAtOnce(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, one, "race", numbers(10)...)
	for round := range 20 {
		group := "g" + strconv.Itoa(round)
		starts := make([]*membership, 2)
		var wg sync.WaitGroup
		for i, b := range []*Bus{one, two} {
			wg.Go(func() {
				at := []Position{FromEarliest, FromLatest}[i]
				g, err := b.join(t.Context(), &joining{topic: "race", group: group, start: func(ctx context.Context, topic *streams.Topic, state natsjs.StreamState) (uint64, error) {
					return b.reads.Resolve(ctx, topic, at.start(), state, "")
				}})
				if err != nil {
					t.Error(err)
					return
				}
				starts[i] = g
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
		if starts[0].consumer != starts[1].consumer {
			t.Fatalf("two groups: %s and %s", starts[0].consumer, starts[1].consumer)
		}
		// Whoever was first decided for both: all that is stored, or none of it.
		info, err := one.records.Consumer(t.Context(), one.streams.Known("race"), starts[0].consumer)
		if err != nil {
			t.Fatal(err)
		}
		if n := info.NumPending; n != 0 && n != uint64(10+round) {
			t.Fatalf("round %d: %d events wait for the group", round, n)
		}
		a := take(t, one, "race", group, SubscribeOptions{})
		c := take(t, two, "race", group, SubscribeOptions{})
		publishAll(t, one, "race", "end"+group)
		for range info.NumPending + 1 {
			if err := either(a, c).Ack(); err != nil {
				t.Fatal(err)
			}
		}
		a.quiet(time.Millisecond)
		c.quiet(time.Millisecond)
		_ = a.sub.Stop(context.Background())
		_ = c.sub.Stop(context.Background())
	}
}

type membership = group

func TestSetCursorUnderLiveMembers(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	const n = 20
	receipts := publishAll(t, one, "seek", numbers(n)...)
	a := take(t, one, "seek", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: n / 2})
	c := take(t, two, "seek", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: n / 2})
	var stale []*Delivery
	for range n / 2 {
		stale = append(stale, a.next(), c.next())
	}
	if err := two.Group("seek", "g").Seek(t.Context(), FromAfterID(receipts[9].ID)); err != nil {
		t.Fatal(err)
	}
	// Acks of deliveries from before the seek, some of events that come again after it.
	for _, d := range stale {
		_ = d.Ack()
	}
	// What came before a seek was answered may be given back unbegun.
	next := func(otherwise string) *Delivery {
		t.Helper()
		for deadline := time.After(wait); ; {
			var h *Held
			select {
			case h = <-a.ch:
			case h = <-c.ch:
			case <-deadline:
				t.Fatal(otherwise)
			}
			if d, ok := h.Begin(); ok {
				return d
			}
		}
	}
	seen := map[string]int{}
	for range n / 2 {
		d := next(fmt.Sprintf("after the seek only %v came", seen))
		seen[string(d.Event.Payload)]++
		if d.Attempt != 1 {
			t.Errorf("%s has attempt %d in the new generation", d.Event.Payload, d.Attempt)
		}
		stale = append(stale, d)
	}
	for i := n / 2; i < n; i++ {
		if seen[strconv.Itoa(i)] != 1 {
			t.Fatalf("after the seek: %v", seen)
		}
	}
	// None of the stale acks has settled a new delivery.
	cur, err := one.Group("seek", "g").Cursor(t.Context())
	if err != nil || cur.LastID != "" {
		t.Errorf("something is settled already: %+v, %v", cur, err)
	}
	for _, d := range stale[n:] {
		if err := d.Ack(); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "the ack floor", func() bool {
		cur, err := one.Group("seek", "g").Cursor(t.Context())
		return err == nil && cur.LastID == receipts[n-1].ID
	})
	// Forward past the end is the end: nothing that is stored later is skipped.
	three := open(t, Config{URL: url, moveWait: briefly})
	if err := three.Group("seek", "g").Seek(t.Context(), FromTime(time.Now().Add(time.Hour))); err != nil {
		t.Fatal(err)
	}
	publishAll(t, two, "seek", "next")
	if got := string(next("an event stored after the seek was skipped").Event.Payload); got != "next" {
		t.Errorf("got %s", got)
	}
}

// While a group is moved, its members on two hubs begin everything that comes at once. After the
// move is answered, no lease of an event before the new position begins, and each event behind it
// comes.
func TestNoLeaseFromBeforeAMoveBeginsAfterIt(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	const n, half = 60, 30
	receipts := publishAll(t, one, "seek", numbers(n)...)
	var answered atomic.Bool
	var mu sync.Mutex
	begun := make(map[int]int) // after the answer: the lowest attempt of each event
	early := 0                 // leases before the answer
	var wg sync.WaitGroup
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop); wg.Wait() })
	t.Cleanup(end)
	for _, b := range []*Bus{one, two} {
		k := take(t, b, "seek", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: n, MaxAttempts: NeverGiveUp})
		wg.Go(func() {
			for {
				select {
				case h := <-k.ch:
					after := answered.Load()
					d, ok := h.Begin()
					if !ok {
						continue
					}
					at, _ := strconv.Atoi(string(d.Event.Payload))
					mu.Lock()
					if !after {
						early++
					} else if had, known := begun[at]; !known || d.Attempt < had {
						begun[at] = d.Attempt
					}
					mu.Unlock()
					_ = d.Nack("again", 20*time.Millisecond) // one from before finds no lease
				case <-stop:
					return
				}
			}
		})
	}
	eventually(t, "leases before the move", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return early > n
	})
	if err := two.Group("seek", "g").Seek(t.Context(), FromAfterID(receipts[half-1].ID)); err != nil {
		t.Fatal(err)
	}
	answered.Store(true)
	eventually(t, "all events behind the position", func() bool {
		mu.Lock()
		defer mu.Unlock()
		behind := 0
		for at := range begun {
			if at >= half {
				behind++
			}
		}
		return behind == n-half
	})
	<-time.After(time.Second) // what is on its way
	end()
	for at, attempt := range begun {
		if at < half {
			t.Errorf("event %d, from before the position, was leased after the move was answered, in attempt %d", at, attempt)
		}
	}
}

func TestSeeksAtOnceLeaveOneConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "seeks", numbers(5)...)
	k := take(t, b, "seeks", "g", SubscribeOptions{From: FromEarliest})
	k.payloads(5)
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if err := b.Group("seeks", "g").Seek(t.Context(), FromEarliest); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[string]bool{}
	for len(seen) < 5 {
		d := k.next()
		seen[string(d.Event.Payload)] = true
		_ = d.Ack()
	}
	topic := b.streams.Known("seeks")
	eventually(t, "one consumer", func() bool {
		s, err := b.conn.JS.Stream(t.Context(), topic.Stream.Name)
		return err == nil && s.CachedInfo().State.Consumers == 1
	})
}

func TestSweeperRemovesWhatNoPointerNames(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "sweep", "1")
	topic := b.streams.Known("sweep")
	if err := b.Group("sweep", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, "sweep", "g", SubscribeOptions{})
	take(t, b, "sweep", "plain", SubscribeOptions{})
	left := records.Generation{Generation: native.Generation{Number: 7}}.Next(topic, "g")
	for _, name := range []string{left.Consumer, topic.ConsumerName("g")} {
		if _, err := b.createConsumer(t.Context(), topic, "g", name, groupStart{seq: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.records.SweepStream(t.Context(), topic.Stream, 0); err != nil {
		t.Fatal(err)
	}
	s, err := b.conn.JS.Stream(t.Context(), topic.Stream.Name)
	if err != nil || s.CachedInfo().State.Consumers != 2 {
		t.Errorf("%d consumers are left, %v", s.CachedInfo().State.Consumers, err)
	}
	k.payloads(1)
}

func TestAGroupWhoseConsumerWasDeletedGoesOn(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "del", numbers(10)...)
	k := take(t, b, "del", "g", SubscribeOptions{From: FromEarliest})
	k.payloads(3)
	held := k.next() // 3
	if err := b.conn.JS.DeleteConsumer(t.Context(), "del", "g"); err != nil {
		t.Fatal(err)
	}
	d := k.next()
	for string(d.Event.Payload) != "3" { // what was on its way
		d = k.next()
	}
	if held.Ack() == nil {
		t.Error("a lease of the deleted consumer is still valid")
	}
	_ = d.Ack()
	if got := k.payloads(6); !slices.Equal(got, numbers(10)[4:]) {
		t.Errorf("got %q", got)
	}
}

func TestAStreamMadeAnewIsReadFromItsStart(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "anew", numbers(3)...)
	if err := b.Group("anew", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, "anew", "g", SubscribeOptions{})
	k.payloads(3)
	if err := b.conn.JS.DeleteStream(t.Context(), "anew"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a new stream", func() bool {
		_, err := b.Publish(t.Context(), "anew", []byte("fresh"), PublishOptions{ID: "one"})
		return err == nil
	})
	if got := k.payloads(1); got[0] != "fresh" {
		t.Errorf("got %q", got)
	}
}

func TestGroupTTL(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "tab", "1")
	k := take(t, b, "tab", "browser", SubscribeOptions{GroupTTL: time.Second, From: FromEarliest})
	k.payloads(1)
	if _, err := b.Group("tab", "browser").Cursor(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group disappears", func() bool {
		_, err := b.Group("tab", "browser").Cursor(t.Context())
		return errors.Is(err, event.ErrNotFound)
	})
}

func TestGroupsOfAFamilyAreApart(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Topics: []topics.Rule{{Pattern: "user.*.events", Family: "users"}}})
	for i := range 3 {
		publishAll(t, b, fmt.Sprintf("user.%d.events", i), fmt.Sprintf("of %d", i))
	}
	for i := range 3 {
		topic := fmt.Sprintf("user.%d.events", i)
		k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest})
		if got := k.payloads(1); got[0] != fmt.Sprintf("of %d", i) {
			t.Errorf("%s: got %q", topic, got)
		}
		k.quiet(20 * time.Millisecond)
		if n, err := scanned(t, b, topic); n != 1 || err != nil {
			t.Errorf("%s: %d events, %v", topic, n, err)
		}
	}
}

func scanned(t *testing.T, b *Bus, topic string) (n int, err error) {
	t.Helper()
	err = b.History(topic).Scan(t.Context(), ScanOptions{}, func(*event.Event) error { n++; return nil })
	return n, err
}

func TestASeekOnAStreamMadeAnewCountsOnEveryHub(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, one, "remade", "old")
	if err := two.conn.JS.DeleteStream(t.Context(), "remade"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a new stream", func() bool {
		_, err := two.Publish(t.Context(), "remade", []byte("0"), PublishOptions{ID: "zero"})
		return err == nil
	})
	if err := two.Group("remade", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	a := take(t, one, "remade", "g", SubscribeOptions{}) // knows the old stream
	c := take(t, two, "remade", "g", SubscribeOptions{})
	publishAll(t, two, "remade", numbers(20)[1:]...)
	seen := map[string]int{}
	for range 20 {
		d := either(a, c)
		seen[string(d.Event.Payload)]++
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) != 20 {
		t.Errorf("got %v", seen)
	}
	a.quiet(20 * time.Millisecond)
	c.quiet(20 * time.Millisecond)
}

func TestAFanInThatCannotBeMadeLeavesNoGroup(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	r := publishAll(t, b, "fan.one", "0", "1")
	publishAll(t, b, "fan.two", "a")
	_, err := b.Subscribe(t.Context(), "fan.one", "g", SubscribeOptions{From: FromAfterID("nobody"), Topics: []string{"fan.two"}}, ignore)
	if e, ok := errors.AsType[*event.Error](err); !ok || e.Code != event.CodeUnknownID {
		t.Errorf("got %v", err)
	}
	for _, topic := range []string{"fan.one", "fan.two"} {
		if _, err := b.Group(topic, "g").Cursor(t.Context()); !errors.Is(err, event.ErrNotFound) {
			t.Errorf("%s has the group: %v", topic, err)
		}
	}
	// The id is of one topic; on the other the group starts at what was stored since.
	k := take(t, b, "fan.one", "g", SubscribeOptions{From: FromAfterID(r[0].ID), Topics: []string{"fan.two"}})
	got := k.payloads(2)
	slices.Sort(got)
	if !slices.Equal(got, []string{"1", "a"}) {
		t.Errorf("got %q", got)
	}
}

// A seek counts although the member that is away has seen more of the group before.
func TestASeekOutlivesItsConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "moved", numbers(20)...)
	k := take(t, b, "moved", "g", SubscribeOptions{From: FromEarliest})
	k.payloads(20)
	if err := k.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Group("moved", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	ptr, err := b.records.Generation(t.Context(), b.streams.Known("moved"), "g")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the member is on the new consumer", func() bool {
		k.sub.mu.Lock()
		defer k.sub.mu.Unlock()
		return k.sub.members[0].group.consumer == ptr.Consumer
	})
	if err := b.conn.JS.DeleteConsumer(t.Context(), "moved", ptr.Consumer); err != nil {
		t.Fatal(err)
	}
	k.sub.Resume()
	if got := k.payloads(20); !slices.Equal(got, numbers(20)) {
		t.Errorf("got %q", got)
	}
}

func TestAMemberWithoutTTLKeepsAGroupThatHasOne(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: time.Second})
	publishAll(t, b, "lent", "1")
	a := take(t, b, "lent", "g", SubscribeOptions{GroupTTL: time.Second})
	k := take(t, b, "lent", "g", SubscribeOptions{})
	if err := k.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := a.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	select { // longer than the TTL and what the server adds to it
	case <-time.After(4 * time.Second):
	case <-t.Context().Done():
	}
	if _, err := b.Group("lent", "g").Cursor(t.Context()); err != nil {
		t.Errorf("the group is gone: %v", err)
	}
}

// The event of afterId is stored right after one of the added topic, in the same millisecond.
func TestAddingATopicToAGroupThatExists(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	old := publishAll(t, b, "add.c", "old")[0]
	topic, err := b.streams.Existing(t.Context(), "add.c")
	if err != nil {
		t.Fatal(err)
	}
	e, err := b.reads.BySequence(t.Context(), topic, old.Sequence)
	if err != nil {
		t.Fatal(err)
	}
	id := uuid.Must(uuid.NewV7())
	copy(id[:6], binary.BigEndian.AppendUint64(nil, uint64(e.StoredAt/1e6))[2:])
	if _, err := b.Publish(t.Context(), "add.a", []byte("0"), PublishOptions{ID: id.String()}); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "add.a", "1")
	opts := SubscribeOptions{From: FromAfterID(id.String())}
	k := take(t, b, "add.a", "g", opts)
	k.payloads(1)
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	opts.Topics = []string{"add.c"}
	k = take(t, b, "add.a", "g", opts)
	opts.Topics = []string{"add.a"}
	both := take(t, b, "add.c", "both", opts)
	publishAll(t, b, "add.c", "new")
	if got := k.payloads(1); got[0] != "new" {
		t.Errorf("got %q", got)
	}
	if got := both.payloads(2); !slices.Contains(got, "1") || !slices.Contains(got, "new") {
		t.Errorf("a new group of both topics got %q", got)
	}
}

func TestReadsMakeNothingAndCountForNothing(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	full, b := open(t, Config{URL: url}), open(t, Config{URL: url, Limits: Limits{Topics: 2}})
	for _, topic := range []string{"r1", "r2", "r3"} {
		publishAll(t, full, topic, "1")
		if n, err := scanned(t, b, topic); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	publishAll(t, b, "r3", "2")
	if err := full.conn.JS.DeleteStream(t.Context(), "r3"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Group("r3", "g").Cursor(t.Context()); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := full.conn.FindStream(t.Context(), "r3"); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("a read made the stream anew: %v", err)
	}
}
