package outbox_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// Topics whose publishes are not answered, such as those whose streams have no leader, do not hold
// up the rows of other topics: neither at first, nor when they are tried again.
func TestTopicThatDoesNotAnswerHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	for name, silent := range map[string]int{"one topic": 1, "three topics": 3} {
		t.Run(name, func(t *testing.T) {
			s, db := newSQLite(t)
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			r.bus.set(func(ctx context.Context, topic string, _ jetstream.PublishOptions) error {
				if !strings.HasPrefix(topic, "silent") {
					return nil
				}
				select { // the bus gives up after 10 s
				case <-time.After(5 * time.Second):
				case <-ctx.Done():
				}
				return unknownOutcome()
			}, nil)
			for i := range 600 / silent {
				for n := range silent {
					r.add(fmt.Sprint("silent", n), strconv.Itoa(i%200))
				}
			}
			r.start(func(c *outbox.Config) { c.MaxAttempts = 1 })
			eventually(t, "a topic is tried", func() bool { return r.bus.tried() > 0 })
			var worst time.Duration
			for began := time.Now(); time.Since(began) < 12*time.Second; {
				added, done := time.Now(), r.seen.published.Load()
				r.add("mails", "k")
				eventually(t, "the other topic's row is published", func() bool { return r.seen.published.Load() > done })
				worst = max(worst, time.Since(added))
				outlast(t, 100*time.Millisecond)
			}
			t.Logf("a row of another topic waited for %v at most", worst)
			if worst > 2*time.Second+500*time.Millisecond {
				t.Errorf("a row of another topic waited for %v", worst)
			}
			r.bus.set(nil, nil)
			r.empty()
			r.exactly()
			if failed := r.seen.failed.Load(); failed > 0 {
				t.Errorf("%d failures were counted", failed)
			}
		})
	}
}
