package outbox_test

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// The full form is -fair.rows=1000000 -fair.lanes=200000.
var (
	fairRows  = flag.Int("fair.rows", 60_000, "how many rows of one topic wait in the test of fairness between topics")
	fairLanes = flag.Int("fair.lanes", 20_000, "in how many lanes they wait")
)

// fillBacklog adds rows that wait in so many lanes of a topic.
func fillBacklog(t *sqlTest, topic string, rows, lanes int) {
	t.Helper()
	numbers, from := "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d) SELECT", " FROM n"
	if t.dialect == outbox.PostgreSQL {
		numbers, from = "SELECT", " FROM generate_series(1, %d) AS n (i)"
	}
	query := "INSERT INTO " + t.table + " (id, aggregatetype, aggregateid, payload) " + numbers + " '" + topic + "-' || i, '" + topic + "', 'k' || (i %% %d), '1'" + from
	args := []any{lanes, rows}
	if t.dialect == outbox.SQLite {
		args = []any{rows, lanes}
	}
	if _, err := t.db.ExecContext(t.Context(), fmt.Sprintf(query, args...)); err != nil {
		t.Fatal(err)
	}
}

// A row of one topic is published within a second, however many rows of another wait.
func TestBacklogOfATopicDelaysNoOther(t *testing.T) {
	forSQL(t, func(t *sqlTest) {
		fillBacklog(t, "mails", *fairRows, *fairLanes)
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		r.start(func(c *outbox.Config) { c.Poll = 0 })
		eventually(t, "the backlog is worked on", func() bool { return r.seen.published.Load() > 400 })
		for _, topic := range []string{"zebra", "antelope"} {
			began := time.Now()
			id := r.add(topic, "k")
			eventually(t, "the other topic is published", func() bool {
				r.bus.mu.Lock()
				defer r.bus.mu.Unlock()
				return r.bus.calls[id] > 0
			})
			took := time.Since(began)
			t.Logf("%s was published after %v, with %d rows of mails in %d lanes", topic, took, *fairRows, *fairLanes)
			if took > time.Second {
				t.Errorf("%s waited for %v, want less than a second", topic, took)
			}
		}
	})
}
