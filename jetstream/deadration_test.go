package jetstream

import (
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/event"
	"eventhub/jetstream/topics"
)

// Beyond its ration, the letters of a client wait. Its events are not delivered again meanwhile,
// and the letters of others, on the same topic too, do not wait.
func TestDeadLettersOfAClientAreRationed(t *testing.T) {
	t.Parallel()
	const events, size = 9, 10_000
	b := open(t, Config{AckWait: 3 * time.Second, Limits: Limits{DeadLetterBurst: 4 * size, DeadLetterRate: size}})
	for range events {
		publishAll(t, b, "rationed", `"`+strings.Repeat("x", size-2)+`"`)
	}
	began := time.Now()
	fail := func(client, group string) *taker {
		t.Helper()
		k := take(t, b, "rationed", group, SubscribeOptions{From: FromEarliest, MaxAttempts: 1, CountFor: client})
		for range 3 {
			if err := k.next().Nack("no", 0); err != nil {
				t.Fatal(err)
			}
		}
		return k
	}
	greedy := fail("greedy", "g")
	for range events - 3 {
		if err := greedy.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
	}
	other := fail("other", "h")
	lettersFor := func(group string) (n int) {
		err := b.History("dlq.rationed").Scan(t.Context(), ScanOptions{}, func(e *event.Event) error {
			if strings.Contains(string(e.Payload[:200]), `"group":"`+group+`"`) {
				n++
			}
			return nil
		})
		if err != nil && !strings.Contains(err.Error(), "not found") {
			t.Fatal(err)
		}
		return n
	}
	eventually(t, "the letters of the other client", func() bool { return lettersFor("h") == 3 })
	if n := lettersFor("g"); n > 4+int(time.Since(began).Seconds()+1) {
		t.Errorf("the greedy client has %d letters after %v", n, time.Since(began))
	}
	if err := other.sub.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	greedy.quiet(7 * time.Second / 2) // longer than AckWait
	eventually(t, "all letters in the end", func() bool { return lettersFor("g") == events })
	if took := time.Since(began); took < (events-6)*time.Second {
		t.Errorf("%d letters took only %v", events, took)
	}
	eventually(t, "the events are settled", func() bool { return leasedOf(t, b, "rationed") == 0 })
}

// A full stream of dead letters removes none: new ones wait for room.
func TestAFullStreamOfDeadLettersKeepsThem(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: 2 * time.Second, deadRetry: time.Second, Topics: []topics.Rule{{Pattern: "dlq.**", Family: "dlq", MaxBytes: 30_000}}})
	payload := `"` + strings.Repeat("x", 8_000) + `"`
	publishAll(t, b, "victim", payload)
	for range 6 {
		publishAll(t, b, "greedy", payload)
	}
	victim := take(t, b, "victim", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	if err := victim.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the victim's letter", func() bool { return lettersOf(t, b, "victim") == 1 })
	greedy := take(t, b, "greedy", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	for range 6 {
		if err := greedy.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
	}
	greedy.quiet(5 * time.Second / 2) // longer than AckWait
	if n := lettersOf(t, b, "victim"); n != 1 {
		t.Fatal("the victim's letter was pushed out")
	}
	if n := lettersOf(t, b, "greedy"); n != 2 {
		t.Errorf("%d letters, want the 2 that fit", n)
	}
	s, err := b.conn.JS.Stream(t.Context(), "dlq")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(t.Context(), natsjs.WithPurgeSubject(plainSubject("dlq.greedy"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "those that waited", func() bool { return lettersOf(t, b, "greedy") >= 2 })
}

// A group whose letters wait gets no further events, so that what waits is bounded.
func TestAGroupWhoseLettersWaitIsPaused(t *testing.T) {
	t.Parallel()
	const most = 16
	b := open(t, Config{Limits: Limits{DeadLetters: most}})
	for range 3 * most {
		publishAll(t, b, "paused", "1")
	}
	deadStream(t, b).away()
	k := take(t, b, "paused", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, MaxInFlight: 1})
	got := 0
	for idle := time.After(2 * time.Second); idle != nil; {
		select {
		case h := <-k.ch:
			d, ok := h.Begin()
			if !ok {
				continue
			}
			if got++; d.Attempt > 1 {
				t.Fatal("an event that failed for good came again")
			}
			if err := d.Nack("no", 0); err != nil {
				t.Fatal(err)
			}
		case <-idle:
			idle = nil
		}
	}
	if want := max(most/deadGroupPart, 1); got < 1 || got > want+1 {
		t.Errorf("%d events were delivered, want about %d", got, want)
	}
}

// A bound on dead letters that exist already is applied without removing any of them.
func TestABoundOnDeadLettersRemovesNone(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	before := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "dlq.**", Family: "dlq"}}})
	deadStream(t, before).change(func(cfg *natsjs.StreamConfig) { cfg.Discard, cfg.MaxBytes = natsjs.DiscardOld, -1 })
	for range 5 {
		publishAll(t, before, "dlq.orders", `"`+strings.Repeat("x", 1_000)+`"`)
	}
	b := open(t, Config{URL: url, Topics: []topics.Rule{{Pattern: "dlq.**", Family: "dlq", MaxBytes: 2_000}}})
	changes, err := b.Admin().ApplyTopics(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range changes {
		if !c.Done {
			t.Errorf("%s was not done: %v", c.String(), c.Err)
		}
	}
	if n := lettersOf(t, b, "orders"); n != 5 {
		t.Errorf("%d letters are left", n)
	}
	if _, err := b.Publish(t.Context(), "dlq.orders", []byte("1"), PublishOptions{}); !Refused(err) {
		t.Errorf("a full stream of dead letters takes more: %v", err)
	}
}
