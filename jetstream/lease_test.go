package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"eventhub/jetstream/embedded"
	"eventhub/jetstream/event"
)

func TestMaxInFlightHoldsAcrossTopics(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	topics := []string{"fan.a", "fan.b", "fan.c", "fan.d"}
	for _, topic := range topics {
		publishAll(t, b, topic, topic, topic, topic)
	}
	k := take(t, b, topics[0], "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 2, Topics: topics[1:]})
	seen := map[string]int{}
	var held []*Delivery
	for range 12 {
		held = append(held, k.next())
		d := held[len(held)-1]
		seen[d.Event.Topic]++
		if d.Attempt != 1 {
			t.Errorf("%s: attempt %d", d.Event.Topic, d.Attempt)
		}
		if len(held) == 2 {
			k.sub.mu.Lock()
			if k.sub.active > 2 {
				t.Errorf("%d are out", k.sub.active)
			}
			k.sub.mu.Unlock()
			if err := held[0].Ack(); err != nil {
				t.Fatal(err)
			}
			held = held[1:]
		}
	}
	for _, topic := range topics {
		if seen[topic] != 3 {
			t.Errorf("got %v", seen)
		}
	}
}

func TestFilterSettlesWhatItRefuses(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	receipts := publishAll(t, b, "filter", numbers(300)...)
	k := take(t, b, "filter", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 2, Filter: func(e *event.Event) bool { return e.Payload[0] == '9' }})
	want := []string{"9", "90", "91", "92", "93", "94", "95", "96", "97", "98", "99"}
	if got := k.payloads(len(want)); !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	eventually(t, "all is settled", func() bool {
		c, err := b.Group("filter", "g").Cursor(t.Context())
		return err == nil && c.LastID == receipts[299].ID
	})
}

func TestPauseGivesBackWhatHasNotBegun(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	one, two := open(t, Config{URL: url}), open(t, Config{URL: url})
	publishAll(t, one, "pause", numbers(6)...)
	a := take(t, one, "pause", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 4})
	first := a.next()
	eventually(t, "four are out", func() bool { return len(a.ch) == 3 })
	if err := a.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := take(t, two, "pause", "g", SubscribeOptions{})
	got := c.payloads(5)
	slices.Sort(got)
	if !slices.Equal(got, numbers(6)[1:]) {
		t.Errorf("got %q", got)
	}
	a.quiet(20 * time.Millisecond)
	if err := first.Ack(); err != nil {
		t.Errorf("the lease did not outlive the pause: %v", err)
	}
	if err := c.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.sub.Resume()
	publishAll(t, two, "pause", "after")
	if got := a.payloads(1); got[0] != "after" {
		t.Errorf("got %q", got)
	}
}

func TestDrainWaitsForLeases(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "drain", "1", "2")
	k := take(t, b, "drain", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 1, MaxAttempts: 1})
	d := k.next()
	done := make(chan error)
	go func() { done <- k.sub.Drain(t.Context()) }()
	select {
	case <-done:
		t.Fatal("drained with a lease out")
	case <-time.After(20 * time.Millisecond):
	}
	if err := d.Ack(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	k.quiet(20 * time.Millisecond)
	again := take(t, b, "drain", "g", SubscribeOptions{})
	if got := again.next(); string(got.Event.Payload) != "2" {
		t.Errorf("got %s", got.Event.Payload)
	}
}

func TestALeaseThatTheHubMayHaveLostIsNotSettled(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: 30 * time.Second})
	publishAll(t, b, "fence", "1", "2")
	k := take(t, b, "fence", "g", SubscribeOptions{From: FromEarliest})
	late, fresh := k.next(), k.next()
	k.sub.mu.Lock()
	late.touched -= int64(26 * time.Second) // as if the server had not heard of it for so long
	k.sub.mu.Unlock()
	if err := late.Ack(); !errors.Is(err, event.ErrNotLeased) {
		t.Errorf("got %v", err)
	}
	if err := fresh.Ack(); err != nil {
		t.Errorf("got %v", err)
	}
	if err := fresh.Ack(); !errors.Is(err, event.ErrNotLeased) {
		t.Errorf("settled twice: %v", err)
	}
}

func TestAHubThatStoodStillForgetsItsLeases(t *testing.T) {
	t.Parallel()
	forgetsItsLeases(t, Config{}, func(b *Bus) {
		b.clock.LastTick.Add(-int64(10 * time.Second)) // as the ticker finds it after SIGCONT
	})
}

func TestAHubWhoseClockJumpsForgetsItsLeases(t *testing.T) {
	t.Parallel()
	var jump atomic.Int64
	forgetsItsLeases(t, Config{Clock: func() time.Time { return time.Now().Add(time.Duration(jump.Load())) }}, func(*Bus) {
		jump.Add(int64(10 * time.Minute)) // the machine slept
	})
}

