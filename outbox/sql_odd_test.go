package outbox_test

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"eventhub/jetstream"
	"eventhub/outbox"
	"eventhub/outbox/pgtest"
)

// Rows of one lane that have the same sequence number, as a sequence that was set back gives out,
// follow each other by their ids, and hold up no other lane.
func TestRowsWithTheSameSequence(t *testing.T) {
	t.Parallel()
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	insert := func(seq int, topic, key string, ids ...string) {
		t.Helper()
		for _, id := range ids {
			query := "INSERT INTO " + tableOf(db) + " (seq, id, aggregatetype, aggregateid, payload) VALUES ($1, $2, $3, $4, '1')"
			if _, err := db.ExecContext(t.Context(), query, seq, id, topic, key); err != nil {
				t.Fatal(err)
			}
			r.added[topic+"/"+key] = append(r.added[topic+"/"+key], id)
		}
	}
	insert(1_000, "orders", "a", "m1", "m3")
	insert(1_001, "orders", "a", "b")
	insert(1_000, "orders", "b", "m4")
	insert(1_000, "orders", "", "m5", "m6")
	r.add("mails", "k")
	insert(1_000, "orders", "a", "m2")
	r.added["orders/a"] = []string{"m1", "m2", "m3", "b"}
	if did := r.drain(nil); did.Published != 8 || did.Failed+did.Parked != 0 {
		t.Errorf("got %+v, want 8 published", did)
	}
	r.exactly()

	// The rest of a lane waits for each of them.
	insert(2_000, "orders", "c", "t1", "t2", "t3", "t4")
	insert(2_001, "orders", "c", "t0")
	r.bus.set(refuse("t2"), nil)
	if did := r.drain(func(c *outbox.Config) { c.MaxAttempts = 1 }); did.Published != 1 || did.Parked != 1 {
		t.Errorf("got %+v, want 1 published and 1 parked", did)
	}
	if did := r.drain(nil); did != (outbox.Drained{}) {
		t.Errorf("behind what is parked: %+v", did)
	}
	if did := r.drain(func(c *outbox.Config) { c.PassErrors = true }); did.Published != 3 {
		t.Errorf("past what is parked: %+v, want 3 published", did)
	}
	if got, want := r.stored()["orders/c"], []string{"t1", "t3", "t4", "t0"}; !slices.Equal(got, want) {
		t.Errorf("the lane has %q, want %q", got, want)
	}
}

// Many rows with the same sequence number in a lane are claimed in order too, as many at a time as
// any others.
func TestManyRowsWithTheSameSequence(t *testing.T) {
	t.Parallel()
	const rows = 1_000
	s, db := newPostgres(t, pgtest.Start(t))
	r := newRig(t, sqlHarness(s, db), openBus(t, jetstream.Config{}))
	query := fmt.Sprintf("INSERT INTO %s (seq, id, aggregatetype, aggregateid, payload) SELECT 7, 'r' || lpad(i::text, 5, '0'), 'orders', 'k', '1' FROM generate_series(1, %d) AS n (i)", tableOf(db), rows)
	if _, err := db.ExecContext(t.Context(), query); err != nil {
		t.Fatal(err)
	}
	for i := range rows {
		r.added["orders/k"] = append(r.added["orders/k"], fmt.Sprintf("r%05d", i+1))
	}
	if did := r.drain(nil); did.Published != rows {
		t.Errorf("got %+v, want %d published", did, rows)
	}
	r.exactly()
}

