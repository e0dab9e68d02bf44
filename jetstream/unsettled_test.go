//go:build unix

package jetstream

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/conn"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/native"
	"eventhub/jetstream/natstest"
)

// blockReplies makes replies over the link wait until the returned func is called. A question
// without a subject is its own answer.
func blockReplies(t *testing.T, l *conn.Link) (release func()) {
	t.Helper()
	ch := make(chan struct{})
	in := make(chan struct{})
	if err := l.Ask(&nats.Msg{}, l.Pool.Clock.Now(), conn.AskerFunc(func(*nats.Msg, error) { close(in); <-ch })); err != nil {
		t.Fatal(err)
	}
	<-in
	return func() { close(ch) }
}

// An event that was given back without having been held comes again, also when the consumer is lost
// meanwhile.
func TestWhatIsSparedOutlivesItsConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "t", "settled")
	k := take(t, b, "t", "g", SubscribeOptions{From: FromEarliest, GroupTTL: 30 * time.Second})
	k.payloads(1)
	<-time.After(100 * time.Millisecond) // the time under test
	// The process stands still; what arrives then is spared, and comes again after AckWait.
	b.clock.LastTick.Store(b.clock.Now() - int64(10*time.Second))
	publishAll(t, b, "t", "unsettled")
	<-time.After(time.Second) // the time under test
	g := k.sub.members[0].group
	if err := b.conn.JS.DeleteConsumer(t.Context(), g.topic.Stream.Name, g.consumer); err != nil {
		t.Fatal(err)
	}
	<-time.After(500 * time.Millisecond) // the time under test
	publishAll(t, b, "t", "later")
	if got := k.payloads(1); got[0] != "unsettled" {
		t.Fatalf("got %q first: the unsettled event was left out", got)
	}
}

// What a pause gives back is unsettled.
func TestWhatAPauseGivesBackIsUnsettled(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	for round := range 40 {
		topic := "t" + string(rune('a'+round%26)) + string(rune('a'+round/26))
		publishAll(t, b, topic, "0")
		k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest, GroupTTL: 30 * time.Second})
		k.payloads(1)
		p := b.NewPublisher()
		const n = 50
		for range n {
			if err := p.PublishAsync(t.Context(), topic, []byte("1"), PublishOptions{}, func(event.Receipt, error) {}); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(time.Duration(round) * 20 * time.Microsecond) // the time under test
		if err := k.sub.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		g := k.sub.members[0].group
		at := b.groups.resumeAt(g)
		g.mu.Lock()
		last := g.track.lastSeq
		g.mu.Unlock()
		if at > 2 {
			t.Errorf("round %d: nothing but 1 was settled, and the group would go on at %d (last %d)", round, at, last)
		}
		_ = k.sub.Stop(t.Context())
	}
}

// An event that is on its way into the hands of one member while another joins the group again, for
// their consumer is gone, comes again.
func TestAnEventThatArrivesWhileItsConsumerIsLostComesAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "t", "settled")
	slow := make(chan struct{})
	arrived := make(chan struct{})
	once := sync.OnceFunc(func() { close(arrived); <-slow })
	k := take(t, b, "t", "g", SubscribeOptions{From: FromEarliest, GroupTTL: 30 * time.Second, Filter: func(e *event.Event) bool {
		if string(e.Payload) == "unsettled" {
			once()
		}
		return true
	}})
	k.payloads(1)
	publishAll(t, b, "t", "unsettled")
	<-arrived
	other := take(t, b, "t", "g", SubscribeOptions{GroupTTL: 30 * time.Second})
	g := k.sub.members[0].group
	if err := b.conn.JS.DeleteConsumer(t.Context(), g.topic.Stream.Name, g.consumer); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for moved := false; !moved; {
		other.sub.mu.Lock()
		moved = other.sub.members[0].group != g
		other.sub.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatal("the other member did not join the group again")
		}
		<-time.After(time.Millisecond)
	}
	close(slow)
	for {
		select {
		case h := <-k.ch:
			if d, ok := h.Begin(); ok && string(d.Event.Payload) == "unsettled" && h.group != g {
				return
			}
		case h := <-other.ch:
			if d, ok := h.Begin(); ok && string(d.Event.Payload) == "unsettled" {
				return
			}
		case <-time.After(5 * time.Second):
			t.Fatal("the event never came again")
		}
	}
}

// A last failure whose letter is not stored is no end: the event comes again, also when the
// consumer is lost meanwhile.
func TestALetterThatIsNotStoredLosesNoEvent(t *testing.T) {
	t.Parallel()
	srv := natstest.Start(t)
	b := open(t, Config{URL: srv.URL(), Connections: 1})
	publishAll(t, b, "t", "bad")
	k := take(t, b, "t", "g", SubscribeOptions{From: FromEarliest, GroupTTL: time.Minute, MaxAttempts: 1})
	dead := take(t, b, "dlq.t", "d", SubscribeOptions{From: FromEarliest})
	d := k.next()
	srv.Freeze()
	if err := d.Nack("no", -1); err != nil {
		t.Fatal(err)
	}
	<-time.After(100 * time.Millisecond) // the time under test
	srv.Kill()
	srv.Start()
	deadline := time.After(15 * time.Second)
	for {
		select {
		case h := <-k.ch:
			if _, ok := h.Begin(); ok {
				t.Log("delivered once more")
				return
			}
		case h := <-dead.ch:
			if _, ok := h.Begin(); ok {
				t.Log("dead-lettered")
				return
			}
		case <-deadline:
			g := k.sub.members[0].group
			t.Fatalf("neither; the group begins at %d now", g.first)
		}
	}
}

