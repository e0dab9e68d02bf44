package inbox_test

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/jetstream/natstest"
	"eventhub/outbox"
	"eventhub/outbox/inbox"
	"eventhub/outbox/pgtest"
)

// The long form is -inbox.events=100000 -inbox.kills=100.
var (
	inboxEvents = flag.Int("inbox.events", 1_000, "events that are consumed with each database")
	inboxKills  = flag.Int("inbox.kills", 4, "how many consumers, and NATS servers, are killed meanwhile")
)

// role is what a consumer process is told.
type role struct {
	Dialect outbox.Dialect
	Address string
	URL     string
}

// consume handles events by adding to a row, which shows an effect that happened twice. Of the
// handlers, some fail after their effect, some outlive their lease, and some lose their
// acknowledgement.
func consume(ctx context.Context, r role) error {
	db, err := sql.Open(drivers[r.Dialect], r.Address)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	db.SetMaxIdleConns(8)
	store, err := inbox.NewSQL(inbox.SQLConfig{Dialect: r.Dialect, DB: db})
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	bus, err := jetstream.Open(ctx, jetstream.Config{URL: r.URL, AckWait: 3 * time.Second, Logger: log})
	if err != nil {
		return err
	}
	defer func() { _ = bus.Close() }()
	errNotYet, errLost := errors.New("not yet"), errors.New("the acknowledgement is lost")
	handle := store.Handle("g", func(ctx context.Context, tx *sql.Tx, e *jetstream.Event) error {
		query := "INSERT INTO effects (n, times) VALUES (" + string(e.Payload) + ", 1) ON CONFLICT (n) DO UPDATE SET times = effects.times + 1"
		if _, err := tx.ExecContext(ctx, query); err != nil {
			return err
		}
		switch rand.IntN(1_000) {
		case 0:
			<-ctx.Done() // the lease
			return nil
		case 1, 2, 3, 4, 5, 6, 7, 8, 9:
			return errNotYet
		}
		return nil
	})
	opts := jetstream.SubscribeOptions{From: jetstream.FromEarliest, AckTimeout: time.Second, Workers: 4, MaxInFlight: 200, MaxAttempts: jetstream.NeverGiveUp}
	sub, err := bus.Consume(ctx, "t", "g", opts, func(ctx context.Context, d *jetstream.Delivery) error {
		if err := handle(ctx, d); err != nil {
			return err
		}
		if rand.IntN(10) == 0 {
			return errLost
		}
		return nil
	})
	if err != nil {
		return err
	}
	natstest.Ready()
	<-ctx.Done()
	return sub.Stop(context.WithoutCancel(ctx))
}

// Consumers and the NATS server are killed while events are handled, and a tenth of the events are
// delivered again after their effect: each event has its effect exactly once.
func TestEffectsAreExactlyOnce(t *testing.T) {
	t.Parallel()
	run := func(dialect outbox.Dialect, address func(*testing.T) string) {
		t.Run(string(dialect), func(t *testing.T) {
			t.Parallel()
			exactlyOnce(t, role{Dialect: dialect, Address: address(t)})
		})
	}
	run(outbox.SQLite, func(t *testing.T) string { t.Helper(); return sqliteAddress(t) })
	run(outbox.PostgreSQL, func(t *testing.T) string { t.Helper(); return pgtest.Start(t) })
}

func exactlyOnce(t *testing.T, r role) {
	t.Helper()
	n, kills := *inboxEvents, *inboxKills
	db := open(t, r.Dialect, r.Address)
	db.exec(t, "CREATE TABLE effects (n INTEGER PRIMARY KEY, times INTEGER NOT NULL)")
	store, err := inbox.NewSQL(inbox.SQLConfig{Dialect: r.Dialect, DB: db.DB})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.Migrate(t.Context()); err != nil {
		t.Fatal(err)
	}
	server := natstest.Start(t)
	r.URL = server.URL()
	bus, err := jetstream.Open(t.Context(), jetstream.Config{URL: r.URL, AckWait: 3 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	p := bus.NewPublisher()
	for i := range n {
		err := p.PublishAsync(t.Context(), "t", fmt.Append(nil, i), jetstream.PublishOptions{}, func(_ jetstream.Receipt, err error) {
			if err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = bus.Close()

	began := time.Now()
	children := [2]*natstest.Child{}
	for i := range children {
		children[i] = natstest.StartChild(t, "consumer", r, nil)
		if !children[i].AwaitReady() {
			t.Fatal("a consumer does not start")
		}
	}
	done := func() int { return db.number(t, "SELECT COUNT(*) FROM effects") }
	for kill := range kills {
		// the kills are spread over the first nine tenths of the events
		eventuallyWithin(t, 5*time.Minute, "progress", func() bool { return done() >= n*9*kill/kills/10 })
		if kill%4 == 3 {
			server.Kill()
			server.Start()
			continue
		}
		i := kill % len(children)
		children[i].Kill()
		children[i] = natstest.StartChild(t, "consumer", r, nil)
		if !children[i].AwaitReady() {
			t.Fatal("a consumer does not start")
		}
	}
	eventuallyWithin(t, 5*time.Minute, "all events have effects", func() bool { return done() >= n })
	if bus, err = jetstream.Open(t.Context(), jetstream.Config{URL: r.URL, AckWait: 3 * time.Second}); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bus.Close() }()
	eventuallyWithin(t, 5*time.Minute, "all events are settled", func() bool {
		left, err := bus.Group("t", "g").Backlog(t.Context())
		return err == nil && left.Waiting == 0 && left.Leased == 0 && left.Floor >= left.Tail
	})
	took := time.Since(began)
	for _, c := range children {
		c.Kill()
	}
	twice := db.number(t, "SELECT COUNT(*) FROM effects WHERE times <> 1")
	if got := done(); got != n || twice != 0 {
		t.Errorf("%d events have %d effects, %d of them more than once", n, got, twice)
	}
	t.Logf("%d events in %v (%.0f a second), %d kills", n, took.Round(time.Millisecond), float64(n)/took.Seconds(), kills)
}

func eventuallyWithin(tb testing.TB, limit time.Duration, what string, ask func() bool) {
	tb.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !ask() {
		select {
		case <-tick.C:
		case <-deadline:
			tb.Fatalf("waited in vain: %s", what)
		}
	}
}
