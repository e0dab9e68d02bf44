package outbox_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"eventhub/jetstream"
	"eventhub/outbox"
)

// A row that the database refuses to settle, for example because of a user's trigger, affects only
// its own lane.
func TestLaneThatCannotBeSettled(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		r := newRig(t, sqlHarness(t.store, t.db), openBus(t, jetstream.Config{}))
		allow := refuseUpdate(t, "NEW.id = 'bad' AND NEW.status = 'sent'")
		if _, err := t.db.ExecContext(t.Context(), "INSERT INTO "+t.table+" (id, aggregatetype, aggregateid, payload) VALUES ('bad', 'orders', 'b', '1')"); err != nil {
			t.Fatal(err)
		}
		r.added["orders/b"] = []string{"bad"}
		for i := range 30 {
			r.add("orders", fmt.Sprint("c", i%3))
			r.add("mails", "")
		}
		r.start(nil)
		eventually(t, "all others are settled", func() bool { return r.left() == 1 })
		r.add("mails", "k")
		eventually(t, "another is published", func() bool { return r.seen.published.Load() >= 62 })
		eventually(t, "others that come later, too", func() bool { return r.left() == 1 })
		if r.seen.unsettled.Load() == 0 {
			t.Error("the observer is not told")
		}
		allow()
		r.empty()
		r.exactly()
	})
}

// refuseUpdate makes the database refuse updates of rows that meet a condition, until allow is
// called.
func refuseUpdate(t *sqlTest, when string) (allow func()) {
	t.Helper()
	refuse, drop := []string{"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " WHEN " + when + " BEGIN SELECT RAISE(ABORT, 'not this one'); END"}, "DROP TRIGGER refuse"
	if t.dialect == outbox.PostgreSQL {
		refuse = []string{
			"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$",
			"CREATE TRIGGER refuse BEFORE UPDATE ON " + t.table + " FOR EACH ROW WHEN (" + when + ") EXECUTE FUNCTION refuse()",
		}
		drop = "DROP FUNCTION refuse CASCADE"
	}
	exec := func(q string) {
		if _, err := t.db.ExecContext(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	for _, q := range refuse {
		exec(q)
	}
	return func() { exec(drop) }
}

// Rows that the database refuses to change keep others neither from being settled, nor from being
// renewed, nor from coming back after their leases.
func TestRefusedRowsAffectNoOther(t *testing.T) {
	t.Parallel()
	forSQL(t, func(t *sqlTest) {
		const rows = 20
		for i := range rows {
			if err := t.store.Add(t.Context(), t.db, &outbox.Record{ID: fmt.Sprintf("id-%02d", i), Topic: "orders", Key: fmt.Sprint("k", i%10)}); err != nil {
				t.Fatal(err)
			}
		}
		c, err := t.store.Claim(t.Context(), outbox.ClaimOptions{Worker: "w", Limit: rows, Lease: time.Hour})
		if err != nil || len(c.Records) != rows {
			t.Fatalf("claimed %d, %v", len(c.Records), err)
		}
		allow := refuseUpdate(t, "NEW.id IN ('id-03', 'id-07')")
		lost, err := t.store.Renew(t.Context(), "w", time.Millisecond, slices.Clone(c.Records))
		if slices.Sort(lost); err != nil || !slices.Equal(lost, []string{"id-03", "id-07"}) {
			t.Errorf("not renewed are %q, %v", lost, err)
		}
		// the rest of a lane stays with what is refused
		left, err := t.store.Settle(t.Context(), "w", outbox.Settlement{Sent: c.Records})
		if err != nil || len(left.Failed) != 2 || left.Failed[0].Lane != "orders/k3" || left.Failed[1].Lane != "orders/k7" || len(left.Refused.Sent) != 4 || len(left.Locked.Sent) > 0 {
			t.Errorf("left are %+v, %v", left, err)
		}
		requeued := 0
		eventually(t, "the others come back when their leases have ended", func() bool {
			n, err := t.store.RequeueExpired(t.Context())
			requeued += n
			return err != nil || requeued == 2
		})
		allow()
		if _, err := t.db.ExecContext(t.Context(), "UPDATE "+t.table+" SET lease_until = 1, status = 'claimed' WHERE status <> 'sent'"); err != nil {
			t.Fatal(err)
		}
		refuseUpdate(t, "NEW.id = 'id-03'")
		if n, err := t.store.RequeueExpired(t.Context()); n != 3 || err == nil || !strings.Contains(err.Error(), "not this one") {
			t.Errorf("beside one that is refused, requeued were %d, %v", n, err)
		}
	})
}
