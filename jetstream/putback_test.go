package jetstream

import (
	"testing"
	"time"

	"eventhub/jetstream/natstest"
)

// queueEnds waits until nothing is left of any queue.
func queueEnds(t *testing.T, b *Bus) {
	t.Helper()
	eventually(t, "the queue is gone", func() bool {
		if err := b.sweepPutBack(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		info, err := b.openPutBack(t.Context())
		return err == nil && info.State.Consumers == 0 && info.State.Msgs == 0
	})
}

// queueOfGroup returns the queue of the group g of a topic.
func queueOfGroup(t *testing.T, b *Bus, topic string) string {
	t.Helper()
	at, _, err := b.freshExisting(t.Context(), topic)
	if err != nil {
		t.Fatal(err)
	}
	ptr, err := b.generations.get(t.Context(), at, "g")
	if err != nil || ptr.PutBack == "" {
		t.Fatalf("%+v, %v", ptr, err)
	}
	return ptr.PutBack
}

// A queue that a member makes again ends with the TTL of its group, too.
func TestAQueueThatAMemberMakesAgainEndsWithTheTTL(t *testing.T) {
	t.Parallel()
	b := open(t, Config{AckWait: time.Second})
	publish(t, b, "tab", "1")
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
	if err := b.js.DeleteConsumer(t.Context(), putBackStream, queue); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the member makes the queue again", func() bool {
		_, err := b.js.Consumer(t.Context(), putBackStream, queue)
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
	publish(t, b, "tab", "1")
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
		info, err := b.openPutBack(t.Context())
		return err == nil && info.State.Msgs == 1
	})
	if err := b.sweepPutBack(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	if info, err := b.openPutBack(t.Context()); err != nil || info.State.Msgs != 1 {
		t.Fatalf("a group that may come back has lost its queue: %v", err)
	}
	// As when the minute is over: nothing says any more that the group may come back.
	if err := b.purge(t.Context(), marksBucket, marksSubject(b.known("tab"), "g"), 0); err != nil {
		t.Fatal(err)
	}
	queueEnds(t, b)
}
