package jetstream

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream/event"
)

// setMaxMsgSize changes the size of messages that the stream of a topic takes.
func setMaxMsgSize(t *testing.T, b *Bus, topic string, size int32) {
	t.Helper()
	cfg := streamInfo(t, b, objectName(topic)).Config
	cfg.MaxMsgSize = size
	if _, err := b.conn.JS.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
}

// A delayed event that its topic refuses for what it is becomes a dead letter, with all that it is,
// and waits no longer. A redrive to the topic stores it once the topic takes it.
func TestADelayedEventThatItsTopicRefusesBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	seen := &buried{}
	b := open(t, Config{Observer: seen, dueRetry: 50 * time.Millisecond})
	publishAll(t, b, "small", "1")
	payload := append(append([]byte{'"'}, bytes.Repeat([]byte("x"), 2000)...), '"')
	opts := PublishOptions{ID: "late-1", Key: "k.1", Headers: map[string]string{"a": "b"}, Tags: []string{"t"}, SID: "s", Delay: 300 * time.Millisecond}
	if _, err := b.Publish(t.Context(), "small", payload, opts); err != nil {
		t.Fatal(err)
	}
	setMaxMsgSize(t, b, "small", 1000)
	// one that the topic takes is not held up, and becomes none
	if _, err := b.Publish(t.Context(), "small", []byte("2"), PublishOptions{Delay: 500 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	awaitStored(t, b, "small", 2)
	var letters []*Letter
	for deadline := time.Now().Add(slow); len(letters) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("there is no dead letter")
		}
		<-time.After(100 * time.Millisecond)
		letters = letterList(t, b, LetterFilter{})
	}
	l := letters[0]
	if e := l.Event; l.Fault != "" || l.Topic != "small" || l.Group != DelayedGroup || l.Attempts != 5 || l.Bare ||
		e.ID != "late-1" || e.Key != "k.1" || e.SID != "s" || e.Headers["a"] != "b" || len(e.Tags) != 1 || !bytes.Equal(e.Payload, payload) {
		t.Errorf("the letter is %+v", l)
	}
	if !strings.Contains(l.Reason, "maximum") {
		t.Errorf("the reason is %q", l.Reason)
	}
	eventually(t, "nothing waits", func() bool {
		due, err := delayedCount(t, b, duePrefix+">")
		return err == nil && due == 0
	})
	if n := seen.count(); n != 1 {
		t.Errorf("%d delayed events are counted as dead letters", n)
	}
	// No group is there to put the event back to.
	got := redriveAll(t, b, LetterFilter{}, RedriveOptions{})
	if got.Done != 0 || got.Skipped != 1 {
		t.Errorf("a redrive to the group: %+v", got)
	}
	setMaxMsgSize(t, b, "small", -1)
	if got := redriveAll(t, b, LetterFilter{}, RedriveOptions{ToTopic: true}); got.Done != 1 {
		t.Errorf("a redrive to the topic: %+v", got)
	}
	awaitStored(t, b, "small", 3)
}

// A delayed event whose topic is full, or away, waits for as long as that takes.
// buried counts delayed events that became dead letters.
type buried struct {
	losses
}

func (s *buried) Group(_, group string, _ bool) event.GroupObserver {
	return buriedObserver{s: s, group: group}
}

type buriedObserver struct {
	event.NopObserver
	s     *buried
	group string
}

func (o buriedObserver) Settled(how event.Outcome, _, _ time.Duration) {
	if how == event.DeadLettered && o.group == DelayedGroup {
		lostObserver{l: &o.s.losses}.Lost(1)
	}
}
