package outbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/outboxtest"
	"eventhub/outbox/pgtest"
)

// listened makes a store in a table of its own whose drainers are woken.
func listened(tb testing.TB, address string) (*sql.DB, outboxtest.Harness) {
	tb.Helper()
	_, db := newPostgres(tb, address)
	s := sqlStore(tb, outbox.SQLConfig{Dialect: outbox.PostgreSQL, DB: db, Table: tableOf(db), Listen: listenAt(address)})
	return db, sqlHarness(s, db)
}

// sleepers is how many sessions of drainers have the lock of those that sleep, and how many listen.
func sleepers(tb testing.TB, db *sql.DB) (locks, listen int) {
	tb.Helper()
	if err := db.QueryRowContext(context.Background(), `SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
  (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR query LIKE 'SELECT pg_try_advisory_lock%'))`).Scan(&locks, &listen); err != nil {
		tb.Fatal(err)
	}
	return locks, listen
}

// fallAsleep waits until a drainer sleeps.
func fallAsleep(tb testing.TB, db *sql.DB) {
	tb.Helper()
	eventually(tb, "the drainer sleeps", func() bool { locks, listen := sleepers(tb, db); return locks == 1 && listen > 0 })
}

// notifications counts those of a table, until the end of the test.
func notifications(t *testing.T, address, table string) *atomic.Int64 {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), "LISTEN "+table); err != nil {
		t.Fatal(err)
	}
	n, done := new(atomic.Int64), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(done)
		for {
			if _, err := conn.WaitForNotification(ctx); err != nil {
				_ = conn.Close(context.Background())
				return
			}
			n.Add(1)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return n
}

