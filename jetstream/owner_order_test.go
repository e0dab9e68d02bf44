package jetstream

import (
	"context"
	"fmt"
	"reflect"
	"strconv"
	"testing"
	"time"

	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/ordered"
)

// An event that was put back comes before those of its key that wait when the owner of the group
// receives it, and after the one that a member has.
func TestPutBackComesBeforeWhatWaits(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	a, b := open(t, Config{URL: url, Connections: 1}), open(t, Config{URL: url, Connections: 1})
	for i, at := range []*Bus{a, b} {
		topic := fmt.Sprint("putback", i)
		opts := SubscribeOptions{From: FromEarliest, OrderByKey: true, MaxAttempts: 1}
		paused := opts
		paused.Paused = true
		first := take(t, a, topic, "g", paused) // so that a owns the group
		o := first.sub.members[0].group.ordering
		var w *owner
		eventually(t, "the group has an owner", func() bool {
			o.mu.Lock()
			defer o.mu.Unlock()
			w = o.own
			return w != nil
		})
		k := take(t, at, topic, "g", opts)
		publishOne := func(n int) {
			if _, err := a.Publish(t.Context(), topic, []byte(strconv.Itoa(n)), PublishOptions{Key: "a"}); err != nil {
				t.Fatal(err)
			}
		}
		publishOne(1)
		publishOne(2)
		if err := k.next().Nack("poison", 0); err != nil {
			t.Fatal(err)
		}
		has := k.next()
		publishOne(3)
		eventually(t, "the dead letter is put back", func() bool {
			got, err := a.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: topic}, RedriveOptions{})
			return err == nil && got.Done == 1
		})
		eventually(t, "the owner has received what was put back, and what waits", func() bool {
			o.mu.Lock()
			defer o.mu.Unlock()
			mine, others := 0, 0
			for _, item := range w.itemsForTest() {
				if item&mainPlace == 0 {
					mine++
				} else {
					others++
				}
			}
			return mine == 1 && others == 2
		})
		for _, want := range []string{"2", "1", "3"} {
			if string(has.Event.Payload) != want {
				t.Fatalf("event %s came, and not event %s", has.Event.Payload, want)
			}
			if err := has.Ack(); err != nil {
				t.Fatal(err)
			}
			if want != "3" {
				has = k.next()
			}
		}
	}
}

// itemsForTest returns the places of all events that the owner has or waits for. The ordering's mu
// is held.
func (w *owner) itemsForTest() []uint64 {
	var places []uint64
	w.locks.Each(func(i *ordered.Item[*Delivery]) { places = append(places, i.Pos()) })
	return places
}

// The owner keeps nothing of an event that it has lent but its place. If nobody has had the event,
// the next member gets it whole.
func TestLentEventsAreReadAgain(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	a, b := open(t, Config{URL: url, Connections: 1}), open(t, Config{URL: url, Connections: 1})
	for i, at := range []*Bus{a, b} {
		topic := fmt.Sprint("whole", i)
		opts := SubscribeOptions{From: FromEarliest, OrderByKey: true}
		stays := take(t, a, topic, "g", SubscribeOptions{From: FromEarliest, OrderByKey: true, Paused: true})
		o := stays.sub.members[0].group.ordering
		eventually(t, "the first hub owns the group", func() bool {
			o.mu.Lock()
			defer o.mu.Unlock()
			return o.own != nil
		})
		k := take(t, at, topic, "g", opts)
		sent := PublishOptions{ID: "x", Key: "a", SID: "s", Headers: map[string]string{"H": "1"}, Tags: []string{"t"}, CausedBy: []string{"c"}, TS: 7}
		if _, err := a.Publish(t.Context(), topic, []byte("payload"), sent); err != nil {
			t.Fatal(err)
		}
		var h *Held
		select {
		case h = <-k.ch:
		case <-time.After(wait):
			t.Fatal("no event came")
		}
		was := h.Event
		o.mu.Lock()
		s := o.own.sub
		o.mu.Unlock()
		s.mu.Lock()
		if len(s.out) != 1 || s.out[0].Event.Payload != nil || s.heldBytes != 0 {
			t.Errorf("the owner holds %d events and %d bytes", len(s.out), s.heldBytes)
		}
		s.mu.Unlock()
		if err := k.sub.Stop(context.Background()); err != nil {
			t.Fatal(err)
		}
		e := take(t, at, topic, "g", opts).next()
		if !reflect.DeepEqual(e.Event, was) || string(e.Event.Payload) != "payload" || e.Attempt != 1 {
			t.Errorf("attempt %d: %+v instead of %+v", e.Attempt, e.Event, was)
		}
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

// An event that was put back is read again, too, and is what it was before.
func TestPutBackEventsAreReadAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	opts := SubscribeOptions{From: FromEarliest, OrderByKey: true, MaxAttempts: 1}
	k := take(t, b, "again", "g", opts)
	// A member that stays keeps the owner.
	_ = take(t, b, "again", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true, Paused: true})
	if _, err := b.Publish(t.Context(), "again", []byte("payload"), PublishOptions{Key: "a", Tags: []string{"t"}}); err != nil {
		t.Fatal(err)
	}
	d := k.next()
	was := d.Event
	if err := d.Nack("poison", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the dead letter is put back", func() bool {
		got, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: "again"}, RedriveOptions{})
		return err == nil && got.Done == 1
	})
	select {
	case <-k.ch:
	case <-time.After(wait):
		t.Fatal("the event did not come again")
	}
	if err := k.sub.Stop(context.Background()); err != nil {
		t.Fatal(err)
	}
	e := take(t, b, "again", "g", opts).next()
	if !reflect.DeepEqual(e.Event, was) {
		t.Errorf("%+v instead of %+v", e.Event, was)
	}
	if err := e.Ack(); err != nil {
		t.Fatal(err)
	}
}