// A note that could not be stored in time does not overwrite a newer one.
func TestAKeptNoteGivesWayToANewerOne(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	l := b.conn.Links[0]
	subject := "$KV." + native.AttemptsBucket + ".s.g.0.1"
	// no leader then: the connection stays
	b.records.KeepNote(records.SpareNote{Subject: subject, Note: records.Note{Spared: 1}})
	done := make(chan struct{})
	b.records.NoteSpared(l, records.SpareNote{Subject: subject, Note: records.Note{Spared: 5}}, func(bool) { close(done) })
	<-done
	b.records.SaveUnsaved(l)             // the connection breaks and comes back, some time later
	<-time.After(100 * time.Millisecond) // the time under test
	m, err := b.conn.LastBySubject(t.Context(), "KV_"+native.AttemptsBucket, subject)
	if err != nil || string(m.Data) != "5" {
		t.Fatalf("the bucket says %s, %v", m.Data, err)
	}
}

// Others ask for the members of a group while a subscription joins it.
func TestAMemberJoinsWhileOthersAreAsked(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 2})
	publishAll(t, b, "a", "x")
	publishAll(t, b, "b", "x")
	slow, err := b.Subscribe(t.Context(), "a", "g", SubscribeOptions{From: FromEarliest}, ignore)
	if err != nil {
		t.Fatal(err)
	}
	g := slow.members[0].group
	stop := make(chan struct{})
	go func() {
		for {
			select {
			case <-stop:
				return
			default:
				for _, s := range b.groups.membersOf(g) { // as askIdle does
					s.idle(g, 0)
				}
			}
		}
	}()
	for range 20 {
		s, err := b.Subscribe(t.Context(), "a", "g", SubscribeOptions{Topics: []string{"b"}, Paused: true}, ignore)
		if err != nil {
			t.Fatal(err)
		}
		_ = s.Stop(t.Context())
	}
	close(stop)
	_ = slow.Stop(t.Context())
}

// While the attempt of the oldest event is asked for, a subscription takes no more than its share.
func TestAFanInIsBoundedBehindAnUnresolvedEvent(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "a", numbers(300)...)
	publishAll(t, b, "b", "x")
	k := &taker{t: t, group: b.Group("a", "g"), ch: make(chan *Held, 1000)}
	var err error
	if k.sub, err = b.Subscribe(t.Context(), "a", "g", SubscribeOptions{From: FromEarliest, Topics: []string{"b"}, MaxInFlight: 1, Paused: true}, func(h *Held) { k.ch <- h }); err != nil {
		t.Fatal(err)
	}
	c, err := b.conn.JS.Consumer(t.Context(), "a", "g")
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Next()
	if err != nil {
		t.Fatal(err)
	}
	_ = m.Nak()
	<-time.After(50 * time.Millisecond) // the time under test
	release := blockReplies(t, k.sub.link)
	k.sub.Resume()
	<-time.After(time.Second) // the time under test
	k.sub.mu.Lock()
	t.Logf("maxInFlight 1: out %d, parked %d, active %d", len(k.sub.out), len(k.sub.parked), k.sub.active)
	over := len(k.sub.parked) > 3
	k.sub.mu.Unlock()
	release()
	if over {
		t.Error("unbounded")
	}
	_ = k.sub.Stop(t.Context())
}

// A group in memory is known to all hubs as soon as its first member is: when its server is killed
// a moment later, another hub that creates the group again goes on where it began.
func TestANewGroupInMemoryOutlivesItsServer(t *testing.T) {
	t.Parallel()
	srv := natstest.Start(t)
	a := open(t, Config{URL: srv.URL(), Connections: 1})
	publishAll(t, a, "t", "before")
	k := take(t, a, "t", "g", SubscribeOptions{GroupTTL: 30 * time.Second})
	publishAll(t, a, "t", "unsettled")
	k.next()
	b := open(t, Config{URL: srv.URL(), Connections: 1})
	srv.Kill()
	if err := a.Close(); err != nil { // as if it had been killed, too: it can tell nobody anything
		t.Log(err)
	}
	srv.Start()
	var other *taker
	for deadline := time.Now().Add(20 * time.Second); other == nil; {
		other = &taker{t: t, group: b.Group("t", "g"), ch: make(chan *Held, 10)}
		var err error
		if other.sub, err = b.Subscribe(t.Context(), "t", "g", SubscribeOptions{GroupTTL: 30 * time.Second}, func(h *Held) { other.ch <- h }); err != nil {
			if other = nil; time.Now().After(deadline) {
				t.Fatal(err)
			}
			<-time.After(20 * time.Millisecond)
		}
	}
	t.Cleanup(func() { _ = other.sub.Stop(context.Background()) })
	if got := other.payloads(1); got[0] != "unsettled" {
		t.Fatalf("got %q, and not the unsettled event", got)
	}
}
