package facade_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/sdk/go/wire"
)

// seekRounds is larger for the long form.
var seekRounds = flag.Int("seeks.rounds", 1, "how often four seeks race")

// taker is a member of a group through the Go API.
type taker struct {
	t   *testing.T
	sub *jetstream.Subscription
	out chan *jetstream.Delivery
}

// join makes a member whose leases begin as they arrive. All members of a test share out.
func join(t *testing.T, bus *jetstream.Bus, topic string, opts jetstream.SubscribeOptions, out chan *jetstream.Delivery) *taker {
	t.Helper()
	sub, err := bus.Subscribe(t.Context(), topic, "g", opts, func(h *jetstream.Held) {
		if d, ok := h.Begin(); ok {
			out <- d
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	m := &taker{t: t, sub: sub, out: out}
	t.Cleanup(m.stop)
	return m
}

func (m *taker) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	if err := m.sub.Stop(ctx); err != nil {
		m.t.Error(err)
	}
}

func take(t *testing.T, out chan *jetstream.Delivery, n int) []*jetstream.Delivery {
	t.Helper()
	var got []*jetstream.Delivery
	for range n {
		select {
		case d := <-out:
			got = append(got, d)
		case <-time.After(waitLimit):
			t.Fatalf("%d of %d deliveries came", len(got), n)
		}
	}
	return got
}

// numbers are the payloads in order, with the attempt of each where it is not 1.
func numbers(got []*jetstream.Delivery) string {
	var texts []string
	for _, d := range got {
		text := string(d.Event.Payload)
		if d.Attempt != 1 {
			text += fmt.Sprintf("(%d)", d.Attempt)
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return strings.Join(texts, " ")
}

// Seek moves a group with live members on two hubs, and fences: nothing that was leased before
// counts after.
func TestSetCursorUnderLiveMembers(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	for _, test := range []struct {
		name string
		to   func(ids []string) jetstream.Position
		want string
	}{
		{
			"back to the start", func([]string) jetstream.Position { return jetstream.FromEarliest },
			"00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 99",
		},
		{"back to an id", func(ids []string) jetstream.Position {
			return jetstream.FromAfterID(ids[14])
		}, "15 16 17 18 19 99"},
		{"to where it is", func(ids []string) jetstream.Position {
			return jetstream.FromAfterID(ids[19])
		}, "99"},
		{"to the end", func([]string) jetstream.Position { return jetstream.FromLatest }, "99"},
		{"past the end", func([]string) jetstream.Position {
			return jetstream.FromTime(time.Now().Add(time.Hour))
		}, "99"},
		{
			"before the start", func([]string) jetstream.Position { return jetstream.FromTime(time.UnixMilli(0)) },
			"00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 17 18 19 99",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			topic := freshTopic()
			out := make(chan *jetstream.Delivery, 1000)
			opts := jetstream.SubscribeOptions{MaxInFlight: 50}
			ma, mb := join(t, a.bus, topic, opts, out), join(t, b.bus, topic, opts, out)
			var ids []string
			for i := range 20 {
				r, err := a.bus.Publish(t.Context(), topic, fmt.Appendf(nil, "%02d", i), jetstream.PublishOptions{})
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, r.ID)
			}
			old := take(t, out, 20)
			settle(old[:5])

			// Acks are under way while the group is moved.
			var acks sync.WaitGroup
			started := make(chan struct{})
			acks.Go(func() { close(started); settle(old[5:10]) })
			<-started
			if err := b.bus.Group(topic, "g").Seek(t.Context(), test.to(ids)); err != nil {
				t.Fatal(err)
			}
			acks.Wait()
			for _, d := range old[10:] {
				_ = d.Ack() // too late, whether it says so or not
				_ = d.Nack("late", 0)
				_ = d.Extend(time.Minute)
			}
			if _, err := a.bus.Publish(t.Context(), topic, []byte("99"), jetstream.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
			n := len(strings.Fields(test.want))
			got := take(t, out, n)
			if s := numbers(got); s != test.want {
				t.Fatalf("after the seek came %s\nwant %s", s, test.want)
			}
			for _, d := range old {
				_ = d.Ack()
			}
			// Nothing of that has settled a lease given after the seek: all of them come again.
			for _, m := range []*taker{ma, mb} { // neither shall get what the other gives back
				if err := m.sub.Pause(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			ma.stop()
			mb.stop()
			join(t, a.bus, topic, opts, out)
			got = take(t, out, n)
			if s, want := numbers(got), strings.Join(strings.Fields(test.want), "(2) ")+"(2)"; s != want {
				t.Fatalf("when given back, came again %s\nwant %s", s, want)
			}
			for _, d := range got {
				if err := d.Ack(); err != nil {
					t.Error(err)
				}
			}
			if _, err := a.bus.Publish(t.Context(), topic, []byte("end"), jetstream.PublishOptions{}); err != nil {
				t.Fatal(err)
			}
			if s := numbers(take(t, out, 1)); s != "end" {
				t.Errorf("instead of the marker came %s", s)
			}
		})
	}
}

func settle(deliveries []*jetstream.Delivery) {
	for _, d := range deliveries {
		_ = d.Ack() // it may or may not be in time
	}
}

// Seeks that race leave one position, and members that follow it.
func TestSeeksThatRace(t *testing.T) {
	t.Parallel()
	a, b := twoHubs(t)
	topic := freshTopic()
	out := make(chan *jetstream.Delivery, 1000)
	join(t, a.bus, topic, jetstream.SubscribeOptions{}, out)
	join(t, b.bus, topic, jetstream.SubscribeOptions{}, out)
	publish := func(payload string) {
		t.Helper()
		if _, err := a.bus.Publish(t.Context(), topic, []byte(payload), jetstream.PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		publish(strconv.Itoa(i))
	}
	settle(take(t, out, 5))
	for range *seekRounds {
		var seeks sync.WaitGroup
		var errs [4]error
		for i, bus := range []*jetstream.Bus{a.bus, b.bus, a.bus, b.bus} {
			seeks.Go(func() {
				errs[i] = bus.Group(topic, "g").Seek(t.Context(), jetstream.FromEarliest)
			})
		}
		seeks.Wait()
		if err := errors.Join(errs[:]...); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.bus.Group(topic, "g").Seek(t.Context(), jetstream.FromLatest); err != nil {
		t.Fatal(err)
	}
	publish("marker")
	for {
		d := take(t, out, 1)[0]
		if string(d.Event.Payload) == "marker" {
			if err := d.Ack(); err != nil || d.Attempt != 1 {
				t.Errorf("the marker came at attempt %d: %v", d.Attempt, err)
			}
			break
		}
		// Leased between two seeks, and gone with the last one.
		if err := d.Ack(); err != nil && !errors.Is(err, jetstream.ErrNotLeased) {
			t.Error(err)
		}
	}
	cursor, err := b.bus.Group(topic, "g").Cursor(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the cursor is at the marker", func() bool {
		cursor, err = b.bus.Group(topic, "g").Cursor(t.Context())
		return err == nil && cursor.LastID != ""
	})
}

// from ts starts at the first event stored at or after that moment, inclusive.
func TestFromTSIsInclusive(t *testing.T) {
	t.Parallel()
	hub := startHub(t, openBus(t))
	c := hub.dial()
	topic := freshTopic()
	watch := hub.subscribe(c, topic, "watch", wire.SubscribeOptions{})
	var stored []wire.Event
	for i := range 4 {
		if i > 0 {
			last := stored[i-1].TS
			waitUntil(t, "the next millisecond", func() bool { return time.Now().UnixMilli() > last+1 })
		}
		hub.publish(c, topic, strconv.Itoa(i))
		stored = append(stored, watch.next())
	}
	for i, e := range stored {
		for delta, first := range map[int64]int{-1: i, 0: i, 1: i + 1} {
			ts := e.TS + delta
			in := hub.subscribe(c, topic, fmt.Sprint("g", i, delta), wire.SubscribeOptions{From: "ts", TS: &ts})
			if first < len(stored) {
				if got := in.next(); string(got.Payload) != strconv.Itoa(first) {
					t.Errorf("from ts %+d of event %d came %s", delta, i, got.Payload)
				}
			}
		}
	}
}
