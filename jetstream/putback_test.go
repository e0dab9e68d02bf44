package jetstream

import (
	"errors"
	"testing"
	"time"

	"eventhub/jetstream/event"
	"eventhub/jetstream/internal/records"
	"eventhub/jetstream/internal/streams"
	"eventhub/jetstream/natstest"
)

// queueEnds waits until nothing is left of any queue.
func queueEnds(t *testing.T, b *Bus) {
	t.Helper()
	eventually(t, "the queue is gone", func() bool {
		if err := b.queues.sweepPutBack(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		info, err := b.queues.openPutBack(t.Context())
		return err == nil && info.State.Consumers == 0 && info.State.Msgs == 0
	})
}

// queueOfGroup returns the queue of the group g of a topic.
func queueOfGroup(t *testing.T, b *Bus, topic string) string {
	t.Helper()
	at, _, err := b.streams.FreshExisting(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	ptr, err := b.records.Generation(t.Context(), at, "g")
	if err != nil || ptr.PutBack == "" {
		t.Fatalf("%+v, %v", ptr, err)
	}
	return ptr.PutBack
}

// A queue that a member makes again ends with the TTL of its group, too.
func TestAQueueThatAMemberMakesAgainEndsWithTheTTL(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: time.Second})
	publishAll(t, b, "tab", "1")
	opts := SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: 2 * time.Second}
	k := take(t, b, "tab", "g", opts)
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter", func() bool { return len(letterList(t, b, LetterFilter{})) == 1 })
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
	queue := queueOfGroup(t, b, "tab")
	if err := b.conn.JS.DeleteConsumer(t.Context(), putBackStream, queue); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the member makes the queue again", func() bool {
		_, err := b.conn.JS.Consumer(t.Context(), putBackStream, queue)
		return err == nil
	})
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended(t, b.Group("tab", "g"))
	queueEnds(t, b)
}

// So does a queue that a redrive makes while the group waits for the server that had it in memory.
func TestAQueueOfAGroupThatWaitsForItsServerEndsWithTheTTL(t *testing.T) {
	t.Parallel()
	s := natstest.Start(t)
	b := open(t, Config{URL: s.URL()})
	publishAll(t, b, "tab", "1")
	opts := SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: time.Minute}
	k := take(t, b, "tab", "g", opts)
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter", func() bool { return len(letterList(t, b, LetterFilter{})) == 1 })
	settledUpTo(t, b.Group("tab", "g"), 0)
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	s.Start()
	eventually(t, "the event is put back", func() bool {
		_, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{}, RedriveOptions{})
		if err != nil {
			return false
		}
		info, err := b.queues.openPutBack(t.Context())
		return err == nil && info.State.Msgs == 1
	})
	if err := b.queues.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.queues.openPutBack(t.Context()); err != nil || info.State.Msgs != 1 {
		t.Fatalf("a group that may come back has lost its queue: %v", err)
	}
	// As when the minute is over: nothing says any more that the group may come back.
	if err := b.conn.Purge(t.Context(), records.MarksBucket, "$KV."+records.MarksBucket+"."+records.GroupKey(b.streams.Known("tab"), "g"), 0); err != nil {
		t.Fatal(err)
	}
	queueEnds(t, b)
}

