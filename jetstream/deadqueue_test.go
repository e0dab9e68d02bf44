package jetstream

import (
	"strconv"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"eventhub/jetstream/topics"
)

// letterTopic is the stream of the dead letters, which can be made to take none.
type letterTopic struct {
	t       *testing.T
	b       *Bus
	subject []string
}

func deadStream(t *testing.T, b *Bus) *letterTopic {
	t.Helper()
	if _, err := b.streams.Topic(t.Context(), "dlq.any", ""); err != nil {
		t.Fatal(err)
	}
	l := &letterTopic{t: t, b: b}
	l.change(func(cfg *natsjs.StreamConfig) { l.subject = cfg.Subjects })
	return l
}

func (l *letterTopic) change(f func(*natsjs.StreamConfig)) {
	l.t.Helper()
	s, err := l.b.conn.JS.Stream(l.t.Context(), "dlq")
	if err != nil {
		l.t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	f(&cfg)
	if _, err := l.b.conn.JS.UpdateStream(l.t.Context(), cfg); err != nil {
		l.t.Fatal(err)
	}
}

// away has nobody listen for letters.
func (l *letterTopic) away() {
	l.t.Helper()
	l.change(func(cfg *natsjs.StreamConfig) { cfg.Subjects = []string{"nowhere"} })
}

func (l *letterTopic) back() {
	l.t.Helper()
	l.change(func(cfg *natsjs.StreamConfig) { cfg.Subjects = l.subject })
}

func leasedOf(t *testing.T, b *Bus, stream string) int {
	t.Helper()
	backlog, err := b.Group(stream, "g").Backlog(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return int(backlog.Leased)
}

func lettersOf(t *testing.T, b *Bus, topic string) int {
	t.Helper()
	n, err := scanned(t, b, "dlq."+topic)
	if err != nil && !strings.Contains(err.Error(), "not found") {
		t.Fatal(err)
	}
	return n
}

// While no letter can be stored, an event that failed for good is given to nobody; then it has its
// letter, once.
func TestAnEventWaitsForItsLetter(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1, AckWait: 2 * time.Second, deadRetry: time.Second})
	publishAll(t, b, "waits", "1")
	dlq := deadStream(t, b)
	dlq.away()
	k := take(t, b, "waits", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	if err := k.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	k.quiet(9 * time.Second / 2) // more than twice AckWait
	dlq.back()
	eventually(t, "the letter", func() bool { return lettersOf(t, b, "waits") == 1 })
	eventually(t, "the event is settled", func() bool { return leasedOf(t, b, "waits") == 0 })
	eventually(t, "nothing is left of it", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		return len(b.dead.topics) == 0 && len(b.dead.waiting) == 0
	})
}

// A letter that waits says nothing about a consumer that was created again under the same name.
func TestALetterThatWaitsSettlesNoOtherConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1})
	publishAll(t, b, "anew", "1")
	dlq := deadStream(t, b)
	dlq.away()
	k := take(t, b, "anew", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	k.next()
	if err := k.sub.Disconnect(t.Context()); err != nil {
		t.Fatal(err)
	}
	// longer than the hub takes the consumer for the same without asking
	<-time.After(1200 * time.Millisecond)
	if err := b.Group("anew", "g").Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	k = take(t, b, "anew", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: NeverGiveUp})
	d := k.next()
	dlq.back()
	eventually(t, "no letter waits", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		return len(b.dead.waiting) == 0
	})
	if n := lettersOf(t, b, "anew"); n != 0 {
		t.Errorf("%d letters of a consumer that is gone", n)
	}
	if n := leasedOf(t, b, "anew"); n != 1 {
		t.Errorf("%d leased: the old letter settled the new member's delivery", n)
	}
	if err := d.Nack("again", 0); err != nil {
		t.Fatal(err)
	}
	k.next()
}

// The same with a member that lives on, and acknowledges the event.
func TestALetterThatWaitsIsDroppedWithItsConsumer(t *testing.T) {
	t.Parallel()
	b := open(t, Config{URL: natsServer(t), Connections: 1, AckWait: 3 * time.Second})
	publishAll(t, b, "mem", "1")
	dlq := deadStream(t, b)
	dlq.away()
	k := take(t, b, "mem", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1, GroupTTL: 30 * time.Second})
	d := k.next()
	if err := d.Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter waits", func() bool { // not on its way any more
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		topic := b.dead.topics["mem"]
		return topic != nil && topic.failing && topic.carried == 0
	})
	g := d.group
	if err := b.conn.JS.DeleteConsumer(t.Context(), g.topic.Stream.Name, g.consumer); err != nil {
		t.Fatal(err)
	}
	if err := k.next().Ack(); err != nil {
		t.Fatal(err)
	}
	dlq.back()
	eventually(t, "no letter waits", func() bool {
		b.dead.mu.Lock()
		defer b.dead.mu.Unlock()
		return len(b.dead.waiting) == 0
	})
	if n := lettersOf(t, b, "mem"); n != 0 {
		t.Error("the event was dead-lettered after it was acknowledged")
	}
}

// A letter that is too large for its stream is stored without the payload; the letters of other
// topics find room.
func TestALetterTooLargeForItsStreamHasNoPayload(t *testing.T) {
	t.Parallel()
	const n = 5
	b := open(t, Config{URL: natsServer(t), Connections: 1, Limits: Limits{DeadLetters: n}})
	dlq := deadStream(t, b)
	dlq.change(func(cfg *natsjs.StreamConfig) { cfg.MaxMsgSize = 2_000 })
	for range n {
		publishAll(t, b, "large", `"`+strings.Repeat("x", 100<<10)+`"`)
	}
	publishAll(t, b, "fine", "1")
	bad := take(t, b, "large", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	for range n {
		if err := bad.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the letters that were too large", func() bool { return lettersOf(t, b, "large") == n })
	good := take(t, b, "fine", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	if err := good.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other letter", func() bool { return lettersOf(t, b, "fine") == 1 })
}

// Letters that a stream does not answer hold up none of other streams.
func TestAStreamThatDoesNotAnswerStopsNoOtherLetters(t *testing.T) {
	t.Parallel()
	const n = 100
	b := open(t, Config{URL: natsServer(t), Connections: 1, Topics: []topics.Rule{{Pattern: "dlq.**"}}})
	_, err := b.conn.JS.CreateStream(t.Context(), natsjs.StreamConfig{
		Name: objectName("dlq.hangs"), Subjects: []string{plainSubject("dlq.hangs"), keyedPattern("dlq.hangs")}, NoAck: true, AllowDirect: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		publishAll(t, b, "hangs", strconv.Itoa(i))
	}
	publishAll(t, b, "fine", "1")
	bad := take(t, b, "hangs", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	for range n {
		if err := bad.next().Nack("no", 0); err != nil {
			t.Fatal(err)
		}
	}
	good := take(t, b, "fine", "g", SubscribeOptions{From: FromEarliest, MaxAttempts: 1})
	began := time.Now()
	if err := good.next().Nack("no", 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the letter of the other topic", func() bool { return lettersOf(t, b, "fine") == 1 })
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the letter of the other topic took %s", took)
	}
}
