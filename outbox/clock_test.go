package outbox_test

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/topics"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// skewed is a PostgreSQL whose clock a test sets.
type skewed struct {
	testing.TB
	store *outbox.SQLStore
	db    *sql.DB
}

// newSkewed makes a store in a database that has another clock than this host: its own function
// takes the place of that of PostgreSQL.
func newSkewed(tb testing.TB, address string) *skewed {
	tb.Helper()
	admin := openDB(tb, "pgx", address)
	for _, query := range []string{
		"CREATE SCHEMA skewed",
		"CREATE TABLE skewed.clock (ahead INTERVAL NOT NULL)",
		"INSERT INTO skewed.clock VALUES ('0')",
		`CREATE FUNCTION skewed.statement_timestamp() RETURNS TIMESTAMPTZ STABLE LANGUAGE SQL AS
'SELECT pg_catalog.statement_timestamp() + ahead FROM skewed.clock'`,
	} {
		if _, err := admin.ExecContext(tb.Context(), query); err != nil {
			tb.Fatal(err)
		}
	}
	s := &skewed{TB: tb}
	s.store, s.db = newPostgres(tb, address+"&search_path=skewed,pg_catalog,public")
	return s
}

// set makes the clock go ahead, or back where ahead is negative, of what it should be.
func (s *skewed) set(ahead time.Duration) {
	s.Helper()
	if _, err := s.db.ExecContext(s.Context(), "UPDATE skewed.clock SET ahead = $1 * INTERVAL '1 millisecond'", ahead.Milliseconds()); err != nil {
		s.Fatal(err)
	}
}

// A drainer is killed before it learns that its publishes are stored, and the server forgets their
// ids. However far the clock of the database is from that of NATS, and however it is set meanwhile,
// the next drainer stores nothing twice.
func TestNothingDoublesWhereClocksDiffer(t *testing.T) {
	t.Parallel()
	const window, margin = time.Second, 250 * time.Millisecond
	for _, test := range []struct {
		name          string
		before, after time.Duration
	}{
		{"the database is ahead", time.Hour, time.Hour},
		{"the database is behind", -time.Hour, -time.Hour},
		{"one that is ahead is set right", time.Hour, 0},
		{"one that is behind is set right", -time.Hour, 0},
		{"one takes over that is ahead", 0, time.Hour},
		{"one takes over that is behind", 0, -time.Hour},
		{"one takes over that is behind by less than has passed", 0, -1200 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			pg := newSkewed(t, pgtest.Start(t))
			pg.set(test.before)
			r := newRig(t, sqlHarness(pg.store, pg.db), openBus(t, jetstream.Config{Topics: []topics.Rule{{Pattern: "short", DuplicateWindow: window}}}))
			for i := range 6 {
				r.add("short", fmt.Sprint("k", i%2))
				r.add("short", "")
			}
			hang := make(chan struct{})
			var stored atomic.Int64
			r.bus.set(nil, func(string, jetstream.PublishOptions) error {
				stored.Add(1)
				<-hang
				return unknownOutcome()
			})
			d := r.start(nil)
			eventually(t, "all lanes are published to", func() bool { return stored.Load() == 8 })
			killed := make(chan struct{})
			go func() { defer close(killed); kill(d) }()
			// so that it is killed before it learns the outcome; either way it is unknown
			outlast(t, 50*time.Millisecond)
			close(hang)
			<-killed
			r.bus.set(nil, nil)
			pg.set(test.after)
			if _, err := pg.db.ExecContext(t.Context(), "UPDATE "+tableOf(pg.db)+" SET lease_until = 1 WHERE status = 'claimed'"); err != nil {
				t.Fatal(err)
			}
			outlast(t, window+400*time.Millisecond)
			eventually(t, "everything is published", func() bool {
				r.drain(func(c *outbox.Config) { c.Margin = margin })
				return r.left() == 0
			})
			r.exactly()
			if found := r.seen.found.Load(); found != 8 {
				t.Errorf("%d were found in the stream, want 8", found)
			}
			// A drainer that was held up between the two clocks is out by so much. Each one looks.
			eventually(t, fmt.Sprintf("NATS is said to be %v behind", test.after), func() bool {
				r.seen.skew.Store(int64(24 * time.Hour)) // until it is measured
				r.drain(nil)
				return (time.Duration(r.seen.skew.Load()) + test.after).Abs() <= time.Second
			})
		})
	}
}

// clockStore is an empty store whose clock a test sets.
type clockStore struct {
	outbox.Store
	ahead atomic.Int64
}

func (*clockStore) RequeueExpired(context.Context) (int, error) { return 0, nil }

func (*clockStore) Listen(context.Context, outbox.Sleeper) error { return outbox.ErrCannotListen }

func (*clockStore) Stats(context.Context) (outbox.Stats, error) { return outbox.Stats{}, nil }

func (*clockStore) Claim(context.Context, outbox.ClaimOptions) (outbox.Claim, error) {
	return outbox.Claim{}, nil
}

func (s *clockStore) Now(context.Context) (time.Time, error) {
	return time.Now().Add(time.Duration(s.ahead.Load())), nil
}

// lockedLog is a log that is read while it is written.
type lockedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lockedLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// A drainer compares the clocks at its start and while it runs. It says how far they are apart when
// that is more than is allowed: at once, then now and then, and when it is over.
func TestClocksThatAreApartAreSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, seen := new(clockStore), new(counts)
		var log lockedLog
		d, err := outbox.NewDrainer(outbox.Config{
			Store: store, Bus: new(watcher), Observer: seen, ClockSkew: 2 * time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		said := func(when string, ahead time.Duration, warned, over int) {
			t.Helper()
			synctest.Wait()
			if skew := time.Duration(seen.skew.Load()); (skew + ahead).Abs() > 10*time.Millisecond {
				t.Errorf("%s: NATS is said to be %v ahead of a store that is %v ahead", when, skew, ahead)
			}
			if got := strings.Count(log.String(), "exceeds the limit"); got != warned {
				t.Errorf("%s: there are %d warnings, want %d:\n%s", when, got, warned, log.String())
			}
			if got := strings.Count(log.String(), "back within the limit"); got != over {
				t.Errorf("%s: it is said %d times to be over, want %d:\n%s", when, got, over, log.String())
			}
		}
		store.ahead.Store(int64(-time.Minute))
		d.Start()
		said("at the start", -time.Minute, 0, 0)
		store.ahead.Store(int64(3 * time.Minute))
		outlast(t, 16*time.Second)
		said("beyond what is allowed", 3*time.Minute, 1, 0)
		if !strings.Contains(log.String(), "nats_ahead=-3m0s") || !strings.Contains(log.String(), "allowed=2m0s") {
			t.Errorf("the figures are not said:\n%s", log.String())
		}
		outlast(t, 9*time.Minute)
		said("nine minutes later", 3*time.Minute, 1, 0)
		outlast(t, 2*time.Minute)
		said("two more minutes later", 3*time.Minute, 2, 0)
		store.ahead.Store(0)
		outlast(t, 16*time.Second)
		said("set right", 0, 2, 1)
		store.ahead.Store(int64(-time.Hour))
		outlast(t, 16*time.Second)
		said("apart again", -time.Hour, 3, 1)
		kill(d)
	})
}
