package jetstream

import (
	"errors"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
)

// Whoever deletes a group ends its members on all hubs, and leaves nothing of it. A group of that
// name is a new one.
func TestDeletingAGroupEndsItsMembers(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	for _, ttl := range []time.Duration{0, memoryTTL} {
		t.Run("TTL "+ttl.String(), func(t *testing.T) {
			one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
			topic := "ends." + ttl.String()
			publishAll(t, one, topic, numbers(4)...)
			told := make(chan string, 10)
			opts := SubscribeOptions{From: FromEarliest, GroupTTL: ttl, MaxInFlight: 1, BatchSize: 1, CountFor: "jwt:eve", OnDeleted: func(topic string) { told <- topic }}
			a, b := take(t, one, topic, "g", opts), take(t, two, topic, "g", opts)
			held := a.next()
			b.next()
			if err := two.Group(topic, "g").Delete(t.Context()); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				select {
				case got := <-told:
					if got != topic {
						t.Errorf("told of %s", got)
					}
				case <-time.After(wait):
					t.Fatal("a member was not told")
				}
			}
			if err := held.Ack(); !errors.Is(err, event.ErrNotLeased) {
				t.Errorf("the lease of a deleted group: %v", err)
			}
			for _, k := range []*taker{a, b} {
				if err := k.sub.Stop(t.Context()); err != nil {
					t.Errorf("stopping a member: %v", err)
				}
			}
			if _, err := one.Group(topic, "g").Cursor(t.Context()); !errors.Is(err, event.ErrNotFound) {
				t.Errorf("the cursor of a deleted group: %v", err)
			}
			if err := one.Group(topic, "g").Delete(t.Context()); !errors.Is(err, event.ErrNotFound) {
				t.Errorf("deleting it again: %v", err)
			}
			for _, bucket := range []string{records.MarksBucket, native.AttemptsBucket, records.MakersBucket} {
				s, err := one.conn.JS.Stream(t.Context(), "KV_"+bucket)
				if err != nil || s.CachedInfo().State.Msgs != 0 {
					t.Errorf("bucket %s holds %d, %v", bucket, s.CachedInfo().State.Msgs, err)
				}
			}
			// the same name, at its own position and with attempts from 1
			again := take(t, one, topic, "g", SubscribeOptions{From: FromEarliest})
			for i := range 4 {
				d := again.next()
				if string(d.Event.Payload) != numbers(4)[i] || d.Attempt != 1 {
					t.Errorf("event %d is %s, attempt %d", i, d.Event.Payload, d.Attempt)
				}
				if err := d.Ack(); err != nil {
					t.Error(err)
				}
			}
			if err := one.records.SweepGenerations(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			again.quiet(10 * time.Millisecond)
		})
	}
}

// A member whose hub does not hear of the deletion ends when it comes again, also when there is a
// new group of that name by then.
func TestADeletionThatWasNotHeard(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "deaf", "1")
	k := take(t, b, "deaf", "g", SubscribeOptions{From: FromEarliest})
	k.payloads(1)
	was := k.sub.members[0].group
	rejoin := func() error {
		_, err := b.join(t.Context(), &joining{topic: "deaf", group: "g", was: was, gone: true, ends: true})
		return err
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.Group("deaf", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := rejoin(); !errors.Is(err, errGroupDeleted) {
		t.Errorf("after the deletion: %v", err)
	}
	take(t, b, "deaf", "g", SubscribeOptions{})
	if err := rejoin(); !errors.Is(err, errGroupDeleted) {
		t.Errorf("after a new one was made: %v", err)
	}
	if err := b.Group("deaf", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	if err := rejoin(); !errors.Is(err, errGroupDeleted) {
		t.Errorf("after the new one was moved: %v", err)
	}
}

// A member that does not end makes the group again, and goes on where it was.
func TestAMemberThatDoesNotEndMakesTheGroupAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "own", numbers(3)...)
	k := take(t, b, "own", "projector", SubscribeOptions{From: FromEarliest})
	k.payloads(3)
	if err := b.Group("own", "projector").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "own", "3")
	for got := k.payloads(1)[0]; got != "3"; got = k.payloads(1)[0] {
		if got < "0" || got > "2" {
			t.Fatalf("got %s", got)
		}
	}
}

// What a deletion leaves behind that its hub did not finish, the next one and the sweeper remove.
func TestADeletionThatWasCutOff(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "cut", "1")
	for _, finish := range []func() error{
		func() error { return b.Group("cut", "g").Delete(t.Context()) },
		func() error { return b.records.SweepStream(t.Context(), b.streams.Known("cut").Stream, 0) },
	} {
		k := take(t, b, "cut", "g", SubscribeOptions{From: FromEarliest})
		k.payloads(1)
		if err := k.sub.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
		topic := b.streams.Known("cut")
		ptr, err := b.records.Generation(t.Context(), topic, "g")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.records.Swap(t.Context(), topic, "g", ptr, records.Generation{Generation: native.Generation{Number: ptr.Number, Consumer: ptr.Consumer, Deleted: true}}); err != nil {
			t.Fatal(err)
		}
		if _, err := b.Group("cut", "g").Backlog(t.Context()); !errors.Is(err, event.ErrNotFound) {
			t.Errorf("the group is still there: %v", err)
		}
		if err := finish(); err != nil && !errors.Is(err, event.ErrNotFound) {
			t.Fatal(err)
		}
		if s, err := b.conn.JS.Stream(t.Context(), "cut"); err != nil || s.CachedInfo().State.Consumers != 0 {
			t.Errorf("%d consumers are left, %v", s.CachedInfo().State.Consumers, err)
		}
	}
}
