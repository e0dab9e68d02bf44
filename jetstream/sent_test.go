package jetstream

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/natstest"
)

// A delivery waited between two servers while newer ones of the group came, for so long that the
// server has given the event to another member since. No client gets the delivery.
func TestADeliveryThatWaitedBetweenServersIsNotHandedOut(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: 3 * time.Second, Connections: 1})
	publishAll(t, b, "waited", "1", "2")
	k := take(t, b, "waited", "g", SubscribeOptions{From: FromEarliest})
	first, second := k.next(), k.next()
	old := &nats.Msg{Subject: plainSubject("waited"), Reply: first.reply, Data: []byte("1")}
	for _, d := range []*Delivery{first, second} {
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
	}
	in := k.sub.members[0].inbox
	in.receive(old)
	if d := k.next(); d.seq != first.seq {
		t.Fatalf("event %d came", d.seq)
	} else if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	<-time.After(first.group.fence.usable) // the time under test
	in.receive(old)
	select {
	case h := <-k.ch:
		t.Errorf("event %s was handed out %v after the next", (*Delivery)(h).Event.Payload, first.group.fence.usable)
	case <-time.After(200 * time.Millisecond): // the time under test
	}
	publishAll(t, b, "waited", "3")
	if d := k.next(); string(d.Event.Payload) != "3" {
		t.Errorf("event %s came", d.Event.Payload)
	}
}

// A delivery waited between two servers while the event was delivered again, and settled. No client
// gets the delivery, and an event that is delivered after it goes on.
func TestADeliveryOfASettledEventIsNotHandedOut(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: 10 * time.Second, Connections: 1})
	for _, end := range []struct {
		name string
		do   func(*Delivery) error
	}{
		{"acknowledged", (*Delivery).Ack},
		{"dead-lettered", func(d *Delivery) error { return d.Nack("no", 0) }},
	} {
		t.Run(end.name, func(t *testing.T) {
			topic := "settled." + end.name
			publishAll(t, b, topic, "1")
			k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 2})
			first := k.next()
			old := &nats.Msg{Subject: plainSubject(topic), Reply: first.reply, Data: []byte("1")}
			if err := first.Nack("", 0); err != nil {
				t.Fatal(err)
			}
			second := k.next()
			if second.seq != first.seq || second.Attempt != 2 {
				t.Fatalf("event %d came with attempt %d", second.seq, second.Attempt)
			}
			if err := end.do(second); err != nil {
				t.Fatal(err)
			}
			settledUpTo(t, b.Group(topic, "g"), 0)
			k.sub.members[0].inbox.receive(old)
			publishAll(t, b, topic, "2")
			if d := k.next(); string(d.Event.Payload) != "2" {
				t.Errorf("event %s came with attempt %d", d.Event.Payload, d.Attempt)
			} else if err := d.Ack(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// The link of a hub is held in one direction while the server sends many deliveries, and gives
// their events to another hub later. Once the link is free, the answer to an echo follows the
// deliveries. The hub hands none of them out, although it may read the answer before it has looked
// at them all.
func TestDeliveriesBehindAHeldLinkAreNotHandedOut(t *testing.T) {
	t.Parallel()
	// On a machine so slow that an event is settled when its lease has just ended, the event is on
	// its way to the hub once more, and not late.
	for wait := 2 * time.Second; ; wait *= 2 {
		d := handedOutBehindAHeldLink(t, wait)
		if d == nil {
			return
		}
		if wait == 8*time.Second || d.Attempt == 1 {
			t.Fatalf("event %d was handed out with attempt %d", d.seq, d.Attempt)
		}
	}
}

// handedOutBehindAHeldLink returns a delivery that was handed out, or nil.
func handedOutBehindAHeldLink(t *testing.T, ackWait time.Duration) *Delivery {
	t.Helper()
	const events = 1_000
	url := natsServer(t)
	proxy := natstest.StartProxy(t, url)
	b := open(t, Config{URL: proxy.URL(), AckWait: ackWait, Connections: 1})
	other := open(t, Config{URL: url, AckWait: ackWait, Connections: 1})
	opts := SubscribeOptions{From: FromEarliest, MaxInFlight: events, BatchSize: events, MaxAttempts: NeverGiveUp}
	publishAll(t, other, "held", "first")
	k := take(t, b, "held", "g", opts)
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the hub asks for events", func() bool {
		info, err := other.Group("held", "g").Info(t.Context())
		return err == nil && info.Waiting > 0 && info.InFlight == 0
	})
	release := proxy.Hold(t)
	fillTopic(t, other, "held", 1, events)
	l := take(t, other, "held", "g", opts)
	for settled := 0; settled < events; { // on a slow machine, some come again
		if l.next().Ack() == nil {
			settled++
		}
	}
	<-time.After(time.Second) // the hub asks for another echo meanwhile
	release()
	after := time.After(500 * time.Millisecond) // the time under test
	for {
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); ok {
				return d
			}
		case <-after:
			return nil
		}
	}
}

// The answer is never later than the moment in which the first delivery with a higher number
// arrived, and not much earlier.
func TestSentTimes(t *testing.T) {
	t.Parallel()
	const ackWait = int64(30 * time.Second)
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var s sentTimes
		var arrived []int64 // when each number arrived first, from 1 on
		now, highest := int64(0), uint64(0)
		for range 2_000 {
			now += rnd.Int64N(int64(time.Second) / 2)
			order := highest + 1
			if highest > 0 && rnd.IntN(3) == 0 {
				order = 1 + rnd.Uint64N(highest)
			}
			want := now
			for _, at := range arrived[min(order, highest):] {
				want = at // of the next higher number
				break
			}
			got := s.arrived(order, now, ackWait)
			if len(s.marks) > sentMarks {
				t.Fatalf("%d marks", len(s.marks))
			}
			switch {
			case order > highest:
				arrived = append(arrived, now)
				highest = order
				if got != now {
					t.Fatalf("the newest was sent at %d, now is %d", got, now)
				}
			case now-want >= ackWait:
				if now-got < ackWait*9/10 {
					t.Fatalf("sent before %d, said to be sent before %d, now is %d", want, got, now)
				}
			case got > want || want-got > ackWait/sentMarks && want != now:
				t.Fatalf("sent before %d, said to be sent before %d, now is %d", want, got, now)
			}
		}
	}
}

// A server that was killed counts from an older number. Once the hub knows, deliveries are new.
func TestSentTimesOfAServerThatForgot(t *testing.T) {
	t.Parallel()
	const ackWait = int64(30 * time.Second)
	at := func(seconds int64) int64 { return seconds * int64(time.Second) }
	var s sentTimes
	s.arrived(100, at(1), ackWait)
	s.arrived(200, at(10), ackWait)
	if got := s.arrived(150, at(40), ackWait); got != at(10) {
		t.Errorf("sent at %v", time.Duration(got))
	}
	s.check(at(9), 150, ackWait) // asked before 200 came
	if got := s.arrived(150, at(40), ackWait); got != at(10) {
		t.Errorf("after an answer of before, sent at %v", time.Duration(got))
	}
	s.check(at(40), 200, ackWait)
	if got := s.arrived(150, at(40), ackWait); got != at(10) {
		t.Errorf("after an answer that has all, sent at %v", time.Duration(got))
	}
	s.check(at(40), 150, ackWait)
	if got := s.arrived(150, at(41), ackWait); got != at(41) {
		t.Errorf("after the server forgot, sent at %v", time.Duration(got))
	}
}