// forgetsItsLeases stalls a hub once, and settles what the hub leased before and after.
func forgetsItsLeases(t *testing.T, cfg Config, stall func(*Bus)) {
	t.Helper()
	unlessStalledAgain(t, 1, func(log *slog.Logger) error {
		cfg.AckWait, cfg.Logger = time.Second, log
		b := open(t, cfg)
		publishAll(t, b, "stall", "1")
		k := take(t, b, "stall", "g", SubscribeOptions{From: FromEarliest, AckTimeout: time.Minute})
		d := k.next()
		stall(b)
		if err := d.Ack(); !errors.Is(err, event.ErrNotLeased) {
			return fmt.Errorf("the ack of a lease from before: %v", err) //nolint:errorlint // may be nil
		}
		again := k.next()
		if again.Attempt != 2 {
			return fmt.Errorf("attempt %d", again.Attempt)
		}
		return again.Ack()
	})
}

// lineCount is a log that counts its lines with a text.
type lineCount struct {
	slog.Handler
	text  string
	lines *atomic.Int64
}

// countLines is a log of the test that counts the lines with a text.
func countLines(t *testing.T, text string) (log *slog.Logger, lines *atomic.Int64) {
	t.Helper()
	lines = new(atomic.Int64)
	return slog.New(lineCount{slog.NewTextHandler(t.Output(), nil), text, lines}), lines
}

func (l lineCount) WithAttrs(attrs []slog.Attr) slog.Handler {
	return lineCount{l.Handler.WithAttrs(attrs), l.text, l.lines}
}

func (l lineCount) WithGroup(name string) slog.Handler {
	return lineCount{l.Handler.WithGroup(name), l.text, l.lines}
}

func (l lineCount) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, l.text) {
		l.lines.Add(1)
	}
	return l.Handler.Handle(ctx, r)
}

// unlessStalled runs f, whose buses have its logger. On a machine that is so busy that the process
// stands still for a part of AckWait, buses give their leases up, as they must: then a failure says
// nothing, and f runs again, five times at most.
func unlessStalled(t *testing.T, f func(*slog.Logger) error) {
	t.Helper()
	unlessStalledAgain(t, 0, f)
}

// unlessStalledAgain is unlessStalled for an f that has the process stand still so many times.
func unlessStalledAgain(t *testing.T, times int64, f func(*slog.Logger) error) {
	t.Helper()
	for round := 1; ; round++ {
		log, stalled := countLines(t, "the process stood still")
		err := f(log)
		if err == nil {
			return
		}
		if stalled.Load() <= times || round == 5 {
			t.Fatalf("round %d: %v", round, err)
		}
	}
}

func TestLeasesAreHeldFarBeyondAckWait(t *testing.T) {
	t.Parallel()
	unlessStalled(t, func(log *slog.Logger) error { return holdFarBeyondAckWait(t, log) })
}

func holdFarBeyondAckWait(t *testing.T, log *slog.Logger) error {
	t.Helper()
	b := open(t, Config{AckWait: time.Second, Logger: log})
	defer func() { _ = b.Close() }()
	publishAll(t, b, "long", numbers(50)...)
	k := take(t, b, "long", "g", SubscribeOptions{From: FromEarliest, MaxInFlight: 40, AckTimeout: time.Minute})
	begun := make([]*Delivery, 20)
	for i := range begun {
		begun[i] = k.next()
	}
	eventually(t, "40 are out", func() bool {
		k.sub.mu.Lock()
		defer k.sub.mu.Unlock()
		return len(k.sub.out) == 40
	})
	// Three times AckWait, for leases and for what only waits to be handed out.
	select {
	case <-time.After(3 * time.Second):
	case <-t.Context().Done():
	}
	for _, d := range begun {
		if err := d.Ack(); err != nil {
			return fmt.Errorf("%s: %w", d.Event.Payload, err)
		}
	}
	for range 30 {
		d := k.next()
		if d.Attempt != 1 {
			return fmt.Errorf("%s: attempt %d", d.Event.Payload, d.Attempt)
		}
		if err := d.Ack(); err != nil {
			return fmt.Errorf("%s: %w", d.Event.Payload, err)
		}
	}
	return nil
}

