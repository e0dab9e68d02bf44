package outbox_test

import (
	"database/sql"
	"slices"
	"testing"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// A transaction that took its number early and commits late: what it added is neither skipped nor
// does it hold up others.
func TestRowsCommittedOutOfOrderAreNotSkipped(t *testing.T) {
	t.Parallel()
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	begin := func(records ...*outbox.Record) *sql.Tx {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = tx.Rollback() })
		for _, rec := range records {
			if err := s.Add(t.Context(), tx, rec); err != nil {
				t.Fatal(err)
			}
		}
		return tx
	}
	late := begin(&outbox.Record{ID: "late-a", Topic: "orders", Key: "a"}, &outbox.Record{ID: "late-b", Topic: "orders", Key: "b"}, &outbox.Record{ID: "late-", Topic: "orders"})
	rolledBack := begin(&outbox.Record{Topic: "orders", Key: "a"}, &outbox.Record{Topic: "orders"})
	r.start(nil)
	first := r.add("orders", "a")
	eventually(t, "the younger one is published", func() bool { return slices.Equal(r.stored()["orders/a"], []string{first}) })
	if err := rolledBack.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := late.Commit(); err != nil {
		t.Fatal(err)
	}
	last := r.add("orders", "a")
	r.empty()
	r.added["orders/a"] = []string{first, "late-a", last}
	r.added["orders/b"] = []string{"late-b"}
	r.added["orders/"] = []string{"late-"}
	r.exactly()
}

// The statements work behind a pooler that keeps no session, where the driver prepares nothing.
func TestWithoutPreparedStatements(t *testing.T) {
	t.Parallel()
	address := pgtest.Start(t)
	for _, mode := range []string{"exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			s, db := newPostgres(t, address+"&default_query_exec_mode="+mode)
			r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
			bad := r.add("orders", "b")
			r.bus.set(refuse(bad), nil)
			for range 10 {
				r.add("orders", "a")
			}
			r.start(func(c *outbox.Config) { c.MaxAttempts = 2 })
			eventually(t, "one is parked", func() bool { return r.stats().Errors == 1 && r.left() == 0 })
			r.bus.set(nil, nil)
			if n, err := s.Retry(t.Context(), bad); n != 1 || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
			r.empty()
			r.exactly()
			if n, err := s.Purge(t.Context(), outbox.PurgeOptions{Status: outbox.Sent}); n != 11 || err != nil {
				t.Fatalf("%d, %v", n, err)
			}
		})
	}
}

// Plain SQL can add a row whose id is empty. It is parked, for each publish of it would be another
// event.
func TestEmptyIDIsParked(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, payload) VALUES ('', 'orders', '1')"); err != nil {
		t.Fatal(err)
	}
	r.add("orders", "")
	if got := r.drain(nil); got.Published != 1 || got.Parked != 1 {
		t.Errorf("got %+v, want one published and one parked", got)
	}
	r.exactly()
}
