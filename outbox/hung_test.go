package outbox_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
			t.Parallel()
			s, db := newSQLite(t)
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			s, db = newSQLite(t)
			free := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			// the control: what a stalled topic gives back, up to 200 rows, in an outbox of its own
			usual := func(topic string) time.Duration {
				t.Helper()
				fillBacklog(&sqlTest{T: t, dialect: outbox.SQLite, db: db, table: outbox.DefaultTable}, topic, 200, 200)
				began := time.Now()
				free.drain(nil)
				return time.Since(began)
			}
			var asked atomic.Int64 // publishes to silent topics
			silence := func() (end func()) {
				over := make(chan struct{})
				r.bus.set(func(_ context.Context, topic string, _ jetstream.PublishOptions) error {
					if !strings.HasPrefix(topic, "silent") {
						return nil
					}
					asked.Add(1)
					<-over // whatever the drainer's patience
					return unknownOutcome()
				}, nil)
				return sync.OnceFunc(func() { close(over) })
			}
			// others adds rows of another topic, one after the other, and says how long one
			// waited at most.
			others := func(n int) (worst time.Duration) {
				t.Helper()
				for range n {
					added, done := time.Now(), r.seen.published.Load()
					r.add("mails", "k")
					eventually(t, "the other topic's row is published", func() bool { return r.seen.published.Load() > done })
					worst = max(worst, time.Since(added))
				}
				return worst
			}
			r.start(func(c *outbox.Config) { c.MaxAttempts = 1 })
			others(1) // the topic's stream is made
			end := silence()
			defer func() { end() }()
			for i := range 600 / silent {
				for n := range silent {
					r.add(fmt.Sprint("silent", n), strconv.Itoa(i%200))
				}
			}
			eventually(t, "a topic is tried", func() bool { return asked.Load() > 0 })
			worst, batch := others(20), usual("mails")
			for i := range 2 {
				endAgain, before := silence(), asked.Load()
				end()
				end = endAgain
				eventually(t, "a topic is tried again", func() bool { return asked.Load() > before })
				worst, batch = max(worst, others(10)), max(batch, usual(fmt.Sprint("late", i)))
			}
			t.Logf("a row of another topic waited for %v at most; 200 rows of one that answers took %v", worst, batch)
			if worst > 2*time.Second+3*batch {
				t.Errorf("a row of another topic waited for %v; 200 rows of one that answers took %v", worst, batch)
			}
			r.bus.set(nil, nil)
			end()
			r.empty()
			r.exactly()
			if failed := r.seen.failed.Load(); failed > 0 {
				t.Errorf("%d failures were counted", failed)
			}
		})
	}
}