func TestDeadLetter(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	r := publishAll(t, b, "poison", `{"n":12345678901234567890}`)[0]
	k := take(t, b, "poison", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 3})
	dead := take(t, b, "dlq.poison", "undertaker", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	for attempt := 1; attempt <= 3; attempt++ {
		d := k.next()
		if d.Attempt != attempt {
			t.Errorf("attempt %d, want %d", d.Attempt, attempt)
		}
		d.m.sub.mu.Lock()
		// as after BeginSend: the letter is read from the stream
		d.released, d.Event.Payload = true, nil
		d.m.sub.mu.Unlock()
		if err := d.Nack("bad luck", 0); err != nil {
			t.Fatal(err)
		}
	}
	letter := dead.next()
	var got struct {
		Topic, Group, Err string
		Attempts          int
		TS                int64
		Original          struct {
			ID, Topic string
			Payload   json.RawMessage
		}
	}
	if err := json.Unmarshal(letter.Event.Payload, &got); err != nil {
		t.Fatal(err)
	}
	if got.Topic != "poison" || got.Group != "g" || got.Err != "bad luck" || got.Attempts != 3 || got.TS == 0 ||
		got.Original.ID != r.ID || string(got.Original.Payload) != `{"n":12345678901234567890}` {
		t.Errorf("got %s", letter.Event.Payload)
	}
	k.quiet(30 * time.Millisecond)
	eventually(t, "the group moves on", func() bool {
		c, err := b.Group("poison", "g").Cursor(t.Context())
		return err == nil && c.LastID == r.ID
	})
	// A group on dlq.** never dead-letters.
	if err := letter.Nack("", 0); err != nil {
		t.Fatal(err)
	}
	if d := dead.next(); d.Attempt != 2 {
		t.Errorf("attempt %d", d.Attempt)
	}
	if n, _ := scanned(t, b, "dlq.dlq.poison"); n != 0 {
		t.Errorf("%d dead letters of a dead letter", n)
	}
}

func TestOnlyALostSubscriberDeadLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "end", "1", "2")
	opts := SubscribeOptions{From: FromEarliest, MaxAttempts: 1}
	k := take(t, b, "end", "g", opts)
	one := k.next()
	eventually(t, "the second has arrived", func() bool { return len(k.ch) == 1 })
	if err := k.sub.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	k = take(t, b, "end", "g", opts)
	eventually(t, "both have arrived", func() bool { return len(k.ch) == 2 })
	for range 2 {
		h := <-k.ch
		again := h.Event.ID == one.Event.ID
		if attempt := map[bool]int{false: 1, true: 2}[again]; h.Attempt != attempt {
			t.Errorf("event %s is attempt %d, want %d", h.Event.Payload, h.Attempt, attempt)
		}
		if again {
			if _, ok := h.Begin(); !ok {
				t.Error("the event that was handed out before is not valid")
			}
		}
	}
	if err := k.sub.Disconnect(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Only the one that had begun is dead; the other was never handed out.
	k = take(t, b, "end", "g", opts)
	other := k.next()
	if other.Event.ID == one.Event.ID {
		t.Error("the dead letter is delivered again")
	}
	k.quiet(30 * time.Millisecond)
	eventually(t, "one dead letter", func() bool { n, _ := scanned(t, b, "dlq.end"); return n == 1 })
}

func TestOldestLeaseOfAnIDIsSettledFirst(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	for _, topic := range []string{"same.a", "same.b"} {
		if _, err := b.Publish(t.Context(), topic, []byte(`"`+topic+`"`), PublishOptions{ID: "x"}); err != nil {
			t.Fatal(err)
		}
	}
	k := take(t, b, "same.a", "g", SubscribeOptions{From: FromEarliest, Topics: []string{"same.b"}})
	first, second := k.next(), k.next()
	if !k.sub.Ack("x") {
		t.Fatal("no lease")
	}
	if first.Extend(0) == nil {
		t.Error("the younger lease was settled")
	}
	if err := second.Extend(0); err != nil {
		t.Error(err)
	}
	if !k.sub.Nack("x", "", 0) || k.sub.Ack("x") {
		t.Error("the second lease is not what was refused")
	}
}