// Events that were removed from the stream while they were leased, and were then refused, never
// come again. Their keys go on, however many there are.
func TestPurgedEventsFreeTheirKeys(t *testing.T) {
	t.Parallel()
	const keys = 400
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	k := take(t, b, "purged", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true, MaxInFlight: keys})
	publishOne := func() {
		for n := range keys {
			if _, err := b.Publish(t.Context(), "purged", []byte("1"), PublishOptions{Key: fmt.Sprint("k", n)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	publishOne()
	has := make([]*Delivery, keys)
	for i := range has {
		has[i] = k.next()
	}
	if _, err := b.Admin().Topic("purged").Purge(t.Context(), PurgeOptions{All: true}); err != nil {
		t.Fatal(err)
	}
	for _, e := range has {
		if err := e.Nack("again", 0); err != nil {
			t.Fatal(err)
		}
	}
	publishOne()
	for range keys {
		if err := k.next().Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

// Events that the owner has to read again, and that were removed meanwhile, cost their member none
// of what it has asked for.
func TestPurgedEventsCostNoCredit(t *testing.T) {
	t.Parallel()
	// Of a key's events beyond 1,000, the owner keeps only the places.
	const events, most = 1100, 2
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishOne := func(key string) {
		if _, err := b.Publish(t.Context(), "credit", []byte(key), PublishOptions{Key: key}); err != nil {
			t.Fatal(err)
		}
	}
	for range events {
		publishOne("a")
	}
	k := take(t, b, "credit", "g", SubscribeOptions{From: FromEarliest, OrderByKey: true, MaxInFlight: most, BatchSize: most})
	e := k.next()
	w := keeperOf(t, k)
	eventually(t, "the owner has all events", func() bool {
		w.o.mu.Lock()
		defer w.o.mu.Unlock()
		return w.locks.Len() == events
	})
	if _, err := b.Admin().Topic("credit").Purge(t.Context(), PurgeOptions{All: true}); err != nil {
		t.Fatal(err)
	}
	publishOne("b")
	publishOne("a")
	for got := map[string]int{}; ; e = k.next() {
		key := string(e.Event.Payload)
		got[key]++
		if err := e.Ack(); err != nil {
			t.Fatal(err)
		}
		if got["b"] == 1 && e.Event.Key == "a" && e.Event.Sequence > events {
			break // the last one
		}
	}
}

// Events that come after the server has counted what is not settled do not make up for older ones
// that are missing: one of the same key would be lent too early.
func TestNewEventsAreNoneOfThoseThatAreMissing(t *testing.T) {
	t.Parallel()
	w := &owner{o: &orderedGroup{}, locks: ordered.New[*Delivery](1)}
	for _, seq := range []uint64{3, 5, 6} {
		w.locks.Arrive(mainPlace|seq, "a", &Delivery{})
	}
	gone, _, _ := w.locks.Arrive(mainPlace|2, "a", &Delivery{})
	w.locks.Await(gone)
	w.locks.Arrive(1, "a", &Delivery{}) // put back
	for newest, want := range []int{0, 0, 0, 1, 1, 2, 3, 3} {
		if n := w.arrived(uint64(newest)); n != want {
			t.Errorf("up to %d, %d events are here, not %d", newest, n, want)
		}
	}
}

// A place that goes while an event is on its way to it leaves the event to others: nothing else
// would end its hold of the key, and of the slot.
func TestAPlaceLeavesWhatIsOnItsWay(t *testing.T) {
	t.Parallel()
	w := &owner{o: &orderedGroup{}, locks: ordered.New[*Delivery](1)}
	p := &spot{id: "m", open: true, credit: 1}
	w.seats = []*spot{p}
	w.locks.SetMembers([]string{p.id})
	w.locks.Arrive(mainPlace|1, "a", &Delivery{})
	out := w.takeLocked(1)
	if len(out) != 1 {
		t.Fatalf("%d events were taken", len(out))
	}
	w.left(p)
	if len(w.leaving) != 1 || len(w.leaving[0].held) != 1 || w.leaving[0].held[0] != out[0].loan {
		t.Errorf("the place leaves %+v", w.leaving)
	}
}

// The delay of a refused event outlives its owner in full: the note of it, in milliseconds, says no
// earlier time.
func TestTheNoteOfADelayIsNotTooEarly(t *testing.T) {
	t.Parallel()
	b := &Bus{core: &core{clock: conn.NewClock(time.Now, time.Hour)}}
	b.limits.AttemptsKnown = 10
	w := &owner{bus: b}
	for range 10 {
		d := &Delivery{m: &member{sub: &Subscription{}}, group: &group{}}
		before := time.Now()
		w.noteDelay(d, minDelay-1)
		if noted := time.UnixMilli(d.until); noted.Before(before.Add(minDelay - 1)) {
			t.Fatalf("the event waits until %v, which is %v too early", noted, before.Add(minDelay-1).Sub(noted))
		}
	}
}