// A hub that is lost after it put an event back and before it removed the letter neither loses nor
// doubles it: whoever delivers the event removes the letter, and a redrive that is repeated, or
// goes on with what it saw long ago, puts nothing back twice.
func TestALetterIsPutBackOnce(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "once", numbers(3)...)
	fail(t, b, "once", "g", "no", 3)
	letters := letterList(t, b, LetterFilter{})
	r := func() *redrive { return &redrive{letters: b.letters, queues: make(map[[2]string]queueOf)} }
	// the first hub: it stores the copy of the first letter and is lost
	lost := r()
	if err := lost.findQueues(t.Context(), letters); err != nil {
		t.Fatal(err)
	}
	ready, why, err := lost.prepare(t.Context(), letters[0])
	if err != nil || why != "" {
		t.Fatal(why, err)
	}
	stream, err := b.queues.openPutBack(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := &putting{listed: letters[0], letter: ready, queue: lost.queues[[2]string{"once", "g"}].name}
	if lost.send(t.Context(), []*putting{p}, stream.State.LastSeq); p.err != nil {
		t.Fatal(p.err)
	}
	if n := len(letterList(t, b, LetterFilter{})); n != 3 {
		t.Fatalf("%d letters", n)
	}
	// the second: it takes the letter for put back
	got := redriveAll(t, b, LetterFilter{ID: letters[0].ID}, RedriveOptions{})
	if got.Done != 1 || backlog(t, b, "once").PutBack != 1 {
		t.Errorf("%+v, backlog %+v", got, backlog(t, b, "once"))
	}
	// again with the second letter, which the delivery removes
	if stream, err = b.queues.openPutBack(t.Context()); err != nil {
		t.Fatal(err)
	}
	ready, _, err = lost.prepare(t.Context(), letters[1])
	if err != nil {
		t.Fatal(err)
	}
	p = &putting{listed: letters[1], letter: ready, queue: p.queue}
	if lost.send(t.Context(), []*putting{p}, stream.State.LastSeq); p.err != nil {
		t.Fatal(p.err)
	}
	stale := stream.State.LastSeq + 1
	k := take(t, b, "once", "g", SubscribeOptions{})
	k.payloads(2)
	if left := letterList(t, b, LetterFilter{}); len(left) != 1 || left[0].Event.ID != letters[2].Event.ID {
		t.Errorf("%d letters are left", len(left))
	}
	eventually(t, "all is settled", func() bool { got := backlog(t, b, "once"); return got.PutBack+got.PutBackLeased == 0 })
	// the first hub was only frozen, and goes on with the letter that it saw
	thawed := r()
	if again, err := thawed.putBack(t.Context(), letters[:2]); err != nil || len(again) != 0 || thawed.result.Skipped != 2 {
		t.Errorf("putting back what is gone: %d again, %v, %+v", len(again), err, thawed.result)
	}
	if redriveAll(t, b, LetterFilter{}, RedriveOptions{}); len(k.payloads(1)) != 1 {
		t.Error("the third did not come")
	}
	p.err = nil
	if thawed.send(t.Context(), []*putting{p}, stale); p.err == nil {
		t.Error("a copy was stored though others were since the letter was seen")
	}
	k.quiet(100 * time.Millisecond)
}

// What is put back shares maxInFlight with the rest of the group, and neither starves the other.
func TestPutBackEventsShareMaxInFlight(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "shared", numbers(20)...)
	fail(t, b, "shared", "g", "no", 20)
	k := take(t, b, "shared", "g", SubscribeOptions{MaxInFlight: 1, BatchSize: 1})
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	publishAll(t, b, "shared", numbers(20)...)
	d := k.next()
	k.quiet(600 * time.Millisecond) // one is leased
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	k.payloads(39)
	k.quiet(50 * time.Millisecond)
}