func TestConsume(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "work", numbers(20)...)
	var tries atomic.Int64
	var mu sync.Mutex
	seen := map[string]int{}
	all := make(chan struct{})
	s, err := b.Consume(t.Context(), "work", "g", SubscribeOptions{From: FromEarliest, Workers: 4}, func(_ context.Context, d *Delivery) error {
		if tries.Add(1)%3 == 0 {
			return errors.New("again")
		}
		mu.Lock()
		defer mu.Unlock()
		seen[string(d.Event.Payload)]++
		if len(seen) == 20 {
			close(all)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-all:
	case <-time.After(wait):
		t.Fatal("not all were handled")
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for payload, n := range seen {
		if n != 1 {
			t.Errorf("%s was handled %d times", payload, n)
		}
	}
}

func TestHeldBytesStopThePull(t *testing.T) {
	t.Parallel()
	b := open(t, Config{Limits: Limits{HeldBytes: 64 << 10}, MemoryStorage: true})
	large := `"` + string(make([]byte, 0, 1)) + "x" + `"`
	for range 20 {
		if _, err := b.Publish(t.Context(), "large", append([]byte(large), make([]byte, 1<<20-8)...), PublishOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	k := take(t, b, "large", "g", SubscribeOptions{From: FromEarliest})
	k.next()
	k.sub.mu.Lock()
	held := k.sub.heldBytes
	k.sub.mu.Unlock()
	if limit := 64<<10 + embedded.MaxMessage + event.PayloadMargin; held > limit {
		t.Errorf("%d bytes are held, at most %d should be", held, limit)
	}
	for range 19 {
		d := k.next()
		if err := d.Ack(); err != nil {
			t.Fatal(err)
		}
	}
}

// What was refused, ran out or was given back is still owed when the consumer has to be created
// again.
func TestUnsettledEventsSurviveTheirConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "owed", "0", "1", "2")
	k := take(t, b, "owed", "g", SubscribeOptions{From: FromEarliest})
	if err := k.next().Nack("", time.Minute); err != nil {
		t.Fatal(err)
	}
	k.payloads(2)
	if err := b.conn.JS.DeleteConsumer(t.Context(), "owed", "g"); err != nil {
		t.Fatal(err)
	}
	// again from the oldest unsettled one
	if got := k.payloads(3); !slices.Equal(got, []string{"0", "1", "2"}) {
		t.Errorf("got %q", got)
	}
}

func TestAPausedMemberKeepsItsGroup(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: time.Second})
	publishAll(t, b, "tabs", "before")
	k := take(t, b, "tabs", "g", SubscribeOptions{GroupTTL: time.Second})
	if err := k.sub.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	publishAll(t, b, "tabs", "while paused")
	select { // longer than the TTL and what the server adds to it
	case <-time.After(4 * time.Second):
	case <-t.Context().Done():
	}
	if _, err := b.Group("tabs", "g").Cursor(t.Context()); err != nil {
		t.Fatalf("the group is gone: %v", err)
	}
	k.sub.Resume()
	if got := k.payloads(1); got[0] != "while paused" {
		t.Errorf("got %q", got)
	}
}

func TestADeadLetterThatIsTooBigIsStoredWithoutItsPayload(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t)})
	topic := "huge"
	publishAll(t, b, topic, "1")
	if _, err := b.conn.JS.Publish(t.Context(), "event.huge", []byte(strings.Repeat("\x01", 300<<10))); err != nil {
		t.Fatal(err)
	}
	k := take(t, b, topic, "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	k.payloads(1)
	dead := take(t, b, "dlq.huge", "d", SubscribeOptions{From: FromEarliest})
	if err := k.next().Nack(strings.Repeat("é", 1<<20), -1); err != nil {
		t.Fatal(err)
	}
	letter := dead.next().Event.Payload
	if len(letter) > 4<<10 || !strings.Contains(string(letter), "huge@2") || !json.Valid(letter) {
		t.Errorf("got %d bytes: %.3000s", len(letter), letter)
	}
}

func TestSeekDoesNotSwallowDeadLetters(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	const n = 200
	publishAll(t, b, "twice", numbers(n)...)
	k := take(t, b, "twice", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, MaxInFlight: n})
	fail := func() {
		for range n {
			if err := k.next().Nack("no", -1); err != nil {
				t.Fatal(err)
			}
		}
	}
	fail()
	if err := b.Group("twice", "g").Seek(t.Context(), FromEarliest); err != nil {
		t.Fatal(err)
	}
	fail()
	// those of the first that were still queued are n at most
	eventually(t, "all letters of both generations", func() bool {
		n2, err := scanned(t, b, "dlq.twice")
		return err == nil && n2 > n
	})
	eventually(t, "the group is through", func() bool {
		c, err := b.Group("twice", "g").Cursor(t.Context())
		return err == nil && c.LastID != ""
	})
}

func TestCloseCarriesDeadLetters(t *testing.T) {
	t.Parallel()
	url := natsServer(t)
	b, other := open(t, Config{URL: url}), open(t, Config{URL: url})
	const n = 60
	publishAll(t, b, "last", numbers(n)...)
	k := take(t, b, "last", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, MaxInFlight: n})
	for range n {
		if err := k.next().Nack("no", -1); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := scanned(t, other, "dlq.last"); got != n || err != nil {
		t.Errorf("%d letters, %v", got, err)
	}
	take(t, other, "last", "g", SubscribeOptions{}).quiet(100 * time.Millisecond)
}

func TestModackDuringTheWriteCounts(t *testing.T) {
	t.Parallel()
	b := open(t, Config{})
	publishAll(t, b, "early", "1")
	k := take(t, b, "early", "g", SubscribeOptions{From: FromEarliest})
	h := <-k.ch
	sending, ok := h.BeginSend()
	if !ok {
		t.Fatal("not valid")
	}
	if !k.sub.Extend(h.Event.ID, time.Second) {
		t.Fatal("not leased")
	}
	sending.Written()
	if left := time.Until((*Delivery)(h).Deadline()); left > 2*time.Second {
		t.Errorf("%v are left", left)
	}
}
