package outbox_test

import (
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// The full form is -fair.rows=1000000 -fair.lanes=200000.
var (
	fairRows  = flag.Int("fair.rows", 20_000, "how many rows of one topic wait in the test of fairness between topics")
	fairLanes = flag.Int("fair.lanes", 7_000, "in how many lanes they wait")
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

// A row of one topic is published within a second, however many rows of another wait, where one
// that waits beside nothing, in a second outbox at the same time, is published at once.
func TestBacklogOfATopicDelaysNoOther(t *testing.T) {
	forSQL(t, func(t *sqlTest) {
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		free, db, _ := flatStore(t.T, t.dialect, pgtest.Start(t.T))
		idle := newRig(t, sqlHarness(free, db), openBus(t, jetstream.Config{}))
		publish := func(r *rig, topic string) time.Duration {
			t.Helper()
			began := time.Now()
			id := r.add(topic, "k")
			eventually(t, "the topic is published", func() bool {
				r.bus.mu.Lock()
				defer r.bus.mu.Unlock()
				return r.bus.calls[id] > 0
			})
			return time.Since(began)
		}
		for _, r := range []*rig{r, idle} {
			r.start(func(c *outbox.Config) { c.Poll = 0 })
			publish(r, "zebra") // its stream is made
			publish(r, "antelope")
			r.empty()
		}
		fillBacklog(t, "mails", *fairRows, *fairLanes)
		eventually(t, "the backlog is worked on", func() bool { return r.seen.published.Load() > 400 })
		for _, topic := range []string{"zebra", "antelope"} {
			usual := publish(idle, topic)
			took := publish(r, topic)
			usual = max(usual, publish(idle, topic))
			t.Logf("%s was published after %v, beside %d rows of mails in %d lanes, and after %v without them", topic, took, *fairRows, *fairLanes, usual)
			if took > time.Second+5*usual {
				t.Errorf("%s waited for %v, and for %v without a backlog", topic, took, usual)
			}
			if left := r.left(); left == 0 {
				t.Error("the backlog is gone")
			}
		}
	})
}

// A drainer looks at all lanes once, however many of them wait for what is parked, and then has
// nothing to do.
func TestDrainEndsBesideManyParked(t *testing.T) {
	t.Parallel()
	const lanes = 1_000 // of which a drainer holds 200 at most
	forSQL(t, func(t *sqlTest) {
		fillBacklog(t, "mails", lanes, lanes)
		if _, err := t.db.ExecContext(t.Context(), "UPDATE "+t.table+" SET status = 'error'"); err != nil {
			t.Fatal(err)
		}
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		for range 2 {
			for _, topic := range []string{"antelope", "mails", "zebra"} {
				for i := range 3 {
					r.add(topic, fmt.Sprint("other", i))
				}
				r.add(topic, "")
			}
			if did := r.drain(nil); did.Published != 12 {
				t.Errorf("got %+v, want 12 published", did)
			}
		}
		r.exactly()
	})
}

// So does one whose rows wait in many topics.
func TestRowsOfManyTopics(t *testing.T) {
	t.Parallel()
	const topics = 300
	forSQL(t, func(t *sqlTest) {
		for _, key := range []string{"", "k"} {
			var values []string
			for i := range topics {
				values = append(values, fmt.Sprintf("('t%03d', '%s', '1', 'error')", i, key))
			}
			query := "INSERT INTO " + t.table + " (aggregatetype, aggregateid, payload, status) VALUES " + strings.Join(values, ", ")
			if _, err := t.db.ExecContext(t.Context(), query); err != nil {
				t.Fatal(err)
			}
		}
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		r.start(nil)
		for _, topic := range []string{"t150", "a", "z"} {
			began := time.Now()
			r.add(topic, "other")
			r.empty()
			t.Logf("%s was published after %v, beside %d topics that wait", topic, time.Since(began), topics)
		}
		r.exactly()
	})
}