// A row that is too large for the bus is parked and says why, and no drainer loads what it holds.
func TestRowsThatAreTooLargeAreParkedUnread(t *testing.T) {
	const size = 12 << 20
	inTurnForSQL(t, func(t *sqlTest) {
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		long := fmt.Sprintf("repeat('x', %d)", size)
		if t.dialect == outbox.SQLite {
			long = fmt.Sprintf("hex(zeroblob(%d))", size/2)
		}
		quoted := "'\"' || " + long + " || '\"'"
		for _, row := range []struct{ column, value string }{
			{"payload", quoted},
			{"headers", "'{\"x\":' || " + quoted + " || '}'"},
			{"attributes", "'{\"sid\":' || " + quoted + " || '}'"},
			{"type", long},
		} {
			columns, values := "id, aggregatetype, payload", "'large "+row.column+"', 'orders', '1'"
			if row.column == "payload" {
				values = "'large payload', 'orders', " + row.value
			} else {
				columns, values = columns+", "+row.column, values+", "+row.value
			}
			if _, err := t.db.ExecContext(t.Context(), "INSERT INTO "+t.table+" ("+columns+") VALUES ("+values+")"); err != nil {
				t.Fatal(err)
			}
		}
		r.add("orders", "")
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if did := r.drain(nil); did.Published != 1 || did.Parked != 4 || did.Failed != 0 {
			t.Errorf("got %+v, want 1 published and 4 parked", did)
		}
		list, err := t.store.List(t.Context(), outbox.ListOptions{Status: outbox.Errored})
		runtime.ReadMemStats(&after)
		if err != nil || len(list) != 4 {
			t.Fatalf("parked are %d, %v; want 4", len(list), err)
		}
		for _, rec := range list {
			column := strings.TrimPrefix(rec.ID, "large ")
			if !strings.Contains(rec.LastErr, column) || !strings.Contains(rec.LastErr, "bytes, at most ") || rec.Attempts != 1 {
				t.Errorf("%s: %d attempts, last_err %q", rec.ID, rec.Attempts, rec.LastErr)
			}
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > size/2 {
			t.Errorf("%d MiB were allocated to park 4 rows of %d MiB and to list them", took>>20, size>>20)
		}
		r.exactly()
	})
}

// SQLite writes a row anew as a whole when its status changes. One that is larger than any event is
// refused.
func TestRowsTooLargeForSQLiteAreRefused(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	const huge = "'\"' || hex(zeroblob(40000000)) || '\"'"
	if err := s.Add(t.Context(), db, &outbox.Record{ID: "good", Topic: "orders"}); err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{
		"INSERT INTO outbox (aggregatetype, payload) VALUES ('orders', " + huge + ")",
		"UPDATE outbox SET headers = " + huge,
	} {
		if _, err := db.ExecContext(t.Context(), query); err == nil || !strings.Contains(err.Error(), "text_of_at_most_64_MiB") {
			t.Errorf("%s: %v", query, err)
		}
	}
	if got := claimAll(t, s); !slices.Equal(got, []string{"good"}) {
		t.Errorf("claimed were %q", got)
	}
}

// Names that are too long for the indexes are refused: SQLite has no bound of its own.
func TestLongNamesAreRefused(t *testing.T) {
	t.Parallel()
	s, db := newSQLite(t)
	const long = "hex(zeroblob(40000))"
	for column, row := range map[string]string{"id": long + ", 'orders', ''", "aggregatetype": "'a', " + long + ", ''", "aggregateid": "'b', 'orders', " + long} {
		if _, err := db.ExecContext(t.Context(), "INSERT INTO outbox (id, aggregatetype, aggregateid, payload) VALUES ("+row+", '1')"); err == nil || !strings.Contains(err.Error(), "names_of_at_most_64_KiB") {
			t.Errorf("%s: %v", column, err)
		}
	}
	if err := s.Add(t.Context(), db, &outbox.Record{ID: "good", Topic: "orders"}); err != nil {
		t.Fatal(err)
	}
	if _, err := db.ExecContext(t.Context(), "UPDATE outbox SET id = "+long); err == nil {
		t.Error("an update was taken")
	}
	if got := claimAll(t, s); !slices.Equal(got, []string{"good"}) {
		t.Errorf("claimed were %q", got)
	}
}

// Rows that the database refuses to change are the trouble of their lane alone.
func TestLaneThatCannotBeClaimed(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		t.store.Hasten()
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		refuse := []string{"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " WHEN NEW.id = 'bad' BEGIN SELECT RAISE(ABORT, 'not this one'); END"}
		allow := "DROP TRIGGER refuse"
		if t.dialect == outbox.PostgreSQL {
			refuse = []string{
				"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$",
				"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " FOR EACH ROW WHEN (NEW.id = 'bad') EXECUTE FUNCTION refuse()",
			}
			allow = "DROP FUNCTION refuse CASCADE"
		}
		for _, q := range append(refuse, "INSERT INTO "+t.table+" (id, aggregatetype, aggregateid, payload) VALUES ('bad', 'orders', 'b', '1')") {
			if _, err := t.db.ExecContext(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
		behind := r.add("orders", "b")
		for i := range 30 {
			r.add("orders", fmt.Sprint("c", i%3))
			r.add("mails", "")
		}
		r.start(nil)
		eventually(t, "all others are published", func() bool { return r.seen.published.Load() == 60 })
		if n := r.seen.unclaimed.Load(); n == 0 {
			t.Error("the observer is not told")
		}
		r.add("mails", "k")
		eventually(t, "others that come later, too", func() bool { return r.seen.published.Load() == 61 })
		if _, err := t.db.ExecContext(t.Context(), allow); err != nil {
			t.Fatal(err)
		}
		r.empty()
		r.added["orders/b"] = []string{"bad", behind}
		r.exactly()
	})
}
