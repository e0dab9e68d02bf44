//go:build !race

package outbox_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// The full form is -away=1m -away.rate=500.
var (
	awayFor  = flag.Duration("away", 1500*time.Millisecond, "how long NATS is away in the test of that")
	awayRate = flag.Int("away.rate", 150, "how many transactions a writer begins in a second meanwhile, if it can")
)

// Figures of TestNATSAwayUnderLoad.
const (
	awayInFlight = 16      // publishes at a time
	awayHeap     = 4 << 20 // bytes that the drainer's heap may grow by, whatever waits
)

// A writer goes on while NATS is killed and stays away. Nothing is lost, the drainer's heap does
// not grow with what waits, and it catches up without a storm.
func TestNATSAwayUnderLoad(t *testing.T) {
	t.Parallel()
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		natsAway(&matrix{TB: t, role: role{Dialect: outbox.SQLite, Address: sqliteAddress(filepath.Join(t.TempDir(), "test.db"))}})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		c := pgtest.StartDurable(t)
		natsAway(&matrix{TB: t, role: role{Dialect: outbox.PostgreSQL, Address: c.DSN() + "&default_query_exec_mode=exec"}})
	})
}

// history is what a drainer said.
type history struct {
	mu   sync.Mutex
	said []drained
	at   []time.Time
}

func (h *history) hear(tb testing.TB, line string) {
	tb.Helper()
	var d drained
	if err := json.Unmarshal([]byte(strings.TrimPrefix(line, "s ")), &d); err != nil {
		tb.Errorf("the drainer says %q: %v", line, err)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.said, h.at = append(h.said, d), append(h.at, time.Now())
}

// last is what it said last, and how often it said something.
func (h *history) last() (d drained, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.said) == 0 {
		return drained{}, 0
	}
	return h.said[len(h.said)-1], len(h.said)
}

// next waits for what it says next.
func (h *history) next(tb testing.TB) drained {
	tb.Helper()
	_, before := h.last()
	eventually(tb, "the drainer says something", func() bool { _, n := h.last(); return n > before })
	d, _ := h.last()
	return d
}

// heap is the largest heap between two moments.
func (h *history) heap(from, to time.Time) (most uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, at := range h.at {
		if at.After(from) && at.Before(to) {
			most = max(most, h.said[i].Heap)
		}
	}
	return most
}

// rate is the highest rate of tries, in a second, over any half of one since a moment.
func (h *history) rate(since time.Time) (most float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	from := 0
	for i, at := range h.at {
		if h.at[from].Before(since) {
			from = i
			continue
		}
		for at.Sub(h.at[from+1]) > 500*time.Millisecond {
			from++
		}
		if took := at.Sub(h.at[from]).Seconds(); took >= 0.4 {
			most = max(most, float64(h.said[i].Tries-h.said[from].Tries)/took)
		}
	}
	return most
}

func natsAway(m *matrix) {
	m.Helper()
	m.prepare()
	said := new(history)
	r := m.role
	r.Heap, r.Limit = true, awayInFlight
	drainer := natstest.StartChild(m, "drainer", r, func(line string) { said.hear(m, line) })
	m.role.Rate = *awayRate
	writer := m.add("writer", m.startWriter)
	eventually(m, "events are published", func() bool { d, _ := said.last(); return d.Published > int64(*awayRate) })
	began := time.Now()
	before, _ := said.last()

	m.nats.Kill()
	gone := time.Now()
	wait(m.Context(), 500*time.Millisecond) // what was under way is given up
	missed := said.next(m)
	wait(m.Context(), *awayFor-time.Since(gone))
	waiting := m.waiting()
	while := said.next(m)
	back := time.Now()
	m.nats.Start()
	// It has caught up when no more waits than before: then writing goes on as fast as publishing.
	eventually(m, "it catches up", func() bool { return m.waiting() <= *awayRate/10 })
	caughtUp := time.Since(back)
	writer.kill()
	m.empty()
	after := said.next(m)
	drainer.Stop()
	m.check()

	calm, heap := said.heap(began.Add(-time.Second), gone), said.heap(gone, time.Now())
	duplicates := after.Duplicates + after.Found - before.Duplicates - before.Found
	m.Logf("away for %v at %d transactions/s: %d records waited; %d publishes tried meanwhile; caught up %v after the return, at up to %.0f publishes/s, %d at a time at most; %d were stored already; heap %.1f MiB before, %.1f MiB at most",
		back.Sub(gone).Round(time.Millisecond), *awayRate, waiting, while.Tries-missed.Tries, caughtUp.Round(time.Millisecond), said.rate(back), after.Most, duplicates,
		float64(calm)/(1<<20), float64(heap)/(1<<20))
	if waiting < *awayRate/5 { // a busy machine writes less
		m.Errorf("only %d records waited: the writer did not go on", waiting)
	}
	if tries := while.Tries - missed.Tries; tries > awayInFlight {
		m.Errorf("%d publishes were tried while NATS was away", tries)
	}
	if after.Most > awayInFlight {
		m.Errorf("%d publishes at a time, want at most %d", after.Most, awayInFlight)
	}
	if duplicates > awayInFlight {
		m.Errorf("%d events were published again that were stored: want at most those under way, %d", duplicates, awayInFlight)
	}
	// Each is tried once after the return, but for those that were under way.
	if tries, published := after.Tries-while.Tries, after.Published-while.Published; tries > published+2*awayInFlight {
		m.Errorf("%d publishes were tried for %d events", tries, published)
	}
	if after.Failed > 0 {
		m.Errorf("%d failures were counted", after.Failed)
	}
	if heap > calm+awayHeap {
		m.Errorf("the heap grew from %d to %d bytes", calm, heap)
	}
}

// waiting is how many records are not in their topics.
func (m *matrix) waiting() int {
	m.Helper()
	db, s, err := m.role.open()
	if err != nil {
		m.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	st, err := s.Stats(context.Background())
	if err != nil {
		m.Fatal(fmt.Errorf("statistics: %w", err))
	}
	return st.Pending + st.Claimed
}
