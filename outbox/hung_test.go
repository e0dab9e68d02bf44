package outbox_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// A topic whose publishes are not answered, such as one whose stream has no leader, does not hold up
// the rows of other topics.
func TestTopicThatDoesNotAnswerHoldsUpNoOther(t *testing.T) {
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	r.bus.set(func(ctx context.Context, topic string, _ jetstream.PublishOptions) error {
		if topic != "silent" {
			return nil
		}
		select { // as the bus does, which gives up after 10 s
		case <-time.After(10 * time.Second):
		case <-ctx.Done():
		}
		return unknownOutcome()
	}, nil)
	for i := range 500 {
		if err := r.Add(t.Context(), &outbox.Record{Topic: "silent", Key: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	r.start(nil)
	eventually(t, "the topic is tried", func() bool { return r.bus.tried() > 0 })
	var worst time.Duration
	for range 8 {
		began, done := time.Now(), r.seen.published.Load()
		r.add("mails", "k")
		eventually(t, "the other topic's row is published", func() bool { return r.seen.published.Load() > done })
		worst = max(worst, time.Since(began))
		outlast(t, 100*time.Millisecond)
	}
	if worst > time.Second {
		t.Errorf("a row of another topic waited for %v", worst)
	}
	r.bus.set(nil, nil)
}
