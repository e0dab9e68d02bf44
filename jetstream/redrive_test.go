package jetstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// fail makes dead letters of n events of the topic for a group.
func fail(t *testing.T, b *Bus, topic, group, reason string, n int) {
	t.Helper()
	k := take(t, b, topic, group, SubscribeOptions{From: FromEarliest, MaxAttempts: 1, MaxInFlight: max(n, 1)})
	for range n {
		d := k.next()
		if err := d.Nack(reason, 0); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the letters", func() bool {
		counts, err := b.Admin().DeadLetters().Count(t.Context(), LetterFilter{Topic: topic, Group: group}, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		return counts.Total == n
	})
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func redriveAll(t *testing.T, b *Bus, filter LetterFilter, opts RedriveOptions) Redriven {
	t.Helper()
	if opts.Rate == 0 {
		opts.Rate = maxRedriveRate
	}
	got, err := b.Admin().DeadLetters().Redrive(t.Context(), filter, opts)
	if err != nil {
		t.Fatalf("redrive: %v (%+v)", err, got)
	}
	return got
}

func letterList(t *testing.T, b *Bus, filter LetterFilter) []*Letter {
	t.Helper()
	var all []*Letter
	for next := ""; ; {
		page, err := b.Admin().DeadLetters().List(t.Context(), filter, next, 7, nil)
		if err != nil {
			t.Fatal(err)
		}
		if all = append(all, page.Letters...); page.Next == "" {
			return all
		}
		next = page.Next
	}
}

func backlog(t *testing.T, b *Bus, topic string) Backlog {
	t.Helper()
	got, err := b.Group(topic, "g").Backlog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// An event that is redriven to its group is the same event, begins with attempt 1, and is seen by
// no other group. It may fail again, and have another letter.
func TestARedriveToTheGroup(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b, other := open(t, Config{URL: url}), open(t, Config{URL: url})
	opts := PublishOptions{
		ID: "order-1", TS: 1234567890123, HasTS: true, Key: "kunde:7.ä", SID: "s1",
		Headers: map[string]string{"correlationid": "c 1"}, Tags: []string{"a", "b"}, CausedBy: []string{"x"},
	}
	payload := []byte(`{"big": 12345678901234567890, "z":1,  "a":"\u00e4"}`)
	if _, err := b.Publish(t.Context(), "orders", payload, opts); err != nil {
		t.Fatal(err)
	}
	bystander := take(t, b, "orders", "bystander", SubscribeOptions{From: FromEarliest})
	bystander.payloads(1)
	fail(t, b, "orders", "g", "no stock", 1)
	// one that is there already, on another hub, and one that comes later
	early := take(t, other, "orders", "g", SubscribeOptions{MaxAttempts: 2})
	letters := letterList(t, b, LetterFilter{})
	if len(letters) != 1 || letters[0].Reason != "no stock" || letters[0].Attempts != 1 || letters[0].Event.ID != "order-1" || letters[0].Group != "g" {
		t.Fatalf("letters: %+v", letters)
	}
	if got := redriveAll(t, b, LetterFilter{Topic: "orders"}, RedriveOptions{}); got.Matched != 1 || got.Done != 1 || got.Skipped != 0 {
		t.Fatalf("redriven: %+v", got)
	}
	check := func(d *Delivery, attempt int) {
		t.Helper()
		e := d.Event
		if e.ID != opts.ID || e.TS != opts.TS || e.Key != opts.Key || e.SID != opts.SID || e.Topic != "orders" || !bytes.Equal(e.Payload, payload) ||
			!reflect.DeepEqual(e.Headers, opts.Headers) || !slices.Equal(e.Tags, opts.Tags) || !slices.Equal(e.CausedBy, opts.CausedBy) {
			t.Errorf("the event is %+v", e)
		}
		if d.Attempt != attempt {
			t.Errorf("attempt %d, not %d", d.Attempt, attempt)
		}
		if e.Stream != "orders" || e.Sequence != 1 {
			t.Errorf("the event is at %s@%d", e.Stream, e.Sequence)
		}
	}
	d := early.next()
	check(d, 1)
	if len(letterList(t, b, LetterFilter{})) != 0 {
		t.Error("the letter is still there")
	}
	if err := d.Nack("again", 0); err != nil {
		t.Fatal(err)
	}
	d = early.next()
	check(d, 2)
	if err := d.Nack("still no stock", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second letter", func() bool { return len(letterList(t, b, LetterFilter{Reason: "still no"})) == 1 })
	second := letterList(t, b, LetterFilter{})[0]
	if second.ID == letters[0].ID || second.Attempts != 2 {
		t.Errorf("the second letter is %+v", second)
	}
	eventually(t, "the event is settled", func() bool { got := backlog(t, b, "orders"); return got.PutBack+got.PutBackLeased == 0 })
	if err := early.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	// nobody is there: it waits
	redriveAll(t, other, LetterFilter{ID: second.ID}, RedriveOptions{})
	if got := backlog(t, b, "orders"); got.PutBack != 1 || got.Waiting != 0 {
		t.Errorf("backlog: %+v", got)
	}
	late := take(t, b, "orders", "g", SubscribeOptions{})
	d = late.next()
	check(d, 1)
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing waits", func() bool { got := backlog(t, b, "orders"); return got.PutBack+got.PutBackLeased == 0 })
	bystander.quiet(100 * time.Millisecond)
	publish(t, b, "orders", `"fresh"`)
	if got := late.payloads(1)[0]; got != `"fresh"` {
		t.Errorf("then came %s", got)
	}
}

// An event that was put back and fails again has another letter, also if its subscriber keeps no
// more of it than its names, as a hub does for its clients.
func TestAPutBackEventThatWasSentFailsAgain(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	headers := map[string]string{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
	if _, err := b.Publish(t.Context(), "orders", []byte("1"), PublishOptions{ID: "order-1", Headers: headers}); err != nil {
		t.Fatal(err)
	}
	fail(t, b, "orders", "g", "first", 1)
	sent := make(chan string, 10)
	s, err := b.Subscribe(t.Context(), "orders", "g", SubscribeOptions{MaxAttempts: 1}, func(h *Held) {
		id := h.Event.ID
		if out, ok := h.BeginSend(); ok {
			out.Written()
			sent <- id
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{Topic: "orders"}, RedriveOptions{})
	select {
	case id := <-sent:
		s.Nack(id, "second", 0)
	case <-time.After(20 * time.Second):
		t.Fatal("the event was not put back")
	}
	eventually(t, "the second letter", func() bool {
		letters := letterList(t, b, LetterFilter{Topic: "orders"})
		return len(letters) == 1 && letters[0].Reason == "second" && letters[0].Event.ID == "order-1" && reflect.DeepEqual(letters[0].Event.Headers, headers)
	})
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// A hub that is lost after it put an event back and before it removed the letter neither loses nor
// doubles it: whoever delivers the event removes the letter, and a redrive that is repeated, or
// goes on with what it saw long ago, puts nothing back twice.
func TestALetterIsPutBackOnce(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publish(t, b, "once", numbers(3)...)
	fail(t, b, "once", "g", "no", 3)
	letters := letterList(t, b, LetterFilter{})
	r := func() *redrive { return &redrive{bus: b, queues: make(map[[2]string]queueOf)} }
	// the first hub: it stores the copy of the first letter and is lost
	lost := r()
	if err := lost.findQueues(t.Context(), letters); err != nil {
		t.Fatal(err)
	}
	ready, why, err := lost.prepare(t.Context(), letters[0])
	if err != nil || why != "" {
		t.Fatal(why, err)
	}
	stream, err := b.openPutBack(t.Context())
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
	if stream, err = b.openPutBack(t.Context()); err != nil {
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

// Several redrives of the same letters at a time, on two hubs, put each event back once.
func TestRedrivesAtTheSameTime(t *testing.T) {
	t.Parallel()
	const n = 200
	url := natsServer(t)
	hubs := []*Bus{open(t, Config{URL: url}), open(t, Config{URL: url})}
	publish(t, hubs[0], "rush", numbers(n)...)
	fail(t, hubs[0], "rush", "g", "no", n)
	k := take(t, hubs[1], "rush", "g", SubscribeOptions{})
	var mu sync.Mutex
	var wg sync.WaitGroup
	done := 0
	for i := range 4 {
		wg.Go(func() {
			got, err := hubs[i%2].Admin().DeadLetters().Redrive(context.WithoutCancel(t.Context()), LetterFilter{Topic: "rush"}, RedriveOptions{Rate: maxRedriveRate})
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			done += got.Done
		})
	}
	got := k.payloads(n)
	wg.Wait()
	k.quiet(200 * time.Millisecond)
	slices.Sort(got)
	if len(slices.Compact(got)) != n {
		t.Errorf("%d different events", len(slices.Compact(got)))
	}
	if done < n {
		t.Errorf("%d done", done)
	}
	if left := letterList(t, hubs[0], LetterFilter{}); len(left) != 0 {
		t.Errorf("%d letters are left", len(left))
	}
}

// What is put back shares maxInFlight with the rest of the group, and neither starves the other.
func TestPutBackEventsShareMaxInFlight(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publish(t, b, "shared", numbers(20)...)
	fail(t, b, "shared", "g", "no", 20)
	k := take(t, b, "shared", "g", SubscribeOptions{MaxInFlight: 1, BatchSize: 1})
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	publish(t, b, "shared", numbers(20)...)
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
	publish(t, b, "gone", numbers(4)...)
	fail(t, b, "gone", "g", "no", 4)
	letters := letterList(t, b, LetterFilter{})
	redriveAll(t, b, LetterFilter{EventID: letters[0].Event.ID}, RedriveOptions{})
	queue := func() string {
		ptr, err := b.generations.get(t.Context(), b.known("gone"), "g")
		if err != nil {
			t.Fatal(err)
		}
		return ptr.PutBack
	}
	old := queue()
	if err := b.Group("gone", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info, err := b.openPutBack(t.Context()); err != nil || info.State.Msgs != 0 || info.State.Consumers != 0 {
		t.Errorf("%d events in %d queues, %v", info.State.Msgs, info.State.Consumers, err)
	}
	if _, err := b.Admin().DeadLetters().Redrive(t.Context(), LetterFilter{Topic: "gone", Group: "g"}, RedriveOptions{}); !errors.Is(err, ErrNotFound) {
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
	if _, err := b.publishWait(t.Context(), func(done func(Receipt, error)) error {
		return b.publisher.send(t.Context(), &topicInfo{name: "x", stream: &stream{name: putBackStream, slots: make(chan struct{}, 1), ready: b.known("gone").stream.ready}, subject: queueSubject(old) + "x", obs: nopObserver{}}, []byte("1"), &PublishOptions{}, done)
	}); err != nil {
		t.Fatal(err)
	}
	if err := b.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.openPutBack(t.Context()); err != nil || info.State.Msgs != 0 || info.State.Consumers != 1 {
		t.Errorf("after the sweep: %d events in %d queues, %v", info.State.Msgs, info.State.Consumers, err)
	}
	// the topic goes, and its queues with it
	if err := b.js.DeleteStream(t.Context(), "gone"); err != nil {
		t.Fatal(err)
	}
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := b.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.openPutBack(t.Context()); err != nil || info.State.Consumers != 0 {
		t.Errorf("after the topic: %d queues, %v", info.State.Consumers, err)
	}
}

// A member that goes on after its group was deleted and made again, or moved, goes on with the
// queue of the group that it is in.
func TestQueuesFollowTheirGroup(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publish(t, b, "follow", numbers(3)...)
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

// Redriven to the topic, an event is a new one for all groups, and names the old one.
func TestARedriveToTheTopic(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	opts := PublishOptions{ID: "e1", TS: 42, HasTS: true, Key: "k", Headers: map[string]string{"h": "1"}, CausedBy: []string{"x"}, Tags: []string{"t"}}
	if _, err := b.Publish(t.Context(), "again", []byte(`{"n": 1}`), opts); err != nil {
		t.Fatal(err)
	}
	fail(t, b, "again", "g", "no", 1)
	one, two := take(t, b, "again", "g", SubscribeOptions{}), take(t, b, "again", "h", SubscribeOptions{})
	letter := letterList(t, b, LetterFilter{})[0]
	// a hub was lost after it had published the event
	r := &redrive{bus: b}
	ready, _, err := r.prepare(t.Context(), letter)
	if err != nil {
		t.Fatal(err)
	}
	if why, err := r.publish(t.Context(), ready); why != "" || err != nil {
		t.Fatal(why, err)
	}
	if got := redriveAll(t, b, LetterFilter{}, RedriveOptions{ToTopic: true}); got.Done != 1 {
		t.Fatalf("%+v", got)
	}
	for _, k := range []*taker{one, two} {
		d := k.next()
		e := d.Event
		if e.ID == "e1" || e.TS != 42 || e.Key != "k" || e.Headers["h"] != "1" || !slices.Equal(e.CausedBy, []string{"x", "e1"}) || string(e.Payload) != `{"n": 1}` || !slices.Equal(e.Tags, opts.Tags) || d.Attempt != 1 {
			t.Errorf("the event is %+v", e)
		}
		k.quiet(50 * time.Millisecond)
	}
	if n := len(letterList(t, b, LetterFilter{})); n != 0 {
		t.Errorf("%d letters", n)
	}
}

// A letter without the payload is redriven with the payload that the topic still has.
func TestALetterWithoutPayload(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	// control characters grow sixfold
	text := strings.Repeat("\x01", 900_000)
	publish(t, b, "large", text, text)
	fail(t, b, "large", "g", "no", 2)
	letters := letterList(t, b, LetterFilter{})
	if !letters[0].Bare {
		t.Fatalf("letter: %+v", letters[0].Reason)
	}
	s, err := b.js.Stream(t.Context(), "large")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.DeleteMsg(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	got := redriveAll(t, b, LetterFilter{Topic: "large"}, RedriveOptions{})
	if got.Done != 1 || got.Skipped != 1 || len(got.Reasons) != 1 {
		t.Errorf("%+v", got)
	}
	k := take(t, b, "large", "g", SubscribeOptions{})
	if d := k.next(); string(d.Event.Payload) != text {
		t.Errorf("the payload has %d bytes", len(d.Event.Payload))
	}
	if n := len(letterList(t, b, LetterFilter{})); n != 1 {
		t.Errorf("%d letters", n)
	}
}

// Letters that no hub has stored, and letters of older versions.
func TestForeignAndOldLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	publish(t, b, "old", "1")
	fail(t, b, "old", "g", "x", 1)
	record := `{"id":"i%d","ts":5,"topic":"old","key":"k","headers":{"Event-Encoding":"text"},"payload":"not json"}`
	bad := []string{
		`{"no":"letter"}`, `[`, `{"topic":"other","group":"g","original":{"id":"a","topic":"other","payload":1}}`,
		`{"topic":"old","group":"","original":{"id":"a","topic":"old","payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a\n","topic":"old","payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a","topic":"old","headers":{"a b":"1"},"payload":1}}`,
		`{"topic":"old","group":"g","original":{"id":"a","topic":"old","headers":{"a":"1\r\nNats-Msg-Id: x"},"payload":1}}`,
	}
	for _, payload := range bad {
		publish(t, b, "dlq.old", payload)
	}
	publish(t, b, "dlq.old", `{"topic":"old","group":"g","original":`+fmt.Sprintf(record, 1)+`,"err":"y","ts":1,"attempts":5}`,
		`{"topic":"old","group":"g","original":{"id":"i2","ts":5,"topic":"old","payload":null},"err":"y (payload of 7 bytes left out: it is at old@1)","ts":1,"attempts":5}`)
	faults := 0
	for _, l := range letterList(t, b, LetterFilter{Topic: "old"}) {
		if l.Fault != "" {
			faults++
		}
	}
	if faults != len(bad) {
		t.Errorf("%d faults of %d", faults, len(bad))
	}
	if got := redriveAll(t, b, LetterFilter{Topic: "old"}, RedriveOptions{}); got.Done != 2 || got.Skipped != len(bad)+1 {
		t.Errorf("%+v", got)
	}
	k := take(t, b, "old", "g", SubscribeOptions{})
	if got := k.payloads(2); !slices.Equal(got, []string{"1", "not json"}) {
		t.Errorf("got %q", got)
	}
	got, err := b.Admin().DeadLetters().Discard(t.Context(), LetterFilter{Topic: "old"}, RedriveOptions{})
	if err != nil || got.Done != len(bad)+1 || len(letterList(t, b, LetterFilter{})) != 0 {
		t.Errorf("discarded: %+v, %v", got, err)
	}
}

// The list is in pages, and counts are right, with and without filters.
func TestListAndCountOfLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	letters := b.Admin().DeadLetters()
	if page, err := letters.List(t.Context(), LetterFilter{}, "", 10, nil); err != nil || len(page.Letters) != 0 || page.Next != "" {
		t.Fatalf("no letters: %+v, %v", page, err)
	}
	publish(t, b, "a", numbers(20)...)
	publish(t, b, "b.c", numbers(10)...)
	fail(t, b, "a", "g", "timeout: x", 20)
	fail(t, b, "a", "h", "refused", 15)
	middle := time.Now()
	<-time.After(5 * time.Millisecond)
	fail(t, b, "b.c", "g", "Timeout", 10)
	for _, c := range []struct {
		filter LetterFilter
		want   int
	}{
		{LetterFilter{}, 45},
		{LetterFilter{Topic: "a"}, 35},
		{LetterFilter{Topic: "a", Group: "h"}, 15},
		{LetterFilter{Group: "g"}, 30},
		{LetterFilter{Reason: "timeout"}, 20},
		{LetterFilter{Reason: "imeout"}, 30},
		{LetterFilter{Until: middle}, 35},
		{LetterFilter{Since: middle.Add(time.Millisecond)}, 10},
		{LetterFilter{Topic: "none"}, 0},
		{LetterFilter{ID: "dlq@3"}, 1},
		{LetterFilter{ID: "dlq@3", Topic: "b.c"}, 0},
		{LetterFilter{ID: "groups@1"}, 0},
	} {
		list := letterList(t, b, c.filter)
		counts, err := letters.Count(t.Context(), c.filter, "", nil)
		if err != nil || len(list) != c.want || counts.Total != c.want {
			t.Errorf("%+v: list %d, count %+v, want %d, %v", c.filter, len(list), counts, c.want, err)
		}
		seen := make(map[uint64]bool)
		for _, l := range list {
			seen[l.Sequence] = true
		}
		if len(seen) != c.want {
			t.Errorf("%+v: %d different", c.filter, len(seen))
		}
	}
	counts, err := letters.Count(t.Context(), LetterFilter{}, "", nil)
	if err != nil || len(counts.Groups) != 3 || counts.Groups[1].Topic != "a" || counts.Groups[1].Group != "h" || counts.Groups[1].Count != 15 {
		t.Errorf("counts: %+v, %v", counts, err)
	}
	for _, filter := range []LetterFilter{{Topic: "dlq.a"}, {Topic: "a..b"}, {Group: "\n"}, {Since: middle.Add(time.Second), Until: middle}, {Reason: strings.Repeat("x", 2000)}} {
		if _, err := letters.List(t.Context(), filter, "", 1, nil); err == nil {
			t.Errorf("%+v: no error", filter)
		}
	}
	if _, err := letters.List(t.Context(), LetterFilter{}, "nonsense", 1, nil); err == nil {
		t.Error("a cursor of nonsense: no error")
	}
	progress := 0
	got, err := letters.Redrive(t.Context(), LetterFilter{Topic: "a"}, RedriveOptions{DryRun: true, Progress: func(r Redriven) error { progress = r.Matched; return nil }})
	if err != nil || got.Matched != 35 || progress != 35 || len(letterList(t, b, LetterFilter{})) != 45 {
		t.Errorf("a dry run: %+v, %v", got, err)
	}
	if _, err := letters.Discard(t.Context(), LetterFilter{ID: "dlq:none"}, RedriveOptions{}); !errors.Is(err, ErrNotFound) {
		t.Errorf("an id that there is not: %v", err)
	}
}

// A redrive stops at the limits, and keeps its rate.
func TestLimitsOfARedrive(t *testing.T) {
	t.Parallel()
	c := &counter{}
	b := open(t, Config{URL: natsServer(t), Observer: c, Limits: Limits{PutBack: 20, PutBackShare: 12 * deadOverhead}})
	publish(t, b, "limits", numbers(30)...)
	fail(t, b, "limits", "g", "no", 30)
	letters := b.Admin().DeadLetters()
	began := time.Now()
	got, err := letters.Redrive(t.Context(), LetterFilter{}, RedriveOptions{Rate: 20, Client: "jwt:eve"})
	if known, ok := errors.AsType[*Error](err); !ok || known.Code != CodeRateLimited || got.Done < 8 || got.Done > 12 {
		t.Errorf("beyond the share: %+v, %v", got, err)
	}
	if took := time.Since(began); took < 300*time.Millisecond {
		t.Errorf("%d letters at 20 a second took %v", got.Done, took)
	}
	got, err = letters.Redrive(t.Context(), LetterFilter{}, RedriveOptions{Rate: 20})
	if known, ok := errors.AsType[*Error](err); !ok || known.Code != CodeOverloaded {
		t.Errorf("beyond the group's limit: %+v, %v", got, err)
	}
	waiting := int(backlog(t, b, "limits").PutBack)
	if left := len(letterList(t, b, LetterFilter{})); waiting+left != 30 || waiting > 20 {
		t.Errorf("%d wait, %d letters are left", waiting, left)
	}
	if c.limit("put_back") != 1 || c.limit("put_back_share") != 1 {
		t.Errorf("limits reached: %v", c.counts)
	}
	if _, err := letters.Redrive(t.Context(), LetterFilter{}, RedriveOptions{Rate: 10_001}); err == nil {
		t.Error("a rate beyond the limit")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := letters.Redrive(ctx, LetterFilter{}, RedriveOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a redrive that nobody waits for: %v", err)
	}
}

// On three servers, with a hub that redrives and another that has the member, each event is put
// back once, although the leaders of both streams change meanwhile.
func TestARedriveOnACluster(t *testing.T) {
	t.Parallel()
	const n = 300
	servers := natstest.RunCluster(t, 3)
	cfg := Config{URL: natstest.ClientURLs(servers...), Replicas: 3}
	b, other := open(t, cfg), open(t, cfg)
	publish(t, b, "three", numbers(n)...)
	fail(t, b, "three", "g", "no", n)
	k := take(t, other, "three", "g", SubscribeOptions{})
	moved := false
	got := redriveAll(t, b, LetterFilter{}, RedriveOptions{Rate: 2_000, Progress: func(r Redriven) error {
		if r.Matched > n/3 && !moved {
			moved = true
			for _, stream := range []string{putBackStream, "dlq"} {
				var answer struct {
					Success bool `json:"success"`
				}
				if err := b.askAPI(t.Context(), "STREAM.LEADER.STEPDOWN."+stream, struct{}{}, &answer); err != nil || !answer.Success {
					t.Errorf("the leader of %s stays: %v", stream, err)
				}
			}
		}
		return nil
	}})
	if got.Done != n || !moved {
		t.Errorf("%+v", got)
	}
	payloads := k.payloads(n)
	slices.Sort(payloads)
	if len(slices.Compact(payloads)) != n {
		t.Errorf("%d different events", len(slices.Compact(payloads)))
	}
	k.quiet(200 * time.Millisecond)
	info, err := b.openPutBack(t.Context())
	if err != nil || info.State.LastSeq != n || info.Config.Replicas != 3 {
		t.Errorf("%d copies, %v", info.State.LastSeq, err)
	}
}

// A group with a TTL takes its queue along when it ends.
func TestAQueueEndsWithItsTTL(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), AckWait: time.Second})
	publish(t, b, "tab", "1")
	k := take(t, b, "tab", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: 2 * time.Second})
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter", func() bool { return len(letterList(t, b, LetterFilter{})) == 1 })
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	if err := b.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if n := backlog(t, b, "tab").PutBack; n != 1 {
		t.Errorf("%d wait for a group that may come back", n)
	}
	eventually(t, "the queue is gone", func() bool {
		if err := b.sweepPutBack(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		info, err := b.openPutBack(t.Context())
		return err == nil && info.State.Consumers == 0 && info.State.Msgs == 0
	})
}

// Pausing a group stops what was put back to it, too: a queue that is there, and one that is made
// during the pause.
func TestAPausedGroupIsGivenNothingBack(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publish(t, b, "orders", "first", "second")
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
