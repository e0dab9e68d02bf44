package jetstream

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/event"
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
	// The group has no member, so the event waits. The server counts what a consumer has to deliver
	// a moment after it has stored it.
	if got := redriveAll(t, other, LetterFilter{ID: second.ID}, RedriveOptions{}); got.Done != 1 {
		t.Errorf("redriven: %+v", got)
	}
	eventually(t, "the event waits", func() bool { return backlog(t, b, "orders").PutBack == 1 })
	if got := backlog(t, b, "orders"); got.Waiting != 0 {
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
	publishAll(t, b, "orders", `"fresh"`)
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

// Several redrives of the same letters at a time, on two hubs, put each event back once.
func TestRedrivesAtTheSameTime(t *testing.T) {
	t.Parallel()
	const n = 200
	url := natsServer(t)
	hubs := []*Bus{open(t, Config{URL: url}), open(t, Config{URL: url})}
	publishAll(t, hubs[0], "rush", numbers(n)...)
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

// A redrive that looks while another has stored the copies and not yet removed the letters puts
// nothing back again, although the copies are settled before it stores its own.
func TestARedriveBetweenCopyAndRemoval(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b, other := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, b, "rush", numbers(3)...)
	fail(t, b, "rush", "g", "no", 3)
	batch := letterList(t, b, LetterFilter{Topic: "rush"})
	look := func(b *Bus) (*redrive, []*putting, uint64) {
		r := &redrive{letters: b.letters, opts: RedriveOptions{Rate: maxRedriveRate}, queues: make(map[[2]string]queueOf)}
		if err := r.findQueues(t.Context(), batch); err != nil {
			t.Fatal(err)
		}
		out, last, err := r.look(t.Context(), batch)
		if err != nil || len(out) != len(batch) {
			t.Fatalf("%d of %d letters, %v", len(out), len(batch), err)
		}
		return r, out, last
	}
	end := func(r *redrive, out []*putting) {
		if again, err := r.ended(t.Context(), out); err != nil || len(again) > 0 {
			t.Fatalf("%d letters are to be tried again, %v", len(again), err)
		}
		if r.result.Done != len(batch) {
			t.Errorf("%+v", r.result)
		}
	}
	first, out, last := look(b)
	first.send(t.Context(), out, last)
	second, late, lastSeen := look(other)
	k := take(t, b, "rush", "g", SubscribeOptions{})
	end(first, out)
	k.payloads(len(batch))
	eventually(t, "nothing waits", func() bool { got := backlog(t, b, "rush"); return got.PutBack+got.PutBackLeased == 0 })
	second.send(t.Context(), late, lastSeen)
	end(second, late)
	k.quiet(200 * time.Millisecond)
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
	r := &redrive{letters: b.letters}
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
	publishAll(t, b, "large", text, text)
	fail(t, b, "large", "g", "no", 2)
	letters := letterList(t, b, LetterFilter{})
	if !letters[0].Bare {
		t.Fatalf("letter: %+v", letters[0].Reason)
	}
	s, err := b.conn.JS.Stream(t.Context(), "large")
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

// A redrive stops at the limits, and keeps its rate.
func TestLimitsOfARedrive(t *testing.T) {
	t.Parallel()
	c := &counter{}
	b := open(t, Config{URL: natsServer(t), Observer: c, Limits: Limits{PutBack: 20, PutBackShare: 12 * deadOverhead}})
	publishAll(t, b, "limits", numbers(30)...)
	fail(t, b, "limits", "g", "no", 30)
	letters := b.Admin().DeadLetters()
	began := time.Now()
	got, err := letters.Redrive(t.Context(), LetterFilter{}, RedriveOptions{Rate: 20, Client: "jwt:eve"})
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeRateLimited || got.Done < 8 || got.Done > 12 {
		t.Errorf("beyond the share: %+v, %v", got, err)
	}
	if took := time.Since(began); took < 300*time.Millisecond {
		t.Errorf("%d letters at 20 a second took %v", got.Done, took)
	}
	got, err = letters.Redrive(t.Context(), LetterFilter{}, RedriveOptions{Rate: 20})
	if known, ok := errors.AsType[*event.Error](err); !ok || known.Code != event.CodeOverloaded {
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
	publishAll(t, b, "three", numbers(n)...)
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
				if err := b.conn.AskAPI(t.Context(), "STREAM.LEADER.STEPDOWN."+stream, struct{}{}, &answer); err != nil || !answer.Success {
					t.Errorf("the leader of %s stays: %v", stream, err)
				}
			}
		}
		return nil
	}})
	if got.Done != n || !moved {
		t.Errorf("%+v", got)
	}
	// A pull that came to a leader just before another one may be lost, and is repeated after 15 s.
	select {
	case h := <-k.ch:
		k.ch <- h
	case <-time.After(slow):
		t.Fatal("no event comes")
	}
	payloads := k.payloads(n)
	slices.Sort(payloads)
	if len(slices.Compact(payloads)) != n {
		t.Errorf("%d different events", len(slices.Compact(payloads)))
	}
	k.quiet(200 * time.Millisecond)
	info, err := b.queues.openPutBack(t.Context())
	if err != nil || info.State.LastSeq != n || info.Config.Replicas != 3 {
		t.Errorf("%d copies, %v", info.State.LastSeq, err)
	}
}