// Commits notify nobody while no drainer sleeps: a commit that notifies takes a lock of the whole
// cluster.
func TestCommitsNotifyOnlySleepers(t *testing.T) {
	t.Parallel()
	const rows = 60
	address := pgtest.Start(t)
	db, h := listened(t, address)
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	told := notifications(t, address, tableOf(db))
	mark := func() {
		t.Helper()
		before := told.Load()
		if _, err := db.ExecContext(t.Context(), "NOTIFY "+tableOf(db)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a notification comes", func() bool { return told.Load() > before })
	}
	for i := range rows {
		r.add("orders", fmt.Sprint("k", i%5))
	}
	mark()
	if n := told.Load() - 1; n != 0 {
		t.Errorf("%d of %d commits notified, and there is no drainer", n, rows)
	}
	r.start(nil)
	r.empty()
	fallAsleep(t, db)
	// A commit is quiet if the drainer is awake before it and after it. On a busy machine, the
	// drainer may take its time to wake up.
	before, commits, quiet := told.Load(), 0, 0
	awake := func() bool { locks, _ := sleepers(t, db); return locks == 0 }
	for deadline := time.Now().Add(2 * patience); quiet < rows; commits++ {
		was := awake()
		r.add("orders", fmt.Sprint("k", commits%5))
		if was && awake() {
			quiet++
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d commits were made while the drainer was awake", quiet, commits+1)
		}
	}
	r.empty()
	mark()
	n := told.Load() - before - 1
	t.Logf("%d of %d commits notified a drainer, %d were made while it was awake", n, commits, quiet)
	if n == 0 || n > int64(commits-quiet) {
		t.Errorf("%d of %d commits notified, want the first, and none of the %d that were made while the drainer was awake", n, commits, quiet)
	}
	r.exactly()
}

// A drainer that sleeps is woken by a commit, also when the connection that listens was lost.
func TestNotifyWakes(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	db, h := listened(t, address)
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	r.start(func(c *outbox.Config) { c.Poll, c.Lease = time.Hour, time.Hour })
	for range 5 {
		fallAsleep(t, db)
		r.add("orders", "a")
		r.empty()
	}
	// The connection breaks: another takes its place, and what was added meanwhile is seen.
	fallAsleep(t, db)
	if _, err := db.ExecContext(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"); err != nil {
		t.Fatal(err)
	}
	r.add("orders", "a")
	r.empty()
	// By pgx, without database/sql.
	conn, err := pgx.Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.Background()) }()
	fallAsleep(t, db)
	store, ok := h.Store.(*outbox.SQLStore)
	if !ok {
		t.Fatal("no SQLStore")
	}
	for _, commit := range []bool{false, true} {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Add(t.Context(), outbox.Pgx(tx), &outbox.Record{ID: "by pgx", Topic: "orders", Key: "a"}); err != nil {
			t.Fatal(err)
		}
		if commit {
			err = tx.Commit(t.Context())
		} else {
			err = tx.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.added["orders/a"] = append(r.added["orders/a"], "by pgx")
	r.empty()
	r.exactly()
}

// Of several drainers that sleep one has the lock. When that ends, another has it.
func TestSleepersTakeTurns(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	db, h := listened(t, address)
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	slow := func(c *outbox.Config) { c.Poll, c.Lease = time.Hour, time.Hour }
	drainers := []*outbox.Drainer{r.start(slow), r.start(slow), r.start(slow)}
	for i, d := range drainers {
		eventually(t, "all that are left sleep", func() bool {
			locks, listen := sleepers(t, db)
			return locks == 1 && listen == len(drainers)-i
		})
		r.add("orders", "a")
		r.empty()
		kill(d)
	}
	eventually(t, "nobody sleeps any more", func() bool { locks, listen := sleepers(t, db); return locks+listen == 0 })
	r.exactly()
}

// A row that was added before the drainer fell asleep, and is committed afterwards, notifies
// nobody. It is found all the same.
func TestRowCommittedAfterTheDrainerFellAsleep(t *testing.T) {
	t.Parallel()
	db, h := listened(t, pgtest.Start(t))
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(t.Context(), "INSERT INTO "+tableOf(db)+" (id, aggregatetype, payload) VALUES ('late', 'orders', '1')"); err != nil {
		t.Fatal(err)
	}
	r.start(func(c *outbox.Config) { c.Poll = 0 })
	fallAsleep(t, db)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	r.added["orders/"] = []string{"late"}
	r.empty()
	r.exactly()
}

// pooled is a connection through a pooler, which tells its clients process ids that it makes up.
type pooled struct{ *pgx.Conn }

func (pooled) PgConn() madeUp { return madeUp{} }

type madeUp struct{}

func (madeUp) PID() uint32 { return 1 }

// Behind a pooler a drainer polls, and takes no lock, which would stay with a connection of others.
func TestNothingIsListenedToThroughAPooler(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	_, db := newPostgres(t, address)
	ended := make(chan struct{})
	listen := outbox.PgxListener[pooled, pgconn.CommandTag, *pgconn.Notification, madeUp](func(ctx context.Context) (pooled, error) {
		conn, err := pgx.Connect(ctx, address)
		return pooled{conn}, err
	})
	s := sqlStore(t, outbox.SQLConfig{
		Dialect: outbox.PostgreSQL, DB: db, Table: tableOf(db),
		Listen: func(ctx context.Context, table string, sleeper outbox.Sleeper) error {
			defer close(ended) // it is called once
			return listen(ctx, table, sleeper)
		},
	})
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	r.start(nil)
	<-ended
	r.add("orders", "a")
	r.empty()
	if locks, listen := sleepers(t, db); locks+listen > 0 {
		t.Errorf("%d sessions have the lock, %d listen", locks, listen)
	}
	r.exactly()
}

// A drainer with nothing to do asks the database ten times a second at most.
func TestIdleDrainerAsksRarely(t *testing.T) {
	t.Parallel()
	const most = 10
	address := pgtest.Start(t)
	_, watched := newPostgres(t, address)
	cfg, err := pgx.ParseConfig(address)
	if err != nil {
		t.Fatal(err)
	}
	var asked statements
	cfg.Tracer = &asked
	db := stdlib.OpenDB(*cfg)
	t.Cleanup(func() { _ = db.Close() })
	s := sqlStore(t, outbox.SQLConfig{
		Dialect: outbox.PostgreSQL, DB: db, Table: tableOf(watched),
		Listen: outbox.PgxListener(func(ctx context.Context) (*pgx.Conn, error) { return pgx.ConnectConfig(ctx, cfg.Copy()) }),
	})
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	r.start(func(c *outbox.Config) { c.Poll, c.StatsEvery = 0, 0 })
	r.add("orders", "a")
	r.empty()
	fallAsleep(t, watched)
	// After a second it waits for as long as it ever does: for a quarter of a second.
	outlast(t, 1200*time.Millisecond)
	before, began := asked.n.Load(), time.Now()
	outlast(t, 1500*time.Millisecond)
	n, during := asked.n.Load()-before, time.Since(began)
	t.Logf("an idle drainer asks %d times in %v", n, during)
	if n == 0 || float64(n) > most*during.Seconds() {
		t.Errorf("an idle drainer asks %d times in %v, want %d a second at most", n, during, most)
	}
	r.exactly()
}

// statements counts what is asked of PostgreSQL.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n.Add(1)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The first row after a pause, and those that follow each other slowly, are published soon after
// their commit.
func TestRowsAfterAPauseAreFoundSoon(t *testing.T) {
	// what polling alone does not reach; BenchmarkLatency has the figures
	const most = 50 * time.Millisecond
	db, h := listened(t, pgtest.Start(t))
	r := newRig(t, h, openBus(t, jetstream.Config{}))
	stored := make(chan struct{}, 1)
	r.bus.set(nil, func(string, jetstream.PublishOptions) error { stored <- struct{}{}; return nil })
	d := r.start(func(c *outbox.Config) { c.Poll = 0 })
	half := func(name string, pause, committed func()) time.Duration {
		t.Helper()
		var took []time.Duration
		for range 9 {
			pause()
			r.add("orders", "a")
			began := time.Now()
			committed()
			<-stored
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		t.Logf("%s: from %v to %v, half of them in %v", name, took[0], took[len(took)-1], took[len(took)/2])
		return took[len(took)/2]
	}
	nothing := func() {}
	usual := half("woken at once", nothing, d.Wake)
	for name, pause := range map[string]func(){
		"asleep":      func() { fallAsleep(t, db) },
		"every 30 ms": func() { outlast(t, 30*time.Millisecond) },
		"at once":     nothing,
	} {
		if took := half(name, pause, nothing); took > most+2*usual {
			t.Errorf("%s: half of the rows took %v, want %v, and %v where the drainer is woken", name, took, most, usual)
		}
	}
	r.empty()
	r.exactly()
}