// A group that is deleted takes along what was put back, and a redrive to it says so.
func TestADeletedGroupTakesNothingBack(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "gone", numbers(4)...)
	fail(t, b, "gone", "g", "no", 4)
	letters := letterList(t, b, LetterFilter{})
	redriveAll(t, b, LetterFilter{EventID: letters[0].Event.ID}, RedriveOptions{})
	queue := func() string {
		ptr, err := b.records.Generation(t.Context(), b.streams.Known("gone"), "g")
		if err != nil {
			t.Fatal(err)
		}
		return ptr.PutBack
	}
	old := queue()
	if err := b.Group("gone", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info, err := b.queues.openPutBack(t.Context()); err != nil || info.State.Msgs != 0 || info.State.Consumers != 0 {
		t.Errorf("%d events in %d queues, %v", info.State.Msgs, info.State.Consumers, err)
	}
	if _, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: "gone", Group: "g"}, RedriveOptions{}); !errors.Is(err, event.ErrNotFound) {
		t.Errorf("a redrive to a group that was deleted: %v", err)
	}
	got := redriveAll(t, b, LetterFilter{Topic: "gone"}, RedriveOptions{})
	if got.Done != 0 || got.Skipped != 3 || got.Reasons[`topic gone has no group "g" any more`] != 3 {
		t.Errorf("%+v", got)
	}
	// a new group of that name has a queue of its own
	k := take(t, b, "gone", "g", SubscribeOptions{})
	redriveAll(t, b, LetterFilter{ID: letters[1].ID}, RedriveOptions{})
	if now := queue(); now == old || now == "" {
		t.Errorf("the queue is %q, and was %q", now, old)
	}
	if got := k.payloads(1)[0]; got != string(letters[1].Event.Payload) {
		t.Errorf("got %s", got)
	}
	// a hub that was late
	lost := &streams.Topic{Name: "x", Stream: &streams.Stream{Name: putBackStream, Family: true, Slots: make(chan struct{}, 1), Ready: b.streams.Known("gone").Stream.Ready, Headroom: &b.streams.Headrooms.File}, Subject: queueSubject(old) + "x", Obs: event.NopObserver{}}
	if err := b.publishers.Store(t.Context(), lost, []byte("1"), "", ""); err != nil {
		t.Fatal(err)
	}
	if err := b.queues.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.queues.openPutBack(t.Context()); err != nil || info.State.Msgs != 0 || info.State.Consumers != 1 {
		t.Errorf("after the sweep: %d events in %d queues, %v", info.State.Msgs, info.State.Consumers, err)
	}
	// the topic goes, and its queues with it
	if err := b.conn.JS.DeleteStream(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.queues.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.queues.openPutBack(t.Context()); err != nil || info.State.Consumers != 0 {
		t.Errorf("after the topic: %d queues, %v", info.State.Consumers, err)
	}
}

// A member that goes on after its group was deleted and made again, or moved, goes on with the
// queue of the group that it is in.
func TestQueuesFollowTheirGroup(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publishAll(t, b, "follow", numbers(3)...)
	fail(t, b, "follow", "g", "no", 3)
	letters := letterList(t, b, LetterFilter{})
	k := take(t, b, "follow", "g", SubscribeOptions{})
	redriveAll(t, b, LetterFilter{ID: letters[0].ID}, RedriveOptions{})
	k.payloads(1)
	if err := b.Group("follow", "g").Seek(t.Context(), FromLatest); err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{ID: letters[1].ID}, RedriveOptions{})
	k.payloads(1)
	// members without OnDeleted make their group again
	if err := b.Group("follow", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the group is there again", func() bool { _, err := b.Group("follow", "g").Backlog(t.Context()); return err == nil })
	redriveAll(t, b, LetterFilter{ID: letters[2].ID}, RedriveOptions{})
	k.payloads(1)
	k.sub.mu.Lock()
	defer k.sub.mu.Unlock()
	if n := len(k.sub.members); n != 2 {
		t.Errorf("%d members", n)
	}
}

// A group with a TTL takes its queue along when it ends.
func TestAQueueEndsWithItsTTL(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: time.Second})
	publishAll(t, b, "tab", "1")
	k := take(t, b, "tab", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: 4 * time.Second})
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter", func() bool { return len(letterList(t, b, LetterFilter{})) == 1 })
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	if err := b.queues.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if n := backlog(t, b, "tab").PutBack; n != 1 {
		t.Errorf("%d wait for a group that may come back", n)
	}
	queueEnds(t, b)
}

// Pausing a group stops what was put back to it, too: a queue that is there, and one that is made
// during the pause.
func TestAPausedGroupIsGivenNothingBack(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "orders", "first", "second")
	fail(t, b, "orders", "g", "no stock", 2)
	g := b.Group("orders", "g")
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, "orders", "g", SubscribeOptions{})
	quiet := func() {
		t.Helper()
		select {
		case h := <-k.ch:
			if _, ok := h.Begin(); ok {
				t.Fatalf("%s came while the group was paused", h.Event.Payload)
			}
		case <-time.After(300 * time.Millisecond):
		}
	}
	letters := letterList(t, b, LetterFilter{})
	if len(letters) != 2 {
		t.Fatalf("%d letters, want 2", len(letters))
	}
	redriveAll(t, b, LetterFilter{Topic: "orders", ID: letters[0].ID}, RedriveOptions{})
	quiet()
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
	if err := g.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{Topic: "orders", ID: letters[1].ID}, RedriveOptions{})
	quiet()
	if err := g.Resume(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
}
